"""A backend's two functions as one autograd node: how a kernel is called where nothing looks at the call.

This is what eager training runs, hundreds of times a step, so the way from the call to the launch is short: launches
are replayed (replay.py), what the backward receives is known by place (link.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from bagu.ops.core import OpSpec
from bagu.ops.eager import autocasting, once_differentiable
from bagu.ops.launcher import Launcher
from bagu.ops.link import Backward, Forward, Link, received, selective
from bagu.ops.plan import Results
from bagu.ops.replay import Host, Repeated, kind_of, remember

__all__ = ["Node", "backward_host", "forward_host", "paired"]


class Node:
    """An op on a backend, differentiable, of positional values; gives outputs and residuals.

    One autograd node, or none where no gradient is wanted. With a launcher, calls that come again are replayed.
    """

    def __init__(
        self, spec: OpSpec, backend: str, forward: Forward, backward: Backward | None, launcher: Launcher | None = None
    ) -> None:
        self.host, self.launcher = forward_host(spec, forward), launcher
        self.kinds: dict[tuple[Any, ...], Repeated] = {}
        self.backward = None if backward is None else _Backward(spec, backward, launcher)
        self.apply = None if self.backward is None else _function(spec, backend, self.backward)

    def __call__(self, *values: Any) -> Results:
        kind, pointers = kind_of(values) if self.launcher is not None else ([], [])
        calls = self.kinds.get(key := tuple(kind)) or remember(self.kinds, key, self.repeated())
        return self.run(calls, self.wanted(values), values, pointers)

    def repeated(self) -> Repeated:
        """For the forwards of a kind of call that has not come before."""
        return Repeated(self.host, self.launcher)

    def wanted(self, values: Sequence[Any]) -> bool:
        """Whether a gradient is asked for."""
        asked = any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
        return self.backward is not None and asked and torch.is_grad_enabled()

    def run(self, calls: Repeated, wanted: bool, values: Sequence[Any], pointers: Sequence[int]) -> Results:
        """A call of a known kind."""
        return self.apply(calls, pointers, *values) if wanted and self.apply else calls(values, pointers)


class _Backward:
    """The backward of a node: what `received` says to the gradient of each input."""

    def __init__(self, spec: OpSpec, backward: Backward, launcher: Launcher | None) -> None:
        self.link, self.launcher = Link.of(spec), launcher
        self.kinds: dict[tuple[Any, ...], Repeated] = {}
        made = backward_host(spec, backward)

        def host(values: Sequence[Any]) -> Results:
            wanted, *given = values
            return self.link.hand_out(wanted, made((self.link.needs(wanted), *given)))

        self.host = host

    def __call__(self, *values: Any) -> Results:
        """`values`: which inputs want a gradient, then what `received` says."""
        if self.launcher is None or torch._C._len_torch_dispatch_stack():  # what looks at ops wants to see them
            return self.host(values)
        kind, pointers = kind_of(values)
        calls = self.kinds.get(key := tuple(kind))
        if calls is None:
            calls = remember(self.kinds, key, Repeated(self.host, self.launcher))
        return calls(values, pointers)


def _function(spec: OpSpec, backend: str, back: _Backward) -> Callable[..., Results]:
    """The node as autograd knows it: of a kind's calls and its pointers, and then the inputs."""
    link, several, inputs = back.link, len(back.link.flows) > 1, len(spec.names)

    def forward(ctx: Any, calls: Repeated, pointers: Sequence[int], *values: Any) -> Any:
        results: Any = calls(values, pointers)
        link.keep(ctx, values, results)
        # Left alone, autograd fills zeros for what has no gradient, a launch for each residual that no backward reads:
        # half of LayerNorm's four, and in linear_cross_entropy_loss as many bytes as the weight has. It still does for
        # the custom ops, where a compiler drops them.
        ctx.set_materialize_grads(False)
        if several:
            ctx.kinds = [(results[i].shape, results[i].dtype, results[i].device) for i in link.flows]
        return results

    @once_differentiable(spec.name)
    def backward(ctx: Any, *douts: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [douts[i] for i in link.flows]
        if given[0] is None and all(g is None for g in given):
            return (None,) * (2 + inputs)
        if several:  # outputs of which the caller used only some
            for i, (shape, dtype, device) in enumerate(ctx.kinds):
                if given[i] is None:
                    given[i] = torch.zeros(shape, dtype=dtype, device=device)
        return None, None, *back(ctx.needs_input_grad[2:], *given, *ctx.saved_tensors, *ctx.scalars)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    # by `type`, so that grad_fn carries the op's name in error messages and profiles
    function: Any = type(f"{spec.name}_{backend}", (torch.autograd.Function,), members)
    # Function.apply looks for torch.func first, where no node is ever called (dispatch.py): 3 us
    apply: Callable[..., Results] = super(torch.autograd.Function, function).apply
    return apply


def paired(spec: OpSpec, forward: Forward, backward: Backward | None) -> Callable[..., Any]:
    """A differentiable call out of one forward and one backward, which may come from different backends or tunings."""
    run = Node(spec, "pair", forward, backward if spec.grads else None)

    def call(**args: Any) -> Any:
        outputs = run(*(args[a.name] for a in spec.sig.inputs))[: len(spec.sig.outputs)]
        return outputs[0] if len(outputs) == 1 else outputs

    return call


def forward_host(spec: OpSpec, forward: Forward) -> Host:
    """A backend's forward, of values in the signature's order."""
    names, first = [a.name for a in spec.sig.inputs], spec.sig.inputs.index(spec.sig.tensors[0])

    def run(values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        with _on(values[first]), _uncast(values[first]):
            return tuple(forward(**dict(zip(names, _resolved(values), strict=True))))

    return run


def backward_host(spec: OpSpec, backward: Backward) -> Host:
    """A backend's backward, of which gradients are needed and then what `received` says."""
    names, chooses = [a.name for a in received(spec)], selective(backward)

    def run(values: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
        needs, *given = values
        more = {"needs": dict(zip(spec.made, needs, strict=True))} if chooses else {}
        with _on(given[0]), _uncast(given[0]):
            return tuple(backward(**dict(zip(names, _resolved(given), strict=True)), **more))

    return run


def _on(x: torch.Tensor) -> AbstractContextManager[None]:
    """A Triton kernel runs on the current device, wherever its tensors are: make it theirs."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else nullcontext()


def _uncast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """A call inside torch.autocast gives what it gives outside."""
    return torch.autocast(x.device.type, enabled=False) if autocasting(x) else nullcontext()


def _resolved(values: Sequence[Any]) -> list[Any]:
    """The values with pending negations and conjugations carried out: a kernel reads memory and would not see them."""
    lazy = [isinstance(v, torch.Tensor) and (v.is_neg() or v.is_conj()) for v in values]
    return [v.resolve_neg().resolve_conj() if late else v for v, late in zip(values, lazy, strict=True)]
