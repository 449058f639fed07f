"""Masked language modelling (BERT, Devlin et al. 2018): hide some tokens and predict them from both sides.

Of the tokens that are not special, `rate` are chosen. Of these 80 % become the mask token, 10 % a random token and 10 %
stay as they are, so that the model cannot tell from its input where it will be asked. Targets are the original tokens
there, `IGNORE` elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from bagu.data.batch import PAD_ID
from bagu.data.pack import philox
from bagu.errors import ArgumentError, BaguError
from bagu.types import IGNORE, Batch

__all__ = ["mask_batch"]

HIDDEN, RANDOM = 0.8, 0.1  # the rest keep their token


def mask_batch(
    batch: Batch,
    *,
    token_bytes: np.ndarray,
    mask_id: int,
    special_ids: Collection[int],
    key: tuple[int, ...],
    rate: float = 0.15,
) -> Batch:
    """`batch` with tokens hidden; the same `key` (seed, step, micro-batch) hides the same tokens.

    Exactly rate x candidates are chosen, and at least one. `token_bytes` is the tokenizer's: its length is the
    vocabulary random tokens come from. Padding is told from text by its id, so the packer's must be in `special_ids`.
    """
    vocab_size = len(token_bytes)
    if not 0 < rate <= 1:
        raise ArgumentError(f"a masking rate of {rate} is not a share of the tokens", hint="BERT's is 0.15")
    if not 0 <= mask_id < vocab_size:
        raise ArgumentError(f"mask_id {mask_id} is not in a vocabulary of {vocab_size}", hint="take the tokenizer's")
    if batch.num_padding and PAD_ID not in special_ids:
        hint = f"add {PAD_ID} to special_ids"
        raise ArgumentError(f"the batch has padding, which is token {PAD_ID}, and that is no special token", hint=hint)
    ids = batch.ids.numpy()
    special = np.zeros(vocab_size, bool)
    special[[*special_ids, mask_id]] = True
    candidates = np.flatnonzero(~special[ids])
    if not len(candidates):
        raise BaguError(f"all {len(ids)} tokens of the batch are special: none can be hidden", hint="look at the data")
    draws = philox(key[0], "masked", *key[1:])
    count = max(1, round(rate * len(candidates)))
    chosen = np.sort(candidates[np.argsort(draws.random_raw(len(candidates)), kind="stable")[:count]])
    lot = draws.random_raw(count) / 2.0**64
    ordinary = np.flatnonzero(~special)
    random = ordinary[draws.random_raw(count) % len(ordinary)]  # the bias of the remainder is below 2^-40
    shown = np.where(lot < HIDDEN, mask_id, np.where(lot < HIDDEN + RANDOM, random, ids[chosen]))
    inputs, targets = ids.copy(), np.full(len(ids), IGNORE, np.int64)
    inputs[chosen], targets[chosen] = shown, ids[chosen]
    return replace(
        batch,
        ids=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets),
        num_targets=count,
        target_bytes=int(token_bytes[ids[chosen]].sum()),
    )
