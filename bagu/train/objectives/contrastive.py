"""Contrastive learning of vectors (InfoNCE): of all passages in the batch, a query is nearest to its own, and the
reverse. `contrastive_nll` is shared by every pair of things that get vectors.

Both directions are `ops.linear_cross_entropy` with the other side as the head, so no matrix of batch by batch exists.
A pair whose query or passage came before in the batch is no negative of its twin: it is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F

from bagu import ops
from bagu.config import ConfigError
from bagu.data import BpeTokenizer, DataConfig, check_vocab
from bagu.data.corpus import PARTS, Selection, SourceConfig
from bagu.data.pairs import PairCorpus, pair_store
from bagu.data.preference_batch import PreferenceBatch
from bagu.data.preference_set import PreferenceSet
from bagu.machine.cache import cache_folder
from bagu.nn import ModelConfig, Transformer
from bagu.runs.display import Curve, Display, Headline
from bagu.train.loss import Loss, Metrics, MicroBatchLoss
from bagu.train.objective import NO_MODELS, Objective, RunSettings
from bagu.train.preference.preference_objective import PreferenceData, PreferenceTotals, preference_data

MASKED = -1e4  # logit of a duplicate: its share of a softmax is 0
IGNORED = -100
MIX, SHIFT = 0x9E3779B97F4A7C15 - 2**64, 29  # of the hash that finds equal texts


def contrastive_nll(
    queries: torch.Tensor, passages: torch.Tensor, scale: float | torch.Tensor, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """[N] nats: the mean over both directions of -log softmax(scale · cosine) at the own partner.

    Rows are unit vectors [N, D]. Where `keep[N]` is False the pair counts in no loss and is no negative of others.
    """
    N, device = len(queries), queries.device
    targets = torch.arange(N, device=device)
    if keep is None:
        keep = torch.ones(N, dtype=torch.bool, device=device)
    targets = torch.where(keep, targets, IGNORED)
    # the mask is a product too: a feature that is 1 in the rows and MASKED in the columns of duplicates; 8 features,
    # not 1, because kernels read rows by 16 bytes
    ones = F.pad(queries.new_ones(N, 1), (0, 7))
    masks = F.pad(torch.where(keep, 0.0, MASKED).to(queries.dtype).unsqueeze(1), (0, 7))
    total = queries.new_zeros(N, dtype=torch.promote_types(queries.dtype, torch.float32))
    for rows, columns in ((queries, passages), (passages, queries)):
        head = torch.cat((columns, masks), 1)
        own, lse = ops.linear_cross_entropy(torch.cat((scale * rows, ones), 1), head, targets, ignore_index=IGNORED)
        total = total + (lse - own) / 2
    return total


def first_of_each(keys: torch.Tensor) -> torch.Tensor:
    """[N] bool: whether no earlier key is equal."""
    order = torch.argsort(keys, stable=True)
    ordered = keys[order]
    first = torch.ones_like(keys, dtype=torch.bool)
    first[order[1:]] = ordered[1:] != ordered[:-1]
    return first


def text_keys(ids: torch.Tensor, positions: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """[count] int64: a hash of the tokens of each packed text."""
    mixed = (ids.long() + 1) * MIX ^ (positions.long() + 1) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> SHIFT)) * MIX
    return torch.zeros(count + 1, dtype=torch.int64, device=ids.device).index_add_(0, segment, mixed)[:count]


@dataclass(frozen=True, kw_only=True)
class Contrastive(Objective[PreferenceBatch]):
    """The vector of a text is the mean of its hidden states, or the last one of a causal model. `temperature` divides
    the cosines; 0.05 is usual. More pairs in a micro-batch (data.rows) are more negatives."""

    kind: Literal["contrastive"] = "contrastive"
    temperature: float = 0.05

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"temperature is {self.temperature}", hint="more than 0; 0.05 is usual")

    def check_run(self, run: RunSettings) -> None:
        if run.sample_every is not None:
            raise ConfigError(
                f"train.sample_every is {run.sample_every}, and an embedder writes no text",
                hint="set train.sample_every=null",
            )

    def corpus(self, name: str, config: SourceConfig, selection: Selection) -> PairCorpus:
        return PairCorpus.of(name, config, selection)

    def data_shape(self, data: DataConfig) -> dict[str, Any]:
        return super().data_shape(data) | {"data.rows": data.rows}

    def read(
        self, corpora: Mapping[str, PairCorpus], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> PreferenceData:
        cache = cache_folder() / "tokens"
        train, held = (
            {
                name: PreferenceSet.of(name, pair_store(c, part, tokenizer, data.context, cache), data, paired=True)
                for name, c in corpora.items()
            }
            for part in PARTS
        )
        for found in train.values():
            check_vocab(found.store, model.vocab_size)
        return preference_data(train, held, corpora, data, mismatched=False)

    def loss(self, model: Transformer, auxiliary: Mapping[str, Transformer] = NO_MODELS) -> ContrastiveLoss:
        return ContrastiveLoss(1 / self.temperature)

    def display(self) -> Display:
        losses = {"loss_nats": "training", "val_loss_nats": "validation"}
        note = "of a pair among those of its batch"
        return Display(
            curves=(Curve(title="Loss", unit="nats per pair", metrics=losses),),
            headlines=(
                Headline(metric="val_loss_nats", name="Validation loss", unit="nats", note=note),
                Headline(metric="loss_nats", name="Training loss", unit="nats", note=note),
            ),
            progress={"loss_nats": "loss {:.3f} nats", "val_loss_nats": "validation {:.3f} nats"},
        )


class ContrastiveLoss(Loss[PreferenceBatch, PreferenceTotals]):
    """The mean over the pairs of a step; the negatives of a pair are those of its micro-batch."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def totals(self, batches: Sequence[PreferenceBatch]) -> PreferenceTotals:
        return PreferenceTotals.of(batches, paired=True)

    def __call__(self, model: Transformer, batch: PreferenceBatch, totals: PreferenceTotals) -> MicroBatchLoss:
        packed, count = batch.batch, batch.num_sequences
        out = model(packed.ids, packed.positions, packed.cu_seqlens, packed.max_len)
        ends = packed.cu_seqlens[1 : count + 1].long()
        segment = torch.bucketize(torch.arange(len(packed.ids), device=ends.device), ends, right=True)
        if model.config.causal:
            pooled = out.hidden[ends - 1].float()
        else:
            hidden = out.hidden.float()
            pooled = hidden.new_zeros(count + 1, hidden.shape[1]).index_add_(0, segment, hidden)[:count]
        units = F.normalize(pooled, dim=1)
        keys = text_keys(packed.ids, packed.positions, segment, count)
        keep = first_of_each(keys[0::2]) & first_of_each(keys[1::2])
        nll = contrastive_nll(units[0::2].contiguous(), units[1::2].contiguous(), self.scale, keep)
        loss = nll.sum() / totals.units
        sums = {"nll": loss.detach(), "kept": keep.sum() / totals.units}
        if out.aux_loss is not None:
            loss = loss + out.aux_loss * (batch.num_tokens / totals.tokens)
        return MicroBatchLoss(loss=loss, metrics=sums, expert_load=out.expert_load)

    def metrics(self, loss: float, sums: Mapping[str, float], totals: PreferenceTotals) -> Metrics:
        return {
            "loss_nats": sums["nll"] / max(sums["kept"], 1e-9),
            "pairs": totals.units,
            "duplicates_percent": 100 * (1 - sums["kept"]),
        }
