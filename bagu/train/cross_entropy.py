"""Cross-entropy of target tokens: the loss of pretraining, fine-tuning and masked language modelling.

The loss of an optimizer step is the sum over its target tokens divided by their number over all micro-batches: a
micro-batch with few targets has a small weight, as it would in one large batch. The data determines which tokens are
targets.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from bagu import ops
from bagu.errors import ArgumentError, BaguError
from bagu.nn.model import Transformer
from bagu.train.loss import Metrics, TokenLoss, TokenValues, Totals
from bagu.train.memory.divided import DividedModel
from bagu.train.memory.divided_forward import divided_nll_sum
from bagu.types import IGNORE, Batch


@dataclass(frozen=True, kw_only=True)
class TargetTotals(Totals):
    """Adds the number of targets of a step, and the bytes of text that they represent (0 if bytes do not apply)."""

    targets: int
    target_bytes: int

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> Self:
        batches = tuple(batches)
        totals = cls(
            tokens=sum(b.num_tokens for b in batches),
            targets=sum(b.num_targets for b in batches),
            target_bytes=sum(b.target_bytes for b in batches),
            padding=sum(b.num_padding for b in batches),
        )
        if totals.targets == 0:  # 0 / 0: the mean over no token is NaN, which would look like an error of the model
            raise BaguError(
                f"a step of {totals.tokens} tokens has no target that counts",
                hint="check the loss mask: are the assistant's turns marked, and are they inside the context?",
            )
        return totals

    def bits_per_byte(self, nll: float) -> float | None:
        """Bits per byte from the mean negative log-likelihood per target, in nats; None if the bytes are not known."""
        return nll * self.targets / math.log(2) / self.target_bytes if self.target_bytes else None


class CrossEntropy(TokenLoss[TargetTotals]):
    """Cross-entropy of the targets, plus a z-loss of weight `z_loss`, plus the model's MoE balance loss.

    Metrics: `loss_nats` is the cross-entropy per target alone, `bits_per_byte` the same per byte of text, and
    `objective_nats` the minimised loss, if it differs.
    """

    metric_names = ("nll",)

    def __init__(self, *, z_loss: float = 0.0) -> None:
        check_z_loss(z_loss)
        self.z_loss = z_loss

    def totals(self, batches: Sequence[Batch]) -> TargetTotals:
        return TargetTotals.of(batches)

    def of_hidden(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        totals: TargetTotals,
        values: TokenValues | None = None,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        weights = torch.full(targets.shape, 1 / totals.targets, dtype=torch.float32, device=targets.device)
        if values is None:
            loss, target_logit, lse = ops.linear_cross_entropy_loss(
                hidden, head, targets, weights, ignore_index=IGNORE, z_loss=self.z_loss
            )
        else:
            target_logit, lse = values(hidden, head, targets)
            loss = (ops.token_losses(target_logit, lse, self.z_loss).loss * weights).sum()
        # target_logit and lse are 0 for an ignored token, see token_losses
        nll = loss.detach() if self.z_loss == 0 else (lse - target_logit).detach().sum() / totals.targets
        return loss, {"nll": nll}

    def metrics(self, loss: float, sums: Mapping[str, float], totals: TargetTotals) -> Metrics:
        nll = sums["nll"]
        values: Metrics = {"loss_nats": nll, "bits_per_byte": totals.bits_per_byte(nll)}
        if loss != nll:  # z-loss or a balance loss was added
            values["objective_nats"] = loss
        return values

    def evaluate(self, model: Transformer | DividedModel, batches: Iterable[Batch]) -> Metrics:
        """The cross-entropy alone, summed in fp64: `val_loss_nats`, and `val_bits_per_byte` where bytes are known."""
        return dict(held_out_loss(lambda: batches)(model))


def check_z_loss(weight: float) -> None:
    """Raise for a negative weight of the z-loss."""
    if weight < 0:
        raise ArgumentError(f"z_loss is {weight}", hint="1e-4 is usual, 0 is none")


@torch.no_grad()
def nll_sum(model: Transformer | DividedModel, batch: Batch) -> torch.Tensor:
    """Summed negative log-likelihood of a batch's targets, in nats, on the model's device."""
    if isinstance(model, DividedModel):
        return divided_nll_sum(model, batch)
    batch = batch.to(model.embedding.weight.device, non_blocking=True)
    hidden = model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len).hidden
    target_logit, lse = ops.linear_cross_entropy(hidden, model.head_weight, batch.targets, ignore_index=IGNORE)
    return (lse - target_logit).double().sum()  # both are 0 for an ignored token


def held_out_loss(
    batches: Callable[[], Iterable[Batch]], *, prefix: str = "val"
) -> Callable[[Transformer | DividedModel], Mapping[str, float]]:
    """An evaluation over the same batches every time: `<prefix>_loss_nats` per target and `<prefix>_bits_per_byte`."""

    def evaluate(model: Transformer | DividedModel) -> Mapping[str, float]:
        total: torch.Tensor | None = None
        targets = size = 0
        for batch in batches():
            nll = nll_sum(model, batch)
            total = nll if total is None else total + nll
            targets, size = targets + batch.num_targets, size + batch.target_bytes
        if total is None:
            raise BaguError("there is no held-out batch to evaluate on", hint="hold out more documents")
        nats = float(total)
        found = {f"{prefix}_loss_nats": nats / targets}
        return found | ({f"{prefix}_bits_per_byte": nats / math.log(2) / size} if size else {})

    return evaluate
