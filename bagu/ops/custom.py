"""A backend's two functions as one differentiable call: as custom ops, or as a bare autograd node.

Where something looks at a call (a compiler, fake tensors, a FLOP counter, selective recomputation), it is two
`torch.library` custom ops, `bagu::<op>_<backend>` and `bagu::<op>_<backend>_backward`, whose schema and fake function
come from the spec's signature. Their way through Python costs 0.1 to 0.2 ms a call, more than most kernels take at the
sizes of a small model. So where nothing looks, the same two functions run as they are (`node`), with the same link
between them: `_keep` says what the backward receives and `_link` who gets which gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from bagu.ops.core import OpSpec
from bagu.ops.eager import once_differentiable, traced, without_autocast
from bagu.ops.signature import ScalarArg, TensorArg

__all__ = ["node", "paired", "register", "watched"]

Forward = Callable[..., Sequence[torch.Tensor]]
Backward = Callable[..., Sequence[torch.Tensor | None]]
Run = Callable[..., Any]  # of positional values: nothing, one tensor or a tuple of them, as a custom op returns it


def watched(values: Sequence[Any]) -> bool:
    """Whether anything looks at ops on these arguments, so that they must be custom ops."""
    return torch._C._len_torch_dispatch_stack() > 0 or any(traced(v) for v in values if isinstance(v, torch.Tensor))


def register(spec: OpSpec, backend: str, forward: Forward, backward: Backward | None) -> None:
    """Make the custom ops of a backend: a forward, and where there are gradients a backward and the link to it."""
    name = f"bagu::{spec.name}_{backend}"
    schema = spec.sig.schema(spec.sig.inputs, len(spec.sig.results), spec.mutates)
    op = torch.library.custom_op(name, _run_forward(spec, forward), mutates_args=spec.mutates, schema=schema)
    op.register_fake(_fake_forward(spec))
    if not spec.grads:
        return
    assert backward is not None, f"{spec.name} has gradients, and its {backend} backend has no backward"
    schema = spec.sig.schema(_received(spec), len(spec.made)).replace("(", "(bool[] needs, ", 1)
    run = _run_backward(spec, backward)
    torch.library.custom_op(f"{name}_backward", run, mutates_args=(), schema=schema).register_fake(
        _fake_backward(spec, _selective(backward))
    )
    grad_op = getattr(torch.ops.bagu, f"{spec.name}_{backend}_backward")
    torch.library.register_autograd(name, _link(spec, grad_op), setup_context=_keep(spec))


def node(spec: OpSpec, backend: str, forward: Forward, backward: Backward | None) -> Run:
    """The same call without the custom ops: one autograd node, or none where no gradient is asked for."""
    run, keep = _run_forward(spec, forward), _keep(spec)
    if backward is None:
        return run
    link = _link(spec, _run_backward(spec, backward))
    flows = _flows(spec)

    def forward_node(ctx: Any, *values: Any) -> Any:
        results = run(*values)
        keep(ctx, values, results)
        # Left alone, autograd fills zeros for what has no gradient, a launch for each residual that no backward reads:
        # half of LayerNorm's four, and in linear_cross_entropy_loss as many bytes as the weight has. It still does for
        # the custom ops, where a compiler drops them.
        ctx.set_materialize_grads(False)
        if len(flows) > 1:
            ctx.kinds = {i: (results[i].shape, results[i].dtype, results[i].device) for i in flows}
        return results

    @once_differentiable(spec.name)
    def backward_node(ctx: Any, *douts: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = list(douts)
        if all(given[i] is None for i in flows):
            return (None,) * len(spec.sig.inputs)
        if len(flows) > 1:  # outputs of which the caller used only some
            for i, (shape, dtype, device) in ctx.kinds.items():
                if given[i] is None:
                    given[i] = torch.zeros(shape, dtype=dtype, device=device)
        return link(ctx, *given)

    members = {"forward": staticmethod(forward_node), "backward": staticmethod(backward_node)}
    # by `type`, so that grad_fn carries the op's name in error messages and profiles
    Node: Any = type(f"{spec.name}_{backend}", (torch.autograd.Function,), members)

    def call(*values: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
        return Node.apply(*values) if wanted else run(*values)

    return call


def paired(spec: OpSpec, forward: Forward, backward: Backward | None) -> Callable[..., Any]:
    """A differentiable call out of one forward and one backward, which may come from different backends or tunings."""
    run = node(spec, "pair", forward, backward if spec.grads else None)

    def call(**args: Any) -> Any:
        results = run(*(args[a.name] for a in spec.sig.inputs))
        outputs = (results if isinstance(results, tuple) else (results,))[: len(spec.sig.outputs)]
        return outputs[0] if len(outputs) == 1 else outputs

    return call


def _on(x: torch.Tensor) -> AbstractContextManager[None]:
    """A Triton kernel runs on the current device, wherever its tensors are: make it theirs."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else nullcontext()


