"""The losses of models with images: contrastive for two towers, next token for a vision-language model, and rewarded
answers of one.

A micro-batch holds packed texts and the images that belong to them. `contrastive_nll` never has a matrix of batch by
batch; the negatives of a pair are those of its micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bagu import ops
from bagu.nn.vision.group import Grouped
from bagu.train.loss import Loss, Metrics, MicroBatchLoss, Totals
from bagu.train.objectives.contrastive import MASKED, contrastive_nll
from bagu.types import IGNORE


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Packed names of things, and which of the images show them."""

    ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    max_len: int
    present: torch.Tensor  # [B, N] bool

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Names:
        names = ("ids", "positions", "cu_seqlens", "present")
        return replace(self, **{n: getattr(self, n).to(device, non_blocking=non_blocking) for n in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureBatch:
    """Images, one per text, and packed texts. `targets` are None for two towers; `names` are for those that group."""

    images: torch.Tensor  # [B, 3, S, S] uint8
    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    cu_seqlens: torch.Tensor  # [B + 1] int32
    max_len: int
    targets: torch.Tensor | None = None  # [T] int64, IGNORE where nothing is learned: images, questions
    num_targets: int = 0
    weights: torch.Tensor | None = None  # [targets]: the advantages of sampled answers
    reward: float = 0.0  # mean over the sampled answers
    num_padding: int = 0
    names: Names | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> PictureBatch:
        names = [
            n
            for n in ("images", "ids", "positions", "cu_seqlens", "targets", "weights", "names")
            if getattr(self, n) is not None
        ]
        return replace(self, **{n: getattr(self, n).to(device, non_blocking=non_blocking) for n in names})


def packed_texts(texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The fields of a PictureBatch for texts of token ids."""
    lengths = torch.tensor([len(t) for t in texts])
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    ids = torch.tensor([i for t in texts for i in t])
    positions = torch.arange(len(ids)) - ends[:-1].repeat_interleave(lengths)
    return {"ids": ids, "positions": positions, "cu_seqlens": ends.int(), "max_len": int(lengths.max())}


@dataclass(frozen=True, kw_only=True)
class PictureTotals(Totals):
    units: int  # pairs, or target tokens
    reward: float = 0.0  # mean over the sampled answers

    @classmethod
    def of(cls, batches: Sequence[PictureBatch], units: int) -> PictureTotals:
        return cls(tokens=sum(b.num_tokens for b in batches), padding=0, units=units)


def names_nll(groups: torch.Tensor, names: torch.Tensor, present: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Nats, the mean over the names that the images show: each must be found in some group of the image. groups are
    [B, G, D] and names [N, D], unit vectors, present[B, N]. The logit of a name is the soft maximum over the groups;
    its rivals are the names that the image does not show, and the images that do not show it."""
    logits = torch.logsumexp(scale * groups @ names.T, 1)
    others = logits.masked_fill(present, MASKED)
    nll = [torch.logaddexp(logits, others.logsumexp(dim, keepdim=True)) - logits for dim in (0, 1)]
    return (nll[0] + nll[1])[present].mean() / 2


class TowersLoss(Loss[PictureBatch, PictureTotals]):
    """InfoNCE of images and texts: the mean over both directions and the pairs of a step. With names of the things in
    the images, half of it is theirs: the multi-label loss of GroupViT, over the groups instead of their mean."""

    def totals(self, batches: Sequence[PictureBatch]) -> PictureTotals:
        return PictureTotals.of(batches, sum(len(b.images) for b in batches))

    def __call__(self, model: Any, batch: PictureBatch, totals: PictureTotals) -> MicroBatchLoss:
        seen = model.image(batch.images)
        images = model.shared(seen.pooled)
        texts = model.text_vectors(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len)
        nll = contrastive_nll(images.float(), texts.float(), model.scale.float())
        loss = nll.sum() / totals.units
        metrics = {"nll": loss.detach()}
        if (names := batch.names) is not None:
            named = model.text_vectors(names.ids, names.positions, names.cu_seqlens, names.max_len).float()
            groups = seen.groups if isinstance(seen, Grouped) else seen.pooled.unsqueeze(1)
            own = names_nll(model.shared(groups).float(), named, names.present, model.scale.float())
            metrics["names"] = (own * len(batch.images) / totals.units).detach()
            loss = loss + own * len(batch.images) / totals.units
        return MicroBatchLoss(loss=loss, metrics=metrics)

    def metrics(self, loss: float, sums: Mapping[str, float], totals: PictureTotals) -> Metrics:
        named = {"names_nats": sums["names"]} if "names" in sums else {}
        return {"loss_nats": sums["nll"], **named, "pairs": totals.units}


class AnswerLoss(Loss[PictureBatch, PictureTotals]):
    """Cross-entropy of the answers' tokens: images and questions are read, not learned."""

    def totals(self, batches: Sequence[PictureBatch]) -> PictureTotals:
        return PictureTotals.of(batches, sum(b.num_targets for b in batches))

    def __call__(self, model: Any, batch: PictureBatch, totals: PictureTotals) -> MicroBatchLoss:
        assert batch.targets is not None
        out = model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len, images=batch.images)
        learned = batch.targets != IGNORE
        own, lse = ops.linear_cross_entropy(out.hidden[learned], model.decoder.head_weight, batch.targets[learned])
        nll = lse - own
        loss = (nll if batch.weights is None else nll * batch.weights).sum() / totals.units
        return MicroBatchLoss(loss=loss, metrics={"nll": nll.detach().sum() / totals.units})

    def metrics(self, loss: float, sums: Mapping[str, float], totals: PictureTotals) -> Metrics:
        return {"loss_nats": sums["nll"], "targets": totals.units}


class RewardedLoss(AnswerLoss):
    """Cross-entropy of sampled answers, each weighted by its advantage. A step without advantages changes nothing."""

    def totals(self, batches: Sequence[PictureBatch]) -> PictureTotals:
        idle = not any(b.weights is not None and bool(b.weights.any()) for b in batches)
        return replace(super().totals(batches), idle=idle, reward=sum(b.reward for b in batches) / len(batches))

    def metrics(self, loss: float, sums: Mapping[str, float], totals: PictureTotals) -> Metrics:
        """Of an idle step only the reward is known."""
        known = {} if totals.idle else super().metrics(loss, sums, totals)
        return {**known, "reward_share": totals.reward}
