"""Bias, penalties and masked stop tokens: the few logits of a row that they change, as lists for ops.sample.

    x  ->  (x / factor if x > 0 else x * factor) - minus + plus

The repetition penalty is the factor of the tokens of prompt and output (CTRL, https://arxiv.org/abs/1909.05858).
Presence and frequency penalties are subtracted, for tokens of the output. The bias is added. Before min_tokens, -inf is
added to tokens that would end the output.

Dims: R = rows, A = changed logits of a row, V = vocabulary.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np
import torch

from bagu.serve.request import Sampling

FEWEST = 64  # A is a power of two and at least this: few different shapes, so that launches are replayed
NONE = np.empty(0, dtype=np.int64)


class Row(NamedTuple):
    """The state of a sequence that bias, penalties and masks depend on."""

    sampling: Sampling
    tokens: Sequence[int]  # prompt and output
    num_prompt: int
    stops: Set[int] = frozenset()  # the tokens that end the output

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


class Changes(NamedTuple):
    """The changed logits of R rows."""

    ids: np.ndarray  # [R, A] int64, ascending; -1 where a row has fewer
    terms: np.ndarray  # [R, 3 * A / 2] int64: factor, minus and plus in fp32, [R, 3, A]


def adjusts(s: Sampling) -> bool:
    """Whether bias, penalties or masked tokens may change a logit."""
    penalised = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
    return penalised or bool(s.logit_bias) or s.min_tokens > 0


def changes(rows: Sequence[Row | None], V: int) -> Changes | None:
    """The changed logits of these rows (None: a row without any); None if there are none at all."""
    each = [None if r is None else _row_changes(r, V) for r in rows]
    most = max((len(c[0]) for c in each if c is not None), default=0)
    if not most:
        return None
    A = max(FEWEST, 1 << (most - 1).bit_length())
    ids = np.full((len(rows), A), -1, dtype=np.int64)
    terms = np.zeros((len(rows), 3, A), dtype=np.float32)
    terms[:, 0] = 1.0
    for i, c in enumerate(each):
        if c is not None:
            count = len(c[0])
            ids[i, :count], terms[i, :, :count] = c
    return Changes(ids, terms.reshape(len(rows), -1).view(np.int64))


def changed(logits: torch.Tensor, ids: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """The new logits [R, A] fp32 of the tokens `ids`, on the device of the logits."""
    factor, minus, plus = terms.view(torch.float32).view(len(ids), 3, -1).unbind(1)
    old = logits.gather(1, ids.clamp(min=0)).float()
    return torch.where(old > 0, old / factor, old * factor) - minus + plus


def _row_changes(row: Row, V: int) -> tuple[np.ndarray, np.ndarray]:
    """ids [n] and terms [3, n] of a row."""
    s = row.sampling
    penalised = row.num_output > 0 and (s.presence_penalty != 0.0 or s.frequency_penalty != 0.0)
    seen = np.unique(np.array(row.tokens, dtype=np.int64)) if s.repetition_penalty != 1.0 else NONE
    output = np.array(row.tokens[row.num_prompt :], dtype=np.int64) if penalised else NONE
    bias, ends = [(token, b) for token, b in s.logit_bias.items() if token < V], _masked(row, V)
    others = np.array([*(token for token, _ in bias), *ends], dtype=np.int64)
    parts = [part for part in (seen, output, others) if len(part)]
    ids = seen if len(parts) == 1 and len(seen) else np.unique(np.concatenate(parts)) if parts else NONE
    terms = np.zeros((3, len(ids)), dtype=np.float32)
    terms[0] = s.repetition_penalty if len(seen) == len(ids) else 1.0
    if 0 < len(seen) < len(ids):
        terms[0, np.searchsorted(ids, seen)] = s.repetition_penalty
    if len(output):
        counts = np.bincount(np.searchsorted(ids, output), minlength=len(ids)).astype(np.float32)
        terms[1] = np.float32(s.frequency_penalty) * counts + np.float32(s.presence_penalty) * (counts > 0)
    for token, b in bias:
        terms[2, np.searchsorted(ids, token)] = b
    if ends:
        terms[2, np.searchsorted(ids, ends)] = -np.inf
    return ids, terms


def _masked(row: Row, V: int) -> list[int]:
    """The tokens that would end the output before min_tokens; none if no other token would be left to sample. With a
    grammar, constrain/masks.py does this: only it knows which tokens are left."""
    s = row.sampling
    if row.num_output >= s.min_tokens or s.grammar is not None:
        return []
    ends = [t for t in row.stops if t < V]
    return ends if len(ends) < V else []
