"""Masked language modelling (BERT, Devlin et al. 2018): mask some tokens and predict them from both sides.

A fraction `rate` of the tokens that are not special is chosen. Of these, 80 % become the mask token, 10 % a random
token and 10 % stay, so that the model cannot see from its input which tokens it must predict. Targets are the original
tokens at these positions, `IGNORE` elsewhere. Every step masks other tokens (RoBERTa's dynamic masking); the same step
always masks the same ones.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from bagu.data.batch import PAD_ID
from bagu.data.order import philox
from bagu.data.tokenizer import MASK_TOKENS, BpeTokenizer
from bagu.errors import ArgumentError, BaguError
from bagu.types import IGNORE, Batch

HIDDEN, RANDOM = 0.8, 0.1  # fractions of the chosen tokens; the rest keeps its token


def check_rate(rate: float) -> None:
    """Raise if the masking rate is not in (0, 1]."""
    if not 0 < rate <= 1:
        raise ArgumentError(f"the masking rate is {rate}; expected above 0 and at most 1", hint="BERT uses 0.15")


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Masks `rate` of the tokens that are not special. `seed` selects them, and draws random tokens from
    `vocab_size`."""

    seed: int
    rate: float
    vocab_size: int
    mask_id: int
    special_ids: frozenset[int]

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if not 0 <= self.mask_id < self.vocab_size:
            what = f"mask_id {self.mask_id} is not in a vocabulary of {self.vocab_size}"
            raise ArgumentError(what, hint="use the tokenizer's mask token")

    @classmethod
    def of(cls, tokenizer: BpeTokenizer, *, rate: float, seed: int) -> Self:
        """Use the tokenizer's mask token, found by its name."""
        special = tokenizer.special_ids
        mask_id = next((special[token] for token in MASK_TOKENS if token in special), None)
        if mask_id is None:
            raise BaguError(
                f"the tokenizer has no mask token: none of its special tokens ({', '.join(special) or 'it has none'}) "
                f"is {', '.join(MASK_TOKENS[:-1])} or {MASK_TOKENS[-1]}",
                hint=f"leave tokenizer.path out, or use a tokenizer from bagu tokenizer train: it has {MASK_TOKENS[0]}",
            )
        ids = frozenset(special.values())
        return cls(seed=seed, rate=rate, vocab_size=tokenizer.vocab_size, mask_id=mask_id, special_ids=ids)

    @cached_property
    def special(self) -> np.ndarray:
        """[vocab_size] bool: tokens that are never masked and never drawn as random tokens; includes the mask token."""
        table = np.zeros(self.vocab_size, bool)
        table[[*self.special_ids, self.mask_id]] = True
        return table


def mask_batch(batch: Batch, masking: Masking, *place: str | int) -> Batch:
    """`batch` with tokens masked; the same seed and place (step, micro-batch) mask the same tokens.

    Exactly rate x candidates are chosen, at least one. `target_bytes` is 0: the loss of a masked token given both sides
    is not a code length of the text, so there are no bits per byte.
    """
    import torch  # here, since the HTTP server's process imports this package for its tokenizer, and not torch

    ids, special = batch.ids.numpy(), masking.special
    padding = (ids == PAD_ID) & (batch.targets.numpy() == IGNORE)
    candidates = np.flatnonzero(~special[ids] & ~padding)
    if not len(candidates):
        raise BaguError(f"all {len(ids)} tokens of the batch are special: none can be masked", hint="check the data")
    draws = philox(masking.seed, "masked", *place)
    count = max(1, round(masking.rate * len(candidates)))
    chosen = np.sort(candidates[np.argsort(draws.random_raw(len(candidates)), kind="stable")[:count]])
    lot = draws.random_raw(count) / 2.0**64
    ordinary = np.flatnonzero(~special)
    random = ordinary[draws.random_raw(count) % len(ordinary)]  # the bias of the remainder is below 2^-40
    shown = np.where(lot < HIDDEN, masking.mask_id, np.where(lot < HIDDEN + RANDOM, random, ids[chosen]))
    inputs, targets = ids.copy(), np.full(len(ids), IGNORE, np.int64)
    inputs[chosen], targets[chosen] = shown, ids[chosen]
    return replace(
        batch, ids=torch.from_numpy(inputs), targets=torch.from_numpy(targets), num_targets=count, target_bytes=0
    )
