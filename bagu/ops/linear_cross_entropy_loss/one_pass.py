"""Loss and gradients of a head in one pass over the tokens, shared by both backends.

A chunk's logits are computed once, read (`score`) and replaced by their gradient (`slope`). The token weights are
known in the forward, and so is this gradient. The backward only multiplies by the incoming scalar.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagu.errors import ArgumentError
from bagu.ops.linear_cross_entropy.chunked import Gradients, Kernels, joined, operand, operands, part
from bagu.ops.signature import accumulator

__all__ = ["check_made", "forward"]


def forward(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, token_weights: torch.Tensor, ignore_index: int,
    z_loss: float, memory: int | None, grad_hidden: bool, grad_weight: bool, kernels: Kernels,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """loss, target_logit, lse, d loss / d hidden, d loss / d weight; a gradient that is not requested is empty."""
    h, w, t, spans = operands(hidden, weight, targets, memory, kernels)
    V, acc = weight.shape[0], accumulator(hidden.dtype)
    weights = token_weights.reshape(-1).to(acc)
    grads = Gradients(w, V, hidden.dtype, len(spans), of_hidden=grad_hidden, of_weight=grad_weight)
    scores: list[tuple[torch.Tensor, torch.Tensor]] = []
    for s in spans:
        logits, words, own = kernels.logits(part(h, s), w)[:, :V], part(t, s), part(weights, s)
        if grad_hidden or grad_weight:
            target_logit, lse, dlogits = kernels.score_and_slope(logits, words, own, z_loss, ignore_index, hidden.dtype)
            grads.add(operand(dlogits, hidden.dtype), part(h, s))
            del dlogits
        else:
            target_logit, lse = kernels.score(logits, words, ignore_index)
        scores.append((target_logit, lse))
        del logits  # before the next chunk's logits are computed, or two would exist
    target_logit, lse = (joined([s[i] for s in scores], t.shape, hidden, acc) for i in (0, 1))
    loss = kernels.losses(target_logit, lse, weights, t, z_loss, ignore_index).sum()
    absent = hidden.new_empty(0)
    return (
        loss,
        target_logit.view(targets.shape),
        lse.view(targets.shape),
        grads.dhidden(hidden.shape) if grad_hidden else absent,
        grads.dweight() if grad_weight else absent.clone(),
    )


def check_made(needs: Mapping[str, bool], *, grad_hidden: bool, grad_weight: bool) -> None:
    """Raise if a gradient is needed now that the forward did not compute."""
    for name, made in (("hidden", grad_hidden), ("weight", grad_weight)):
        if needs[name] and not made:
            raise ArgumentError(
                f"linear_cross_entropy_loss: the gradient of {name} is wanted, and its forward had grad_{name}=False",
                hint=f"call it with grad_{name}=True; the public function does where {name} requires a gradient",
            )
