"""One autograd node per op for eager calls on a CPU, where nothing else fuses the formula.

The compiler, DTensor and torch.func need a formula in ordinary PyTorch. In eager mode that formula costs one pass over
memory per operation and one autograd node per pass. So a torch backend may have both the formula and a hand-written
forward and backward with fewer passes; `node` chooses between them at each call.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagu.errors import BackendError

Results = tuple[torch.Tensor, ...]


def _unknown_hooks(ignore_is_tracing: bool) -> tuple[None, None]:
    """For a torch without the private function: there may be hooks. A backward then finds its kind from all its tensors
    (node.py), and a checkpointed block is not found, so its second run does not repeat the choice of its first
    (scope.py)."""
    return None, None


# The innermost hooks on saved tensors, which torch.utils.checkpoint sets; None if there are none.
saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", _unknown_hooks)


def constant(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compiler.assume_constant_result without its 0.9 s: it imports the whole compiler to set one attribute."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def force_eager() -> contextlib.AbstractContextManager[Any]:
    """torch.compiler.set_stance("force_eager"), without importing the compiler where nothing can be compiled yet."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def traced(x: torch.Tensor) -> bool:
    """Whether a compiler, torch.func, forward-mode AD or a tensor subclass (DTensor, fake tensor) traces the call."""
    return torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter) or _differentiates()


def transformed() -> bool:
    """Whether torch.func or forward-mode AD is active in eager code: both need ordinary PyTorch, not our node."""
    return not torch.compiler.is_compiling() and _differentiates()


def _differentiates() -> bool:
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def autocasting(x: torch.Tensor) -> bool:
    """Whether torch.autocast would change the dtype of products on x's device."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return False  # asking for one device takes 4 us
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def without_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fn` to run with torch.autocast off, so that a backward gives the same gradients inside and outside it."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        if x is None or not autocasting(x):
            return fn(*args, **kwargs)
        with torch.autocast(x.device.type, enabled=False):
            return fn(*args, **kwargs)

    return run


class _NoSecond(torch.autograd.Function):
    """Return the first `count` tensors unchanged; raise if a derivative with respect to the others is requested."""

    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: torch.Tensor) -> Results:
        ctx.op = op
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise BackendError(
            f"{ctx.op}: a second derivative was asked for, and this backend is once_differentiable",
            hint="write the op out in PyTorch where you need derivatives of its gradients",
        )


def once_differentiable(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for the backward of an autograd.Function that cannot be differentiated again.

    PyTorch's decorator of the same name raises only in `backward()`: `torch.autograd.grad` finds no path from the
    gradient to the inputs and drops the term silently. Here the gradients stay connected to the saved tensors.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, *douts: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # compiled code raises by itself
                return backward(ctx, *douts)
            with torch.no_grad():
                grads = backward(ctx, *douts)
            made = [g for g in grads if g is not None]
            sources = [t for t in (*ctx.saved_tensors, *douts) if t is not None and t.requires_grad]
            refusing = iter(_NoSecond.apply(op, len(made), *made, *sources))
            return tuple(None if g is None else next(refusing) for g in grads)

        return run

    return decorate


def plain(x: torch.Tensor) -> bool:
    """Whether a call on x is eager, on a CPU, and not traced."""
    return x.is_cpu and not traced(x)


def node(
    formula: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Callable[..., tuple[torch.Tensor | None, ...]],
    *,
    residuals: Sequence[str] = (),
    grads: Sequence[str],
) -> Callable[..., Any]:
    """A differentiable function: `formula` if the call is traced, else `forward` and `backward` as one autograd node.

    `formula` and `forward` take the same arguments and return the same results: an output and the `residuals`.
    `backward` takes the output's gradient and, by name, the arguments and residuals it needs; it returns the gradients
    of the arguments in `grads`. `forward` and `backward` run without a graph, so they may modify their own temporaries
    in place. A second derivative differentiates `formula`.
    """
    names = list(inspect.signature(formula).parameters)
    wants = list(inspect.signature(backward).parameters)[1:]

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Results:
            results = forward(*args)
            ctx.save_for_backward(*[v if isinstance(v, torch.Tensor) else None for v in args], *results[1:])
            ctx.scalars = [None if isinstance(v, torch.Tensor) else v for v in args]
            ctx.mark_non_differentiable(*results[1:])
            ctx.set_materialize_grads(False)  # no zeros for residuals, which backward does not read
            return results

        @staticmethod
        @without_autocast
        def backward(ctx: Any, *douts: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            if douts[0] is None:
                return (None,) * len(names)
            known = dict(zip((*names, *residuals), ctx.saved_tensors, strict=True))
            known |= {n: v for n, v in zip(names, ctx.scalars, strict=True) if v is not None}
            made: dict[str, torch.Tensor | None]
            needed = [n for n, needs in zip(names, ctx.needs_input_grad, strict=True) if needs]
            if torch.is_grad_enabled():
                y, inputs = formula(*(known[n] for n in names))[0], [known[n] for n in needed]
                made = dict(zip(needed, torch.autograd.grad(y, inputs, douts[0], create_graph=True), strict=True))
            else:
                made = dict(zip(grads, backward(douts[0], **{n: known[n] for n in wants}), strict=True))
            return tuple(made[n] if n in needed else None for n in names)

    # skips Function.apply's check for torch.func, for which `plain` is false
    apply: Callable[..., Results] = super(torch.autograd.Function, Node).apply

    @functools.wraps(formula)
    def run(*args: Any, **named: Any) -> Results:
        if named:
            args = (*args, *[named[n] for n in names[len(args) :]])
        if not plain(args[0]):
            return formula(*args)
        if torch.is_grad_enabled():
            for v in args:
                if isinstance(v, torch.Tensor) and v.requires_grad:
                    return apply(*args)
        return forward(*args)

    return run
