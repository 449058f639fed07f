"""The preferences of a token store that fit in a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bagu.data.loader import DataConfig
from bagu.data.sequences import Tokens
from bagu.data.store import TokenStore
from bagu.errors import BaguError


@dataclass(frozen=True, kw_only=True, eq=False)
class PreferenceSet:
    """The preferences of a store that fit: `units[i]` are the documents of one pair, or one document for KTO."""

    name: str
    store: TokenStore
    units: np.ndarray  # [N, 2] or [N, 1] int64
    lengths: np.ndarray  # [N] int64: tokens of a unit
    left_out: int
    reference: np.ndarray | None = None  # [documents] fp32: log-probabilities under the reference; NaN: not computed

    @classmethod
    def of(cls, name: str, store: TokenStore, config: DataConfig, *, paired: bool) -> PreferenceSet:
        documents = np.arange(store.num_documents)
        if paired:
            _check_pairs(name, store)
        units = documents.reshape(-1, 2 if paired else 1)
        sizes = store.lengths[units]
        fits = (sizes.max(1) <= config.context) & (sizes.sum(1) <= config.rows * config.context)
        if not fits.any():
            what = "pairs" if paired else "answers"
            raise BaguError(
                f"none of the {len(units):,} {what} of source {name!r} fits in data.context = {config.context} tokens"
                f" and a micro-batch of {config.rows * config.context}: the shortest has {sizes.max(1).min()} tokens"
                f" on its longer side",
                hint="raise data.context (up to the model's positions) or data.rows, or give shorter texts",
            )
        return cls(name=name, store=store, units=units[fits], lengths=sizes.sum(1)[fits], left_out=int((~fits).sum()))

    def tokens(self, document: int) -> Tokens:
        mask = self.store.mask(document)
        assert mask is not None
        return Tokens(ids=tuple(self.store.tokens(document).tolist()), start=len(mask) - int(mask.sum(dtype=np.int64)))

    def is_chosen(self, document: int) -> bool:
        return self.store.document_id(document).endswith("+")

    @property
    def num_targets(self) -> int:
        """Tokens of answers in the units that fit."""
        mask = self.store.loss_mask
        assert mask is not None
        sums = np.add.reduceat(mask.astype(np.int64), self.store.offsets[:-1])
        return int(sums[self.units].sum())


def _check_pairs(name: str, store: TokenStore) -> None:
    ids = [store.document_id(i) for i in range(store.num_documents)]
    alone = next((a for a, b in zip(ids[::2], [*ids[1::2], ""], strict=False) if a[:-1] != b[:-1]), None)
    if alone is not None:
        raise BaguError(
            f"{alone[:-1]} of source {name!r} has one answer, and this objective compares two",
            hint="give chosen and rejected answers; completions with labels are for objective.variant=kto",
        )
