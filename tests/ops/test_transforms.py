"""The torch backends under what transforms a call: second derivatives, autocast, torch.func, forward mode, make_fx."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import bagu.ops
from bagu.errors import BackendError
from bagu.ops.call.dispatch import call
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case, OpSpec, Streams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = [pytest.param(s, id=s.name) for s in SPECS.values()]
GRADS = [pytest.param(s, id=s.name) for s in SPECS.values() if s.grads]
ONCE = {  # without a second derivative, by the op that refuses it
    "attention": "attention", "encoder_layer": "attention", "linear_cross_entropy": "linear_cross_entropy",
    "linear_cross_entropy_loss": "linear_cross_entropy_loss", "self_attention": "attention",
}  # fmt: skip
# Graphs of PyTorch's own nodes: a backward that alone is inside autocast has PyTorch's autocast products.
PLAIN_PRODUCTS = {"encoder_layer", "group_assign", "linear_attention", "matmul", "mlp", "self_attention"}


def arguments(spec: OpSpec, dtype: torch.dtype = torch.float64, case: Case | None = None) -> dict[str, Any]:
    case = case or spec.cases[0]
    return spec.cast(case, spec.inputs(case, Streams(spec.name)), dtype)


def tensors(out: Any) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def flowing(spec: OpSpec, args: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The differentiable outputs of a call."""
    out = tensors(call(spec, "torch", **args))
    return tuple(y for y, o in zip(out, spec.sig.outputs, strict=True) if o.name in spec.differentiable)


def leaves(spec: OpSpec, args: dict[str, Any]) -> list[str]:
    return [g for g in spec.grads if args[g] is not None]


def loss(spec: OpSpec, args: dict[str, Any]) -> torch.Tensor:
    streams = Streams(spec.name)
    return sum(
        ((y * streams.normal(str(i), *y.shape).to(y)).sum() for i, y in enumerate(flowing(spec, args))),
        torch.zeros(()),
    )


