"""A backend's forward and backward as one autograd node, for calls that are neither traced nor intercepted.

Eager training runs this hundreds of times per step, so the path from the call to the launch is short: launches are
replayed (replay/), and the arguments of the backward are found by index (link.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from bagu.ops.call.eager import autocasting, once_differentiable, saved_tensor_hooks
from bagu.ops.call.link import Backward, Forward, Link, received, selective
from bagu.ops.contract.core import OpSpec
from bagu.ops.replay.launcher import Launcher
from bagu.ops.replay.plan import Results
from bagu.ops.replay.replay import Host, Repeated, Replayed, Route, kind_of, remember


class Node:
    """An op on a backend as a differentiable function: takes positional values, returns its outputs, followed by
    residuals if no gradient is needed.

    It creates one autograd node, or none if no gradient is needed. With a launcher, repeated calls are replayed.
    """

    def __init__(
        self, spec: OpSpec, backend: str, forward: Forward, backward: Backward | None, launcher: Launcher | None = None
    ) -> None:
        self.host, self.launcher, self.outputs = forward_host(spec, forward), launcher, len(spec.sig.outputs)
        self.first, self.mutated = spec.first, [spec.names.index(name) for name in spec.mutates]
        self.kinds: dict[tuple[Any, ...], Repeated] = {}
        self.backward = None if backward is None else _Backward(spec, backward, launcher)
        self.apply = None if self.backward is None else _function(spec, backend, self.backward)

    def __call__(self, *values: Any) -> Results:
        kind, pointers = kind_of(values) if self.launcher is not None else ([], [])
        calls = self.kinds.get(key := tuple(kind)) or remember(self.kinds, key, Repeated(self.host, self.launcher))
        return self.apply(calls, pointers, *values) if self.apply and self.wanted(values) else calls(values, pointers)

    def route(self, values: Sequence[Any]) -> Route:
        """The function that runs the calls of one kind, that of `values`; on a CPU of any kind."""
        route: Route
        if not values[self.first].is_cuda:
            route = lambda values, pointers: self(*values)  # noqa: E731
        elif self.wanted(values):  # depends only on the kind of a GPU call
            apply, calls = self.apply, Repeated(self.host, self.launcher)
            assert apply is not None
            route = lambda values, pointers: apply(calls, pointers, *values)  # noqa: E731
        else:  # a replay allocates no tensors for the residuals
            route = Repeated(lambda values: self.host(values)[: self.outputs], self.launcher)
        return route if not self.mutated else _counting_changes(route, self.mutated)

    def wanted(self, values: Sequence[Any]) -> bool:
        """Whether a gradient is needed."""
        asked = any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
        return self.backward is not None and asked and torch.is_grad_enabled()


def _counting_changes(run: Route, mutated: Sequence[int]) -> Route:
    """Raise the version of the tensors that a kernel changes in place, as torch's own operations do: a backward that
    saved one of them before then raises instead of computing with the new values."""

    def route(values: Sequence[Any], pointers: Sequence[int]) -> Any:
        results = run(values, pointers)
        changed = [t for t in map(values.__getitem__, mutated) if t is not None and not t.is_inference()]
        torch.autograd.graph.increment_version(changed)
        return results

    return route


class _Backward(Replayed):
    """The backward of a node. It takes which inputs need a gradient, then the values that `received` lists, and returns
    the gradients."""

    def __init__(self, spec: OpSpec, backward: Backward, launcher: Launcher | None) -> None:
        self.link = Link.of(spec)
        made = backward_host(spec, backward)

        def host(values: Sequence[Any]) -> Results:
            wanted, *given = values
            return self.link.hand_out(wanted, made((self.link.needs(wanted), *given)))

        super().__init__(host, lambda: launcher)

    def after(
        self,
        forward: Repeated | None,
        wanted: Sequence[bool],
        douts: Sequence[torch.Tensor | None],
        saved: Sequence[torch.Tensor | None],
        scalars: Sequence[Any],
    ) -> Results:
        """The gradients after a forward of this kind, or of any if it is None. After a known forward, the kind of a
        backward is that of the incoming gradients; looking at all saved tensors takes as long as four launches."""
        values = (wanted, *douts, *saved, *scalars)
        if forward is None or forward.launcher is None or torch._C._len_torch_dispatch_stack():
            return self(*values)
        kind, pointers = kind_of(douts)
        calls = self.kinds.get(key := (forward, wanted, *kind))
        if calls is None:
            calls = remember(self.kinds, key, Repeated(self.host, forward.launcher))
        pointers += [t.data_ptr() for t in saved if t is not None]
        return calls(values, pointers)


def _function(spec: OpSpec, backend: str, back: _Backward) -> Callable[..., Results]:
    """The autograd.Function of the node; it takes the `Repeated` of the kind, the pointers, and then the inputs."""
    link, several, inputs, outputs = back.link, len(back.link.flows) > 1, len(spec.names), len(spec.sig.outputs)

    def forward(ctx: Any, calls: Repeated, pointers: Sequence[int], *values: Any) -> Any:
        results: Any = calls(values, pointers)
        link.keep(ctx, values, results, outputs)
        ctx.calls = calls if saved_tensor_hooks(True) is None else None  # a hook may return other strides
        # By default autograd fills zeros for every result without a gradient: one launch for each residual, which no
        # backward reads. That is half of LayerNorm's four launches, and in linear_cross_entropy_loss as many bytes as
        # the weight has. It still does so for the custom ops, where a compiler drops the zeros.
        ctx.set_materialize_grads(False)
        if several:
            ctx.kinds = [(results[i].shape, results[i].dtype, results[i].device) for i in link.flows]
        return results[:outputs]  # autograd would wrap every residual

    @once_differentiable(spec.name)
    def backward(ctx: Any, *douts: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [douts[i] for i in link.flows]
        if given[0] is None and all(g is None for g in given):
            return (None,) * (2 + inputs)
        if several:  # the caller may have used only some of the outputs
            for i, (shape, dtype, device) in enumerate(ctx.kinds):
                if given[i] is None:
                    given[i] = torch.zeros(shape, dtype=dtype, device=device)
        return None, None, *back.after(ctx.calls, ctx.needs_input_grad[2:], given, ctx.saved_tensors, ctx.scalars)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    # made by `type`, so that grad_fn has the op's name in error messages and profiles
    function: Any = type(f"{spec.name}_{backend}", (torch.autograd.Function,), members)
    # skips Function.apply's check for torch.func, 3 us: dispatch.py never calls a node under torch.func
    apply: Callable[..., Results] = super(torch.autograd.Function, function).apply
    return apply


def paired(spec: OpSpec, forward: Forward, backward: Backward | None) -> Callable[..., Any]:
    """Combine a forward and a backward, possibly of different backends or tunings, into a differentiable function."""
    run = Node(spec, "pair", forward, backward if spec.grads else None)

    def call(**args: Any) -> Any:
        outputs = run(*(args[a.name] for a in spec.sig.inputs))[: len(spec.sig.outputs)]
        return outputs[0] if len(outputs) == 1 else outputs

    return call


def forward_host(spec: OpSpec, forward: Forward) -> Host:
    """A backend's forward as a function of the values in the signature's order."""
    names, first = [a.name for a in spec.sig.inputs], spec.sig.inputs.index(spec.sig.tensors[0])
    mutated = [names.index(name) for name in spec.mutates]

    def run(values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        with _on(values[first]), _uncast(values[first]):
            given = _resolved(values)
            results = tuple(spec.apply(forward, dict(zip(names, given, strict=True))))
            for i in mutated:
                if given[i] is not values[i]:  # a copy without the lazy negation
                    values[i].copy_(given[i])
            return results

    return run


def backward_host(spec: OpSpec, backward: Backward) -> Host:
    """A backend's backward as a function of the needed gradients (flags) and the values that `received` lists."""
    names, chooses = [a.name for a in received(spec)], selective(backward)

    def run(values: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
        needs, *given = values
        more = {"needs": dict(zip(spec.made, needs, strict=True))} if chooses else {}
        with _on(given[0]), _uncast(given[0]):
            return tuple(spec.apply(backward, dict(zip(names, _resolved(given), strict=True)), **more))

    return run


def _on(x: torch.Tensor) -> AbstractContextManager[None]:
    """Make x's device the current one: a Triton kernel runs on the current device, wherever its tensors are."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else nullcontext()


def _uncast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Turn torch.autocast off, so that a call gives the same result inside and outside it."""
    return torch.autocast(x.device.type, enabled=False) if autocasting(x) else nullcontext()


def _resolved(values: Sequence[Any]) -> list[Any]:
    """The values with lazy negations and conjugations resolved: a kernel reads raw memory and would ignore them."""
    lazy = [isinstance(v, torch.Tensor) and (v.is_neg() or v.is_conj()) for v in values]
    return [v.resolve_neg().resolve_conj() if late else v for v, late in zip(values, lazy, strict=True)]