def _returned(results: Sequence[torch.Tensor]) -> Any:
    """Results as a custom op returns them: nothing, one tensor, or a tuple."""
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def _resolved(values: Sequence[Any]) -> list[Any]:
    """The values with pending negations and conjugations carried out: a kernel reads memory and would not see them."""
    lazy = [isinstance(v, torch.Tensor) and (v.is_neg() or v.is_conj()) for v in values]
    return [v.resolve_neg().resolve_conj() if late else v for v, late in zip(values, lazy, strict=True)]


def _run_forward(spec: OpSpec, forward: Forward) -> Run:
    names, first = [a.name for a in spec.sig.inputs], spec.sig.inputs.index(spec.sig.tensors[0])

    @without_autocast
    def run(*values: Any) -> Any:
        with _on(values[first]):
            return _returned(forward(**dict(zip(names, _resolved(values), strict=True))))

    return run


def _fake_forward(spec: OpSpec) -> Run:
    names = [a.name for a in spec.sig.inputs]
    return lambda *values: _returned(spec.empty_results(dict(zip(names, values, strict=True))))


def _by_name(spec: OpSpec) -> dict[str, TensorArg]:
    return {t.name: t for t in (*spec.sig.tensors, *spec.sig.results)}


def _received(spec: OpSpec) -> list[TensorArg | ScalarArg]:
    """What a backward takes: the gradients of the outputs, what was saved, the scalars."""
    known = _by_name(spec)
    douts = [TensorArg(f"d{o}", known[o].dims, "", False) for o in spec.differentiable]
    return [*douts, *(known[s] for s in spec.saves), *spec.sig.scalars]


def _selective(backward: Backward) -> bool:
    """Whether it can leave out gradients nobody wants."""
    return "needs" in inspect.signature(backward).parameters


def _run_backward(spec: OpSpec, backward: Backward) -> Run:
    names, selective = [a.name for a in _received(spec)], _selective(backward)

    @without_autocast
    def run(needs: list[bool], *values: Any) -> Any:
        more = {"needs": dict(zip(spec.made, needs, strict=True))} if selective else {}
        with _on(values[0]):
            grads = backward(**dict(zip(names, _resolved(values), strict=True)), **more)
        return _returned([values[0].new_empty(0) if g is None else g for g in grads])  # an op returns tensors

    return run


def _fake_backward(spec: OpSpec, selective: bool) -> Run:
    names, by_name, sig = [a.name for a in _received(spec)], _by_name(spec), spec.sig

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
            found.append(values[0].new_empty(0 if gone else by_name[g].shape(dims), dtype=dtype))
        return _returned(found)

    return fake


def _keep(spec: OpSpec) -> Callable[[Any, tuple[Any, ...], Any], None]:
    """Store in the context of a forward what its backward receives."""
    names = [*(a.name for a in spec.sig.inputs), *(r.name for r in spec.sig.results)]
    scalars = [s.name for s in spec.sig.scalars]
    constant = [r.name for r in spec.sig.results if r.name not in spec.differentiable]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, (tuple, list)) else (output,)
        known = dict(zip(names, (*inputs, *results), strict=True))
        ctx.mark_non_differentiable(*(known[n] for n in constant))
        ctx.save_for_backward(*(known[s] for s in spec.saves))
        ctx.scalars = [known[s] for s in scalars]
        ctx.absent = {g for g in spec.grads if known[g] is None}

    return keep


def _flows(spec: OpSpec) -> list[int]:
    """The places of the outputs that gradients flow through."""
    return [i for i, o in enumerate(spec.sig.outputs) if o.name in spec.differentiable]


def _link(spec: OpSpec, grad: Run) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """The gradient of each input, of which `grad` makes those that are wanted."""
    inputs = [a.name for a in spec.sig.inputs]
    positions = {n: i for i, n in enumerate(inputs)}
    flows = _flows(spec)

    def link(ctx: Any, *douts: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted = {g for g in spec.grads if ctx.needs_input_grad[positions[g]] and g not in ctx.absent}
        sources = {spec.twins.get(g, g) for g in wanted}
        made = grad([g in sources for g in spec.made], *(douts[i] for i in flows), *ctx.saved_tensors, *ctx.scalars)
        grads = dict(zip(spec.made, made if isinstance(made, (tuple, list)) else (made,), strict=True))
        return tuple(grads[spec.twins.get(n, n)] if n in wanted else None for n in inputs)

    return link
