"""What is minimised. The loss of an optimizer step is the sum over its target tokens, divided by their number over all
micro-batches: a micro-batch with few targets weighs little, as it would if all were one batch.

Pretraining, continued pretraining and SFT are the same objective; which tokens count is in the batch's targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from bagu import ops
from bagu.errors import BaguError
from bagu.nn.model import Transformer
from bagu.types import IGNORE, Batch

__all__ = ["LanguageModelling", "Objective", "Share", "Totals"]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Host counts over all micro-batches of a step; nothing is read from the device for them."""

    tokens: int
    targets: int
    target_bytes: int
    padding: int

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> Totals:
        batches = tuple(batches)
        totals = cls(
            tokens=sum(b.num_tokens for b in batches),
            targets=sum(b.num_targets for b in batches),
            target_bytes=sum(b.target_bytes for b in batches),
            padding=sum(b.num_padding for b in batches),
        )
        if totals.targets == 0:  # 0 / 0: a mean over no token is NaN, and would be blamed on the model
            raise BaguError(
                f"a step of {totals.tokens} tokens has no target that counts",
                hint="look at the loss mask: are the assistant's turns marked, and are they inside the context?",
            )
        return totals

    def bits_per_byte(self, nll: float) -> float | None:
        """From the mean negative log-likelihood per target, in nats; None where the bytes are not known."""
        return nll * self.targets / math.log(2) / self.target_bytes if self.target_bytes else None


class Share(NamedTuple):
    """What one micro-batch adds to its step: shares sum to the step's values."""

    loss: torch.Tensor  # to call backward on
    nll: torch.Tensor  # of the targets alone: no z-loss, no balance loss; no gradient
    expert_load: tuple[torch.Tensor, ...] = ()  # tokens per expert, for each MoE layer


class Objective(Protocol):
    """A loss. It sees one micro-batch and the totals of the whole step, by which it divides."""

    def __call__(self, model: Transformer, batch: Batch, totals: Totals) -> Share: ...


@dataclass(frozen=True, kw_only=True)
class LanguageModelling:
    """Cross-entropy of the next (or masked) token, with a z-loss of this weight, plus the model's balance loss."""

    z_loss: float = 0.0

    def __call__(self, model: Transformer, batch: Batch, totals: Totals) -> Share:
        out = model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len)
        weights = torch.full(batch.targets.shape, 1 / totals.targets, dtype=torch.float32, device=batch.targets.device)
        loss, target_logit, lse = ops.linear_cross_entropy_loss(
            out.hidden, model.head_weight, batch.targets, weights, ignore_index=IGNORE, z_loss=self.z_loss
        )
        # an ignored token has 0 for both, see token_losses
        nll = loss.detach() if self.z_loss == 0 else (lse - target_logit).sum() / totals.targets
        if out.aux_loss is not None:
            loss = loss + out.aux_loss * (batch.num_tokens / totals.tokens)
        return Share(loss=loss, nll=nll, expert_load=out.expert_load)
