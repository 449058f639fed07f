"""Each drop-in layer against the torch.nn layer it inherits from: the same state dict, and no larger error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagu import ops
from bagu.nn import drop_in
from bagu.nn.drop_in import layers
from bagu.ops.catalogue import SPECS
from bagu.ops.kernels import launch
from tests.nn.fp64 import assert_as_accurate, results

torch.manual_seed(0)
LAYERS: dict[str, tuple[Callable[[Any], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda m: m.Linear(24, 40), (3, 5, 24)),
    "linear without bias": (lambda m: m.Linear(24, 40, bias=False), (24,)),
    "conv": (lambda m: m.Conv2d(8, 12, 3, stride=2, padding=1), (2, 8, 9, 11)),
    "depthwise conv": (lambda m: m.Conv2d(8, 8, 3, padding=(0, 2), dilation=(1, 2), groups=8), (2, 8, 9, 11)),
    "conv, same": (lambda m: m.Conv2d(4, 4, (2, 3), padding="same"), (1, 4, 6, 6)),
    "conv, reflected": (lambda m: m.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), (1, 4, 6, 6)),
    "conv of one image": (lambda m: m.Conv2d(4, 6, 3), (4, 6, 6)),
    "batch norm": (lambda m: m.BatchNorm2d(6), (4, 6, 5, 5)),
    "batch norm, cumulative": (lambda m: m.BatchNorm2d(6, momentum=None), (4, 6, 5, 5)),
    "batch norm, no statistics": (lambda m: m.BatchNorm2d(6, track_running_stats=False), (4, 6, 5, 5)),
    "batch norm, plain": (lambda m: m.BatchNorm2d(6, affine=False), (4, 6, 5, 5)),
    "layer norm": (lambda m: m.LayerNorm(40), (3, 7, 40)),
    "layer norm over two dims": (lambda m: m.LayerNorm((7, 40)), (3, 7, 40)),
    "layer norm without bias": (lambda m: m.LayerNorm(40, bias=False), (3, 7, 40)),
    "layer norm, plain": (lambda m: m.LayerNorm(40, elementwise_affine=False), (3, 7, 40)),
    "rms norm": (lambda m: m.RMSNorm(40, eps=1e-5), (3, 7, 40)),
    "rms norm, default eps": (lambda m: m.RMSNorm(40), (3, 7, 40)),
    "group norm": (lambda m: m.GroupNorm(3, 12), (2, 12, 5, 6)),
    "encoder layer": (lambda m: m.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True), (2, 6, 32)),
    "encoder layer, norm first": (
        lambda m: m.TransformerEncoderLayer(32, 4, 48, 0.0, "gelu", batch_first=False, norm_first=True),
        (6, 2, 32),
    ),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_numbers_and_state_of_torchs(name: str, training: bool) -> None:
    make, shape = LAYERS[name]
    theirs, ours = make(nn).train(training), make(drop_in).train(training)
    for p in theirs.parameters():
        if p.ndim == 1:  # norms start at 1 and 0, which hides a weight that is not read
            nn.init.normal_(p, 0.5, 0.5)
    assert ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, type(theirs)) and list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(shape)
    want = results(copy.deepcopy(theirs).double(), x.double())
    assert_as_accurate(results(ours, x), results(theirs, x), want)
    for (key, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=key)  # the running statistics


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        {"need_weights": False},
        {"need_weights": True},
        {"need_weights": False, "attn_mask": nn.Transformer.generate_square_subsequent_mask(6), "is_causal": True},
        {"need_weights": False, "key_padding_mask": torch.arange(6).expand(2, 6) > 3},
    ],
    ids=["plain", "weights", "causal", "padding"],
)
def test_multihead_attention(arguments: dict[str, Any], batch_first: bool) -> None:
    theirs = nn.MultiheadAttention(32, 4, batch_first=batch_first)
    ours = drop_in.MultiheadAttention(32, 4, batch_first=batch_first)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 32) if batch_first else torch.randn(6, 2, 32)

    def attend(layer: nn.Module, x: torch.Tensor) -> Any:
        given = {k: v.to(x.dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                 for k, v in arguments.items()}  # fmt: skip
        return layer(x, x, x, **given)

    exact = copy.deepcopy(theirs).double()
    assert_as_accurate(results(ours, x, attend), results(theirs, x, attend), results(exact, x.double(), attend))


def test_cross_attention_and_dropout_run_torchs_forward() -> None:
    theirs, ours = nn.MultiheadAttention(32, 4, dropout=0.5), drop_in.MultiheadAttention(32, 4, dropout=0.5)
    ours.load_state_dict(theirs.state_dict())
    x, memory = torch.randn(6, 2, 32), torch.randn(9, 2, 32)
    found = []
    for layer in (theirs, ours):
        torch.manual_seed(1)
        found += [layer(x, x, x, need_weights=False)[0], layer.eval()(x, memory, memory)[0]]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("name", ["linear", "conv", "batch norm", "layer norm", "rms norm", "group norm"])
def test_autocast_gives_torchs_dtypes_and_numbers(name: str) -> None:
    make, shape = LAYERS[name]
    theirs, ours = make(nn), make(drop_in)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16):
        a, b = ours(x), theirs(x)
    assert a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


def test_int8_linear_is_a_linear_that_rounds_and_trains() -> None:
    exact, layer = nn.Linear(64, 48), drop_in.Int8Linear(64, 48)
    layer.load_state_dict(exact.state_dict())
    x = torch.randn(16, 64)
    error = (layer(x) - exact(x)).norm() / exact(x).norm()
    assert 0 < error < 0.02  # two operands of 8 bits
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    losses = []
    for _ in range(20):
        loss = (layer(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2 and not torch.equal(before, layer.weight)


@pytest.mark.parametrize("name, op", [("linear", "matmul"), ("conv", "conv2d"), ("conv, same", "conv2d")])
def test_on_a_cpu_a_product_is_torchs_own_call_unless_something_is_chosen(name: str, op: str) -> None:
    """Dispatch adds a route for every kind of call it has not seen, so a direct call adds none."""
    make, shape = LAYERS[name]
    theirs, ours, routes = make(nn), make(drop_in), SPECS[op].routes
    ours.load_state_dict(theirs.state_dict())
    routes.clear()
    x = torch.randn(shape)
    y = ours(x)
    assert torch.equal(y, theirs(x)) and y.grad_fn.name() == theirs(x).grad_fn.name() and not routes
    if name == "linear":
        with ops.invariant():
            assert ours(x).grad_fn.name() != y.grad_fn.name() and len(routes) == 1
        checkpoint(ours, x, use_reentrant=False)
        assert len(routes) == 2  # a block stores the choice, for its second forward
        with torch.autocast("cpu", torch.bfloat16):
            assert ours(x).dtype == torch.bfloat16 and len(routes) == 3


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_batch_norm_applies_a_relu_and_keeps_the_memory_format(
    backend: str, memory_format: torch.memory_format, training: bool
) -> None:
    theirs, ours = nn.BatchNorm2d(6), drop_in.BatchNorm2d(6)
    nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 6, 5, 4).contiguous(memory_format=memory_format)

    def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if isinstance(layer, drop_in.BatchNorm2d):
            with ops.use(backend):  # without it a CPU runs torch's forward
                y: torch.Tensor = layer(x, "relu")
                assert y.stride() == x.stride()
                return y
        return nn.functional.relu(layer(x))

    exact = copy.deepcopy(theirs).double()
    found = [results(layer.train(training), v, run) for layer, v in ((ours, x), (theirs, x), (exact, x.double()))]
    assert_as_accurate(*found)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_integers_and_other_inputs_raise_what_torch_raises() -> None:
    for layer in (nn.Linear(4, 4), drop_in.Linear(4, 4)):
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.ones(2, 4, dtype=torch.int64))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_encoder_layer_is_one_op_unless_something_looks_inside(activation: str, norm_first: bool) -> None:
    """On a GPU with few rows; here the torch backend of that op runs."""
    options = {"batch_first": True, "norm_first": norm_first, "activation": activation}
    theirs, ours = (kit.TransformerEncoderLayer(32, 4, 48, **options).eval() for kit in (nn, drop_in))
    for p in theirs.parameters():
        nn.init.normal_(p, 0.1, 0.2)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 32)
    weights = ours._weights(x)
    assert weights is not None
    assert ours.train()._weights(x) is None  # dropout
    with torch.no_grad():
        want = copy.deepcopy(theirs).double()(x.double())
        assert_as_accurate({"": ours.eval()._in_one_op(x, weights)}, {"": theirs(x)}, {"": want})
    for inside in (ours.self_attn, ours.linear2, ours.norm1, ours.dropout):
        hook = inside.register_forward_hook(lambda *_: None)
        assert ours._weights(x) is None
        hook.remove()
    assert ours._weights(x) is not None
    with ops.use("torch"):
        assert ours._weights(x) is None
    ours.linear1.__class__ = drop_in.Int8Linear
    assert ours._weights(x) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "name, few", [*((name, False) for name in LAYERS), *((name, True) for name in LAYERS if "encoder" in name)]
)
def test_on_a_gpu_a_layer_has_torchs_numbers_in_bf16(
    name: str, few: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times: the second call of a kind is recorded, and the third replayed."""
    monkeypatch.setattr(layers, "SMALL", 0)  # run the kernels that large layers run
    if not few:
        monkeypatch.setattr(launch, "FEW", 0)
    make, shape = LAYERS[name]
    theirs, ours = (make(kit).train(training).to("cuda", torch.bfloat16) for kit in (nn, drop_in))
    ours.load_state_dict(theirs.state_dict())
    exact = copy.deepcopy(theirs).double()
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    for _ in range(3):
        assert_as_accurate(results(ours, x), results(theirs, x), results(exact, x.double()))
        with torch.no_grad():
            assert_as_accurate({"": ours(x)}, {"": theirs(x)}, {"": exact(x.double())})
