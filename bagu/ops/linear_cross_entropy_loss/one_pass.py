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
from bagu.ops.linear_cross_entropy_loss.spec import Args


def forward(a: Args, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """loss, target_logit, lse, d loss / d hidden, d loss / d weight; a gradient that is not requested is empty."""
    hidden, ignore_index = a.hidden, a.ignore_index
    slopes, V, acc = a.grad_hidden or a.grad_weight, a.weight.shape[0], accumulator(hidden.dtype)
    itemsize = kernels.slope_itemsize(hidden, a.weight) if slopes else acc.itemsize
    h, w, t, spans = operands(hidden, a.weight, a.targets, a.memory, kernels, itemsize)
    weights = (
        kernels.mean_weights(t, ignore_index, acc) if a.token_weights is None else a.token_weights.reshape(-1).to(acc)
    )
    grads = Gradients(w, V, hidden.dtype, len(spans), of_hidden=a.grad_hidden, of_weight=a.grad_weight)
    scores: list[tuple[torch.Tensor, torch.Tensor]] = []
    losses: list[torch.Tensor] = []
    for s in spans:
        words, own = part(t, s), part(weights, s)
        if slopes:
            target_logit, lse, loss, dlogits = kernels.loss_and_slope(
                part(h, s), w, V, words, own, a.z_loss, ignore_index, hidden.dtype
            )
            grads.add(operand(dlogits, hidden.dtype), part(h, s))
            del dlogits  # before the next chunk's logits are computed, or two would exist
        else:
            target_logit, lse = kernels.score(kernels.logits(part(h, s), w)[:, :V], words, ignore_index)
            loss = kernels.loss(target_logit, lse, own, words, a.z_loss, ignore_index)
        scores.append((target_logit, lse))
        losses.append(loss)
    target_logit, lse = (joined([s[i] for s in scores], t.shape, hidden, acc) for i in (0, 1))
    return (
        losses[0] if len(losses) == 1 else torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=acc),
        target_logit.view(a.targets.shape),
        lse.view(a.targets.shape),
        grads.dhidden(hidden.shape) if a.grad_hidden else hidden.new_empty(0),
        grads.dweight() if a.grad_weight else hidden.new_empty(0),
    )


def check_made(needs: Mapping[str, bool], *, grad_hidden: bool, grad_weight: bool) -> None:
    """Raise if a gradient is needed now that the forward did not compute."""
    for name, made in (("hidden", grad_hidden), ("weight", grad_weight)):
        if needs[name] and not made:
            raise ArgumentError(
                f"linear_cross_entropy_loss: the gradient of {name} is wanted, and its forward had grad_{name}=False",
                hint=f"call it with grad_{name}=True; the public function does where {name} requires a gradient",
            )