@pytest.mark.parametrize("spec", GRADS)
def test_a_second_derivative_is_true_or_refused(spec: OpSpec) -> None:
    args = arguments(spec)
    names = leaves(spec, args)
    values = tuple(args[n].clone().requires_grad_() for n in names)
    check = lambda: torch.autograd.gradgradcheck(  # noqa: E731
        lambda *v: flowing(spec, args | dict(zip(names, v, strict=True))), values, fast_mode=True
    )
    if spec.name in ONCE:
        with pytest.raises(BackendError, match=f"{ONCE[spec.name]}: a second derivative"):
            check()
    else:
        assert check()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_gradient_penalty_is_refused_also_where_backward_is_not_called(backend: str) -> None:
    """`torch.autograd.grad` leaves out a term that it finds no way through; PyTorch's once_differentiable has none."""
    hidden, weight = (torch.randn(4, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    total, *_ = bagu.ops.linear_cross_entropy_loss(
        hidden, weight, torch.arange(4, device=DEVICE), torch.ones(4, device=DEVICE), backend=backend
    )
    (dhidden,) = torch.autograd.grad(total, hidden, create_graph=True)
    with pytest.raises(BackendError, match="second derivative"):
        torch.autograd.grad(hidden.sum() + dhidden.square().sum(), hidden)


@contextmanager
def autocast(on: bool) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
        yield


@pytest.mark.parametrize("spec", GRADS)
@pytest.mark.parametrize("inside", [(False, True), (True, False), (True, True)], ids=["backward", "forward", "both"])
def test_autocast_changes_neither_results_nor_gradients(spec: OpSpec, inside: tuple[bool, bool]) -> None:
    if spec.name in PLAIN_PRODUCTS and inside == (False, True):
        pytest.skip("a graph of PyTorch's own nodes, whose products are PyTorch's to autocast")
    args = arguments(spec, torch.float32)
    names = leaves(spec, args)

    def run(forward: bool, backward: bool) -> tuple[torch.Tensor, ...]:
        values = [args[n].clone().requires_grad_() for n in names]
        with autocast(forward):
            outputs = flowing(spec, args | dict(zip(names, values, strict=True)))
        douts = [Streams(spec.name).normal(str(i), *y.shape).to(y) for i, y in enumerate(outputs)]
        with autocast(backward):
            return *outputs, *torch.autograd.grad(outputs, values, douts)

    for got, want in zip(run(*inside), run(False, False), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)  # fp32's own tolerance; bf16 products are 2^-9 off


# A NaN beside an ignored token: transforms take a path of their own in some torch backends.
IGNORING = [
    pytest.param(s, c, id=f"{s.name}-{c}")
    for s in SPECS.values()
    for c in s.cases
    if s.grads and c.name == "unweighted"
]


@pytest.mark.parametrize(("spec", "case"), [*(pytest.param(*p.values, None, id=p.id) for p in GRADS), *IGNORING])
def test_torch_func_grad(spec: OpSpec, case: Case | None) -> None:
    args = arguments(spec, case=case)
    names = leaves(spec, args)
    values = tuple(args[n] for n in names)
    of = lambda *v: loss(spec, args | dict(zip(names, v, strict=True)))  # noqa: E731
    got, value = torch.func.grad_and_value(of, argnums=tuple(range(len(names))))(*values)
    asked = [v.clone().requires_grad_() for v in values]
    want = of(*asked)
    torch.testing.assert_close(value, want.detach())
    torch.testing.assert_close(got, torch.autograd.grad(want, asked))


@pytest.mark.parametrize("spec", [p for p in ALL if not p.values[0].mutates])
def test_vmap_over_the_first_tensor(spec: OpSpec) -> None:
    args, name = arguments(spec), spec.sig.tensors[0].name
    both = torch.stack([args[name], args[name].flip(0)])
    got = tensors(torch.vmap(lambda x: call(spec, "torch", **args | {name: x}))(both))
    for i, x in enumerate(both):
        for g, w in zip(got, tensors(call(spec, "torch", **args | {name: x})), strict=True):
            torch.testing.assert_close(g[i], w)


@pytest.mark.parametrize("spec", GRADS)
def test_forward_mode(spec: OpSpec) -> None:
    """The tangent's product with a cotangent is the cotangent's gradient with the tangent."""
    args = arguments(spec)
    name = leaves(spec, args)[0]
    tangent = Streams("tangent").normal("x", *args[name].shape)
    x = args[name].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(spec, args | {name: x}), x)
    with forward_ad.dual_level():
        dual = loss(spec, args | {name: forward_ad.make_dual(args[name], tangent)})
        along = forward_ad.unpack_dual(dual).tangent
    assert along is not None
    torch.testing.assert_close(along, (grad * tangent).sum())


def test_a_kernel_has_no_transforms_and_says_so() -> None:
    x, w = torch.randn(4, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    with pytest.raises(BackendError, match=r"rms_norm: the triton backend has no torch\.func transforms"):
        torch.func.grad(lambda v: bagu.ops.rms_norm(v, w, backend="triton").sum())(x)
    with pytest.raises(BackendError, match="no forward-mode AD"), forward_ad.dual_level():
        bagu.ops.rms_norm(forward_ad.make_dual(x, x), w, backend="triton")


# ops whose torch backends join those of other ops, which are traced with symbolic sizes
JOINED = {"encoder_layer", "mla_attention", "rope_kv_write", "self_attention"}
# One of each kind of output and argument: the same code traces every op, and `make test-full` has all.
TRACED = {"attention", "batch_norm", "gumbel_softmax", "linear_cross_entropy_loss", "lora_add", "rms_norm", "sample"}


@pytest.mark.parametrize(
    "spec", [pytest.param(*p.values, id=p.id, marks=() if p.id in TRACED else pytest.mark.slow) for p in ALL]
)
def test_make_fx_and_fake_tensors_pass(spec: OpSpec) -> None:
    args = arguments(spec, torch.float32)
    names = [t.name for t in spec.sig.tensors if args[t.name] is not None]
    run = lambda *v: call(spec, "torch", **args | dict(zip(names, v, strict=True)))  # noqa: E731
    for mode in ("fake",) if spec.name in JOINED else ("fake", "symbolic"):
        graph = make_fx(run, tracing_mode=mode)(*(args[n] for n in names))
        assert len(graph.graph.nodes) > len(names)
    with FakeTensorMode() as fakes:
        fake = run(*(fakes.from_tensor(args[n]) for n in names))
    for f, y in zip(tensors(fake), tensors(run(*(args[n].clone() for n in names))), strict=True):
        assert f is y is None or (f.shape == y.shape and f.dtype == y.dtype)
