"""Loss and gradients of a head in one pass over the tokens, shared by both backends.

A chunk's logits are computed once, read (`score`) and replaced by their gradient (`slope`). The token weights are
known in the forward, and so is this gradient. The backward only multiplies by the incoming scalar.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.signature import accumulator
from bagu.ops.linear_cross_entropy.chunked import Gradients, Kernels, joined, operand, operands, part


def forward(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, token_weights: torch.Tensor | None,
    ignore_index: int, z_loss: float, memory: int | None, grad_hidden: bool, grad_weight: bool, kernels: Kernels,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """loss, target_logit, lse, d loss / d hidden, d loss / d weight; a gradient that is not requested is empty."""
    slopes, V, acc = grad_hidden or grad_weight, weight.shape[0], accumulator(hidden.dtype)
    itemsize = kernels.slope_itemsize(hidden, weight) if slopes else acc.itemsize
    h, w, t, spans = operands(hidden, weight, targets, memory, kernels, itemsize)
    weights = kernels.mean_weights(t, ignore_index, acc) if token_weights is None else token_weights.reshape(-1).to(acc)
    grads = Gradients(w, V, hidden.dtype, len(spans), of_hidden=grad_hidden, of_weight=grad_weight)
    scores: list[tuple[torch.Tensor, torch.Tensor]] = []
    losses: list[torch.Tensor] = []
    for s in spans:
        words, own = part(t, s), part(weights, s)
        if slopes:
            target_logit, lse, loss, dlogits = kernels.loss_and_slope(
                part(h, s), w, V, words, own, z_loss, ignore_index, hidden.dtype
            )
            grads.add(operand(dlogits, hidden.dtype), part(h, s))
            del dlogits  # before the next chunk's logits are computed, or two would exist
        else:
            target_logit, lse = kernels.score(kernels.logits(part(h, s), w)[:, :V], words, ignore_index)
            loss = kernels.loss(target_logit, lse, own, words, z_loss, ignore_index)
        scores.append((target_logit, lse))
        losses.append(loss)
    target_logit, lse = (joined([s[i] for s in scores], t.shape, hidden, acc) for i in (0, 1))
    return (
        losses[0] if len(losses) == 1 else torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=acc),
        target_logit.view(targets.shape),
        lse.view(targets.shape),
        grads.dhidden(hidden.shape) if grad_hidden else hidden.new_empty(0),
        grads.dweight() if grad_weight else hidden.new_empty(0),
    )


def check_made(needs: Mapping[str, bool], *, grad_hidden: bool, grad_weight: bool) -> None:
    """Raise if a gradient is needed now that the forward did not compute."""
    for name, made in (("hidden", grad_hidden), ("weight", grad_weight)):
        if needs[name] and not made:
            raise ArgumentError(
                f"linear_cross_entropy_loss: the gradient of {name} is wanted, and its forward had grad_{name}=False",
                hint=f"call it with grad_{name}=True; the public function does where {name} requires a gradient",
            )
