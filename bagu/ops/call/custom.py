"""Register a backend's forward and backward as `torch.library` custom ops, for calls that are traced or intercepted.

A compiler, fake tensors, a FLOP counter and selective recomputation see `bagu::<op>_<backend>` and
`bagu::<op>_<backend>_backward`. Their schemas and fake functions come from the spec's signature. A custom op costs 0.1
to 0.2 ms of Python per call, more than most kernels take at the sizes of a small model. So for calls that are neither
traced nor intercepted, node.py runs the same two functions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagu.ops.call.eager import traced
from bagu.ops.call.link import Backward, Forward, Link, received, selective
from bagu.ops.call.node import backward_host, forward_host
from bagu.ops.contract.core import OpSpec
from bagu.ops.kernels.launch import empty_like

Run = Callable[..., Any]  # takes positional values; returns None, a tensor or a tuple of tensors


def needs_custom_op(values: Sequence[Any]) -> bool:
    """Whether a call on these arguments is traced or intercepted, so that it must run as a custom op."""
    if torch.compiler.is_compiling():  # first: the compiler cannot trace the other two
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or any(traced(v) for v in values if isinstance(v, torch.Tensor))


def register(spec: OpSpec, backend: str, forward: Forward, backward: Backward | None) -> None:
    """Register the custom ops of a backend: the forward, and, if the op has gradients, the backward with autograd."""
    name, run = f"bagu::{spec.name}_{backend}", forward_host(spec, forward)
    schema = spec.sig.schema(spec.sig.inputs, len(spec.sig.results), spec.mutates)
    op = torch.library.custom_op(name, lambda *values: _returned(run(values)), mutates_args=spec.mutates, schema=schema)
    op.register_fake(_fake_forward(spec))
    if not spec.grads:
        return
    assert backward is not None, f"{spec.name} has gradients, and its {backend} backend has no backward"
    schema = spec.sig.schema(received(spec), len(spec.made)).replace("(", "(bool[] needs, ", 1)
    torch.library.custom_op(
        f"{name}_backward", _backward(spec, backward), mutates_args=(), schema=schema
    ).register_fake(_fake_backward(spec, selective(backward)))
    link, grad_op = Link.of(spec), getattr(torch.ops.bagu, f"{spec.name}_{backend}_backward")

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        link.keep(ctx, inputs, results := listed(output), len(results))

    def backward_of(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        made = grad_op(list(link.needs(wanted)), *(douts[i] for i in link.flows), *ctx.saved_tensors, *ctx.scalars)
        return link.hand_out(wanted, listed(made))

    torch.library.register_autograd(name, backward_of, setup_context=keep)


def _returned(results: Sequence[torch.Tensor | None]) -> Any:
    """Results as a custom op returns them: None, one tensor, or a tuple."""
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def listed(returned: Any) -> Sequence[torch.Tensor]:
    """The inverse of `_returned`."""
    return () if returned is None else returned if isinstance(returned, (tuple, list)) else (returned,)


def _backward(spec: OpSpec, backward: Backward) -> Run:
    run = backward_host(spec, backward)

    def op(needs: list[bool], *values: Any) -> Any:
        grads = run((tuple(needs), *values))
        return _returned([values[0].new_empty(0) if g is None else g for g in grads])  # an op must return tensors

    return op


def _fake_forward(spec: OpSpec) -> Run:
    names = [a.name for a in spec.sig.inputs]
    return lambda *values: _returned(spec.empty_results(dict(zip(names, values, strict=True))))


def _fake_backward(spec: OpSpec, selective: bool) -> Run:
    names, sig = [a.name for a in received(spec)], spec.sig
    by_name = {t.name: t for t in (*sig.tensors, *sig.results)}

    def fake(needs: list[bool], *values: Any) -> Any:
        args = dict(zip(names, values, strict=True))
        known = {o: args[f"d{o}"] for o in spec.differentiable} | {s: args[s] for s in spec.saves}
        dims = sig.measure(known, {s.name: args[s.name] for s in sig.scalars})
        there = [g for g in spec.made if g not in known or known[g] is not None]
        if any(name not in dims for g in there for _, name in by_name[g].dims if name):
            assert spec.derive is not None, f"{spec.name}: nothing the backward is given has the dims of its gradients"
            dims |= spec.derive(args, dims)
        found = []
        for g, needed in zip(spec.made, needs, strict=True):
            gone = (g in known and known[g] is None) or (selective and not needed)
            dtype = known[g].dtype if known.get(g) is not None else values[0].dtype
            if g in spec.like_first and not gone:
                found.append(empty_like(known[g]))
            else:
                found.append(values[0].new_empty(0 if gone else by_name[g].shape(dims), dtype=dtype))
        return _returned(found)

    return fake
