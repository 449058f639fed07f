"""One autograd node per op where nothing else fuses: eager calls on a CPU.

A formula in ordinary PyTorch is what the compiler, DTensor and torch.func want. Run as it stands, it costs a pass over
memory per operation and an autograd node per pass. So a torch backend may have both, the formula and the passes written
out, and `node` chooses at the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["constant", "node", "plain", "traced"]

Results = tuple[torch.Tensor, ...]


def constant(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compiler.assume_constant_result does, which imports the whole compiler to set one attribute: 0.9 s."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def traced(x: torch.Tensor) -> bool:
    """Whether a compiler, torch.func or x itself (DTensor, a fake tensor) looks through a call on x."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in (torch.Tensor, torch.nn.Parameter)
        or torch._C._are_functorch_transforms_active()
    )


def plain(x: torch.Tensor) -> bool:
    """Whether a call on x is eager, on a CPU, and nothing looks through it."""
    return x.device.type == "cpu" and not traced(x)


def node(
    formula: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Callable[..., tuple[torch.Tensor | None, ...]],
    *,
    residuals: Sequence[str] = (),
    grads: Sequence[str],
) -> Callable[..., Any]:
    """`formula` where it is looked through, else `forward` and `backward` as one node: one differentiable function.

    `formula` and `forward` take the same arguments and give the same results, an output and the `residuals`. `backward`
    takes the output's gradient, then by name what it needs of arguments and residuals, and gives the gradients of the
    arguments in `grads`. Neither ever has a graph to keep, so they may work in place on what they made themselves.
    A derivative of the derivative goes through `formula` again.
    """
    names = list(inspect.signature(formula).parameters)
    wants = list(inspect.signature(backward).parameters)[1:]

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Results:
            results = forward(*args)
            known = dict(zip((*names, *residuals), (*args, *results[1:]), strict=True))
            tensors = {n: v for n, v in known.items() if v is None or isinstance(v, torch.Tensor)}
            ctx.save_for_backward(*tensors.values())
            ctx.tensors, ctx.scalars = tuple(tensors), {n: v for n, v in known.items() if n not in tensors}
            ctx.mark_non_differentiable(*results[1:])
            ctx.set_materialize_grads(False)  # no zeros for residuals, which backward does not read
            return results

        @staticmethod
        def backward(ctx: Any, *douts: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            if douts[0] is None:
                return (None,) * len(names)
            known = ctx.scalars | dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
            made: dict[str, torch.Tensor | None]
            needed = [n for n, needs in zip(names, ctx.needs_input_grad, strict=True) if needs]
            if torch.is_grad_enabled():
                y, inputs = formula(*(known[n] for n in names))[0], [known[n] for n in needed]
                made = dict(zip(needed, torch.autograd.grad(y, inputs, douts[0], create_graph=True), strict=True))
            else:
                made = dict(zip(grads, backward(douts[0], **{n: known[n] for n in wants}), strict=True))
            return tuple(made[n] if n in needed else None for n in names)

    def run(*args: Any) -> Results:
        if not plain(args[0]):
            return formula(*args)
        return Node.apply(*args) if torch.is_grad_enabled() else forward(*args)

    return run
