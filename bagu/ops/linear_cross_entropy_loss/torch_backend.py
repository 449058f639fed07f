"""The one-pass loss in PyTorch: one autograd node, whose backward scales the gradients of its forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.call import eager
from bagu.ops.linear_cross_entropy.chunked import EVERY, Kernels
from bagu.ops.linear_cross_entropy.torch_backend import INVARIANT, KERNELS, whole
from bagu.ops.linear_cross_entropy_loss import one_pass
from bagu.ops.linear_cross_entropy_loss.spec import Args

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, *values: Any) -> Results:
        a = Args(*values)
        results = one_pass.forward(a, kernels)
        ctx.save_for_backward(a.hidden, a.weight, *results[3:])
        ctx.mark_non_differentiable(*results[1:])
        if not torch.compiler.is_compiling():  # the compiler removes unused tensors
            ctx.set_materialize_grads(False)  # otherwise each backward fills a tensor of zeros as large as the weight
        ctx.made = a.grad_hidden, a.grad_weight
        return results

    @staticmethod
    @eager.once_differentiable("linear_cross_entropy_loss")  # the gradients from the forward are constants here
    def backward(ctx: Any, *douts: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if douts[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = dict(zip(("hidden", "weight"), ctx.needs_input_grad[1:3], strict=True))
        (_, _, hidden_grad, weight_grad), (grad_hidden, grad_weight) = ctx.saved_tensors, ctx.made
        dhidden, dweight = _scaled(douts[0], hidden_grad, weight_grad, grad_hidden, grad_weight, needs)
        return None, dhidden, dweight, *(None,) * 7


def forward(a: Args) -> Results:
    hidden, targets, ignore_index = a.hidden, a.targets, a.ignore_index
    if eager.transformed():
        target_logit, lse = whole(hidden, a.weight, targets, ignore_index)
        acc = lse.dtype
        weights = (
            KERNELS.mean_weights(targets, ignore_index, acc) if a.token_weights is None else a.token_weights.to(acc)
        )
        loss = KERNELS.loss(target_logit, lse, weights.detach(), targets, a.z_loss, ignore_index)
        return loss, target_logit.detach(), lse.detach(), hidden.new_empty(0), hidden.new_empty(0)
    loss, *rest = _Loss.apply(KERNELS, *a)
    return loss, *(r.detach() for r in rest)  # with torch 2.11, compiled, mark_non_differentiable alone is not enough


def invariant_forward(a: Args) -> Results:
    """Each token's logit and lse are batch-invariant; the loss is a sum over the batch."""
    loss, *rest = _Loss.apply(INVARIANT, *a)
    return loss, *(r.detach() for r in rest)


def backward(
    a: Args,
    dloss: torch.Tensor,
    hidden_grad: torch.Tensor,
    weight_grad: torch.Tensor,
    needs: Mapping[str, bool] = EVERY,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return _scaled(dloss, hidden_grad, weight_grad, a.grad_hidden, a.grad_weight, needs)


def _scaled(
    dloss: torch.Tensor,
    hidden_grad: torch.Tensor,
    weight_grad: torch.Tensor,
    grad_hidden: bool,
    grad_weight: bool,
    needs: Mapping[str, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    one_pass.check_made(needs, grad_hidden=grad_hidden, grad_weight=grad_weight)
    scale = lambda g: (g.to(dloss.dtype) * dloss).to(g.dtype)  # noqa: E731
    return scale(hidden_grad) if needs["hidden"] else None, scale(weight_grad) if needs["weight"] else None
