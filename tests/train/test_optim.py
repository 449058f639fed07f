"""Each update rule against torch.optim's of the same name, or against the formula in fp64 where torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagu.errors import ArgumentError, UnknownName
from bagu.machine.fast_dtype import compute_dtype_name
from bagu.nn.linear import Linear
from bagu.nn.model import Embedding
from bagu.train.memory.flat import ALIGN, FlatParameters, Role
from bagu.train.optim import Optimizer, OptimizerConfig
from bagu.train.optim.muon import _stacks, orthogonalise

# PyTorch's message, with a C++ stack trace, on a CPU without bf16 instructions: the product then runs in BLAS.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
STEPS = 6


class Small(nn.Module):
    """Two matrices of one shape, one of another, a table and two vectors; no size is a multiple of the alignment."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = Embedding(11, 5, dtype=dtype)
        self.linears = nn.ModuleList([Linear(5, 7, bias=True, dtype=dtype), Linear(5, 7, dtype=dtype)])
        self.wide = Linear(7, 3, bias=True, dtype=dtype)
        torch.manual_seed(0)
        for p in self.parameters():
            nn.init.normal_(p)


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    stream = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=stream) for name, p in model.named_parameters()}


def ours(config: OptimizerConfig, *, fused: bool = True, scale: float = 1.0) -> dict[str, torch.Tensor]:
    model = Small()
    flat = FlatParameters(model)
    optimizer = Optimizer(config, flat, fused=fused)
    for step in range(STEPS):
        grads = gradients(model, step)
        for slot in flat.slots:
            slot.of(flat.grad).copy_(grads[slot.name])
        optimizer.update(lr=config.lr, step=step + 1, scale=scale)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def theirs(make: Callable[..., torch.optim.Optimizer], decay: float, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Matrices and tables are decayed, vectors are not: two groups."""
    model = Small()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim == 2], "weight_decay": decay},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = make(groups)
    for step in range(STEPS):
        for name, g in gradients(model, step).items():
            named[name].grad = g * scale
        optimizer.step()
    return {name: p.detach() for name, p in named.items()}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float = 2e-6) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


O = torch.optim
CASES: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({}, lambda p: O.SGD(p, lr=0.05)),
    "momentum": ({"momentum": 0.8}, lambda p: O.SGD(p, lr=0.05, momentum=0.8)),
    "nesterov": ({"momentum": 0.8}, lambda p: O.SGD(p, lr=0.05, momentum=0.8, nesterov=True)),
    "adagrad": ({"eps": 1e-9}, lambda p: O.Adagrad(p, lr=0.05, eps=1e-9)),
    "adadelta": ({"rho": 0.8, "eps": 1e-5}, lambda p: O.Adadelta(p, lr=0.05, rho=0.8, eps=1e-5)),
    "rmsprop": ({"rho": 0.8, "eps": 1e-7}, lambda p: O.RMSprop(p, lr=0.05, alpha=0.8, eps=1e-7)),
    "adam": ({"betas": (0.8, 0.9), "eps": 1e-7}, lambda p: O.Adam(p, lr=0.05, betas=(0.8, 0.9), eps=1e-7)),
    "adamw": ({"betas": (0.8, 0.9), "eps": 1e-7}, lambda p: O.AdamW(p, lr=0.05, betas=(0.8, 0.9), eps=1e-7)),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", CASES)
def test_a_rule_equals_torchs(kind: str, fused: bool) -> None:
    options, make = CASES[kind]
    got = ours(OptimizerConfig(kind=kind, lr=0.05, weight_decay=0.1, **options), fused=fused, scale=0.3)
    assert_close(got, theirs(make, 0.1, scale=0.3))


def test_lion_equals_its_formula_in_fp64() -> None:
    got = ours(OptimizerConfig(kind="lion", lr=0.05, weight_decay=0.1, betas=(0.8, 0.9)))
    model = Small()
    want = {n: p.detach().double() for n, p in model.named_parameters()}
    m = {n: torch.zeros_like(p) for n, p in want.items()}
    for step in range(STEPS):
        for n, g in gradients(model, step).items():
            decay = 0.1 if want[n].ndim == 2 else 0.0
            want[n] -= 0.05 * ((0.8 * m[n] + 0.2 * g).sign() + decay * want[n])
            m[n] = 0.9 * m[n] + 0.1 * g
    assert_close(got, {n: p.float() for n, p in want.items()})


def test_muon_equals_torchs_on_matrices_and_adamw_on_the_rest() -> None:
    got = ours(OptimizerConfig(kind="muon", lr=0.05, weight_decay=0.1, newton_schulz_dtype="bf16"))
    rest = theirs(lambda p: O.AdamW(p, lr=0.05, betas=(0.9, 0.95)), 0.1)
    model = Small()
    matrices = {n: p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith("embed")}
    muon = O.Muon(matrices.values(), lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(STEPS):
        for n, g in gradients(model, step).items():
            if n in matrices:
                matrices[n].grad = g
        muon.step()
    others = rest.keys() - matrices.keys()
    assert_close({n: got[n] for n in others}, {n: rest[n] for n in others})
    # both iterate in bf16, and differ where they divide by the norm
    assert_close({n: got[n] for n in matrices}, {n: p.detach() for n, p in matrices.items()}, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(4, 32, 48), (2, 48, 32), (1, 16, 16)])
def test_newton_schulz_gives_singular_values_near_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalise(x, 5, dtype)
    assert found.dtype == dtype
    values = torch.linalg.svdvals(found.float())
    assert values.min() > 0.3 and values.max() < 1.4  # the quintic does not settle at 1, by design
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    agree = (found.float() * (u @ v)).sum() / (u @ v).square().sum()
    assert 0.7 < agree < 1.2


def test_muon_multiplies_in_the_dtype_that_is_fast_here_and_says_which() -> None:
    """On a CPU without bf16 instructions the first step of a 5.9M model took 126 s in bf16."""
    flat = FlatParameters(Small())
    optimizer = Optimizer(OptimizerConfig(kind="muon"), flat)
    assert optimizer.config.newton_schulz_dtype == compute_dtype_name(flat.device)
    for dtype in ("bf16", "fp32"):  # what was chosen stays chosen
        asked = OptimizerConfig(kind="muon", newton_schulz_dtype=dtype)
        assert Optimizer(asked, flat).config == asked == asked.resolved(flat.device)
    assert OptimizerConfig(kind="adamw").resolved(flat.device).newton_schulz_dtype is None


def test_flat_parameters_keep_values_and_move_with_the_master() -> None:
    model = Small(torch.bfloat16)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    flat = FlatParameters(model)
    assert [s.role for s in flat.segments] == [Role.MATRIX, Role.EMBEDDING, Role.VECTOR]
    assert all(slot.start % ALIGN == 0 for slot in flat.slots)
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]) and p.dtype == torch.bfloat16
        assert torch.equal(flat.masters()[n], before[n].float())
    flat.master += 1
    flat.publish()
    for n, p in model.named_parameters():
        assert torch.equal(p, (before[n].float() + 1).bfloat16())


def test_an_fp32_parameter_is_its_master() -> None:
    model = Small()
    flat = FlatParameters(model)
    flat.master.zero_()
    assert all((p == 0).all() for p in model.parameters())


def test_gradients_sum_in_fp32_and_are_zero_where_there_are_none() -> None:
    model = Small(torch.bfloat16)
    flat = FlatParameters(model)
    weight = model.linears[0].weight
    for first, second in ((1.0, 2.0**-9), (3.0, 2.0**-7)):  # bf16 would lose the second of each
        flat.begin()
        for value in (first, second):
            (weight * value).sum().backward()
            assert weight.grad is None
        norm = flat.finish()
        grads = {slot.name: slot.of(flat.grad) for slot in flat.slots}
        assert (grads["linears.0.weight"] == first + second).all()
        torch.testing.assert_close(norm, torch.tensor(35.0).sqrt() * (first + second))
    flat.begin()
    (model.wide.weight * 1.0).sum().backward()
    flat.finish()
    assert (grads["linears.0.weight"] == 0).all()  # not the last step's
    assert (grads["wide.weight"] == 1).all()


def test_frozen_parameters_are_left_alone_and_released_ones_are_torchs_again() -> None:
    model = Small()
    model.wide.weight.requires_grad_(False)
    where = model.wide.weight.data_ptr()
    flat = FlatParameters(model)
    assert "wide.weight" not in flat.masters() and model.wide.weight.data_ptr() == where
    flat.release()
    (model.linears[0].weight * 1.0).sum().backward()
    assert model.linears[0].weight.grad is not None


def test_state_is_named_by_parameter() -> None:
    model = Small()
    optimizer = Optimizer(OptimizerConfig(kind="muon"), FlatParameters(model))
    tensors = optimizer.tensors()
    assert tensors["velocity/linears.0.weight"].shape == (7, 5)
    assert {"exp_avg/embed.weight", "exp_avg_sq/wide.bias"} <= tensors.keys()
    assert not any("exp_avg/linears.0.weight" in name for name in tensors)


def test_an_option_the_kind_does_not_use_is_refused() -> None:
    with pytest.raises(ArgumentError, match="betas is set, and sgd has no betas"):
        OptimizerConfig(kind="sgd", betas=(0.9, 0.99))
    with pytest.raises(UnknownName, match="adamv"):
        OptimizerConfig(kind="adamv")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"betas\[1\] is 1.0"):
        OptimizerConfig(betas=(0.9, 1.0))
    with pytest.raises(ArgumentError, match="lr"):
        OptimizerConfig(lr=-1.0)


def test_matrices_of_like_layers_are_one_stack() -> None:
    """Every matrix is in one stack, those of equal shape and distance in the same."""

    class Layers(nn.Module):
        def __init__(self, *widths: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(m for w in widths for m in (Linear(8, w), Linear(w, 8), Linear(8, 8)))

    for widths, count in (((16, 16, 16), 3), ((16, 32, 16), 6), ((16,), 3)):
        model = Layers(*widths)
        for p in model.parameters():
            nn.init.normal_(p)
        (segment,) = FlatParameters(model).segments
        stacks = _stacks(segment)
        flat = torch.arange(segment.stop, dtype=torch.float32)
        assert len(stacks) == count, widths
        seen = sorted(int(i) for stack in stacks for i in stack.of(flat).flatten())
        assert seen == sorted(int(i) for slot in segment.slots for i in slot.of(flat, segment.start).flatten())
        for stack in stacks:
            assert all(m.tolist() in [s.of(flat).tolist() for s in segment.slots] for m in stack.of(flat))
