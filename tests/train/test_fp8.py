"""precision=fp8: products of rounded numbers, weights rounded once a step, and the same bits however a step is run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import batches, loader, model

from bagu.errors import ArgumentError
from bagu.nn import fp8
from bagu.nn.config import MoEConfig
from bagu.nn.linear import linears_of
from bagu.nn.lora import add_lora
from bagu.parallel.mesh import MeshConfig
from bagu.train import OptimizerConfig, TrainConfig, TrainState, fit, prepare, step
from bagu.train.memory import fp8 as weights

CONFIG = TrainConfig(steps=12, precision="fp8", optimizer=OptimizerConfig(lr=0.02))


def operands(
    rows: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = (rows, 32), (48, 32), (48,), (rows, 48)
    x, w, b, dy = (torch.randn(*size, generator=draw).to(device, dtype) for size in sizes)
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_(), 1e-4 * dy


@pytest.mark.parametrize(
    "device, dtype",
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("gradient", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("rows", [48, 40])  # 40: padded to a multiple of 16
def test_the_three_products_are_those_of_the_rounded_numbers(
    monkeypatch: pytest.MonkeyPatch, gradient: Any, rows: int, device: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(fp8, "GRADIENT", gradient)
    x, w, b, dy = operands(rows, device, dtype)
    y = fp8.fp8_linear(x, w, fp8.rounded(w.detach()), b)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)

    def exact(v: torch.Tensor, dtype: Any = "float8_e4m3fn") -> torch.Tensor:
        q, _, scale = fp8.rounded(v.detach(), dtype)
        return q.double() * scale.double()

    X, W, G = exact(x), exact(w), exact(dy, gradient)
    for got, want in ((y, X @ W.T + b), (dx, G @ W), (dw, G.T @ X), (db, dy.double().sum(0))):
        # one rounding to the dtype; a GPU's fp8 sums have about 14 bits
        bound = max(torch.finfo(dtype).eps, 2.0**-13 if device == "cuda" else 1e-6)
        torch.testing.assert_close(
            got.double(), want.double(), rtol=bound, atol=bound * float(want.detach().abs().max())
        )
    plain = dy @ w.detach()
    assert 0.01 < float((dx - plain).norm() / plain.norm()) < 0.08  # and they are rounded


def test_a_layer_keeps_a_byte_per_number_of_its_input() -> None:
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x, w, _, _ = operands(64)
    rounded = fp8.rounded(w.detach())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fp8.fp8_linear(x, w, rounded, None)
    assert sum(kept.values()) == 64 * 32 + 48 * 32 + 4 + 4  # x, the weight, two scales


def run(config: TrainConfig, *, micro_batches: int = 2, steps: int = 3, device: str = "cpu") -> dict[str, torch.Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    m = model(dtype, device, head_dim=32, qkv_bias=True, ffn_bias=True)
    state = TrainState(m, config)
    with prepare.prepared(m, config, state.device):
        for s in range(steps):
            step(state, batches(s, micro_batches=micro_batches))
    masters = {n: t.clone() for n, t in state.flat.masters().items()}
    state.close()
    assert all(linear.rounded is None for linear in linears_of(m).values())
    return masters


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", ["selective", "block"])
def test_recomputation_gives_the_same_bits(how: Any, device: str) -> None:
    want = run(CONFIG, device=device)
    got = run(dataclasses.replace(CONFIG, activation_checkpointing=how), device=device)
    unrounded = run(dataclasses.replace(CONFIG, precision=None), device=device)
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert not all(torch.equal(unrounded[n], want[n]) for n in want)


def test_a_weight_is_rounded_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every micro-batch, and not when a block is recomputed."""
    calls = []
    monkeypatch.setattr(weights, "rounded", lambda w: calls.append(w.shape) or fp8.rounded(w))
    run(dataclasses.replace(CONFIG, activation_checkpointing="block"), micro_batches=3, steps=2)
    assert len(calls) == 8 * (1 + 2)  # four linears in each of two layers: at the start and after each update


def test_evaluation_uses_the_weights_themselves() -> None:
    m, (batch,) = model(), batches()
    state = TrainState(m, CONFIG)
    arguments = batch.ids, batch.positions, batch.cu_seqlens, batch.max_len
    with torch.no_grad():
        trained = m.train()(*arguments).hidden
        evaluated = m.eval()(*arguments).hidden
        state.close()
        assert torch.equal(m(*arguments).hidden, evaluated) and not torch.equal(trained, evaluated)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, again = model(dropout=0.1), model(dropout=0.1)
    fit(CONFIG, whole, loader(micro_batches=2))
    fit(CONFIG, model(dropout=0.1), loader(micro_batches=2), folder=tmp_path, pause_after=5)
    fit(CONFIG, again, loader(micro_batches=2), folder=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_a_number_that_is_not_finite_refuses_the_step() -> None:
    state = TrainState(model(), CONFIG)
    with torch.no_grad():
        state.model.embedding.weight[:] = float("inf")
    assert step(state, batches()).skipped is not None


@pytest.mark.slow
def test_it_learns_with_and_without_lora() -> None:
    """As fast as without fp8: the difference of the losses is far below their fall."""

    def losses(precision: Any, lora: bool) -> tuple[float, float]:
        m = model()
        if lora:
            add_lora(m, rank=4, alpha=8.0)
        state = TrainState(m, dataclasses.replace(CONFIG, steps=30, precision=precision))
        found = [step(state, loader().batch(s)).loss for s in range(30)]
        assert not lora or not any(linear.weight.requires_grad for linear in linears_of(m.blocks).values())
        return found[0], found[-1]

    for lora in (False, True):
        (start, end), (_, other) = losses(None, lora), losses("fp8", lora)
        assert start - end > 0.1 and abs(other - end) < 0.1 * (start - end)


@pytest.mark.parametrize(
    "options, word",
    [
        ({"compile": True}, "compile"),
        ({"mesh": MeshConfig(tp=2)}, "tp=2"),
        ({"mesh": MeshConfig(pp=2)}, "pp=2"),
        ({"mesh": MeshConfig(shard=2)}, "ZeRO stage 3"),
    ],
)
def test_what_does_not_go_with_fp8_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ArgumentError, match=f"precision fp8 and .*{word}.* do not go together"):
        TrainConfig(precision="fp8", **options)


def test_models_without_fp8_products_are_refused() -> None:
    experts = MoEConfig(num_experts=4, top_k=2, expert_size=16)
    quantized = model()
    add_lora(quantized, rank=4, alpha=8.0, base="int8")
    for m, word in (
        (model(moe=experts), "mixture of experts"),
        (model(weight_norm=True), "weight normalization"),
        (model(intermediate_size=40), "multiples of 16"),
        (quantized, "int8"),
    ):
        with pytest.raises(ArgumentError, match=word):
            TrainState(m, CONFIG)
