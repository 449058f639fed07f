"""A micro-batch of preferences: whole sequences of prompt and answer, packed. Both sides of a pair are in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bagu.data.loader import DataConfig
from bagu.data.preference_set import PreferenceSet
from bagu.data.sequences import Tokens, pack
from bagu.errors import BaguError
from bagu.types import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceBatch:
    """Sequences of prompt and answer. For pairs, sequence 2i is chosen over sequence 2i + 1.

    `mismatched` has the prompts of the same sequences with the answers of others (for the KL term of KTO).
    """

    batch: Batch
    num_sequences: int
    num_chosen: int
    chosen: torch.Tensor  # [S] bool: the answer is a chosen or good one
    lengths: torch.Tensor  # [S] fp32: tokens of the answer
    reference: torch.Tensor | None = None  # [S] fp32: log-probability of the answer under the reference, if cached
    mismatched: Batch | None = None

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens + (0 if self.mismatched is None else self.mismatched.num_tokens)

    @property
    def num_padding(self) -> int:
        return self.batch.num_padding + (0 if self.mismatched is None else self.mismatched.num_padding)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> PreferenceBatch:
        names = ("batch", "chosen", "lengths", "reference", "mismatched")
        moved = {n: t.to(device, non_blocking=non_blocking) for n in names if (t := getattr(self, n)) is not None}
        return replace(self, **moved)


def batches_of(
    rows: Sequence[tuple[PreferenceSet, np.ndarray]], config: DataConfig, *, mismatched: bool = False
) -> tuple[PreferenceBatch, ...]:
    """A micro-batch of each row of units. The mismatched answer of a sequence is that of the next one in the step."""
    documents = [[(found, int(d)) for d in found.units[units].ravel()] for found, units in rows]
    sequences = [[found.tokens(d) for found, d in row] for row in documents]
    flat = [s for row in sequences for s in row]
    others = iter([*flat[1:], flat[0]])
    batches = []
    for row, tokens in zip(documents, sequences, strict=True):
        swapped = [_answered(s, next(others), config.context) for s in tokens] if mismatched else None
        batches.append(_batch(row, tokens, swapped, config))
    return tuple(batches)


def _batch(
    row: Sequence[tuple[PreferenceSet, int]],
    sequences: Sequence[Tokens],
    swapped: Sequence[Tokens] | None,
    config: DataConfig,
) -> PreferenceBatch:
    reference = None
    if all(found.reference is not None for found, _ in row):
        known = [found.reference[d] for found, d in row if found.reference is not None]
        reference = torch.from_numpy(np.array(known, np.float32))
        if reference.isnan().any():
            raise BaguError(
                "the run needs pairs whose reference log-probabilities were not computed: too many steps were refused",
                hint="set objective.reference=live",
            )
    other = None
    if swapped is not None:  # without gradients, so its shape may vary
        size = -(-sum(len(s.ids) for s in swapped) // 64) * 64
        other = pack(swapped, tokens=size, max_segments=len(swapped), context=config.context)
    return PreferenceBatch(
        batch=pack(
            sequences, tokens=config.rows * config.context, max_segments=max_sequences(config), context=config.context
        ),
        num_sequences=len(sequences),
        num_chosen=sum(found.is_chosen(d) for found, d in row),
        chosen=torch.tensor([found.is_chosen(d) for found, d in row]),
        lengths=torch.tensor([float(s.num_targets) for s in sequences]),
        reference=reference,
        mismatched=other,
    )


def _answered(prompt: Tokens, answer: Tokens, context: int) -> Tokens:
    """The prompt of one sequence with the answer of another, cut to the context."""
    ids = prompt.ids[: prompt.start] + answer.ids[answer.start :]
    return Tokens(ids=ids[:context], start=prompt.start)


def max_sequences(config: DataConfig) -> int:
    """The most sequences of a micro-batch."""
    return max(config.rows * config.max_segments, 2)
