"""Sampling: logits to tokens, one row per sequence, each with its own `Sampling` parameters.

    logits -> bias, penalties, masked stop tokens -> mask of a grammar -> / temperature -> softmax
           -> min-p, top-k, top-p -> sample

ops.sample computes everything after the penalties, and draws by inverse CDF: the first token at which the running sum
of probabilities exceeds u, where u depends only on (seed, choice, position in the output). A row uses no number of
another row, so a seed gives the same text in any batch. Bias, penalties and masks change few logits of a row; they are
in changes.py.

Dims: R = rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bagu import ops
from bagu.serve.changes import Changes, changed
from bagu.serve.request import TokenLogprob

# int64 arrays to tensors on the device of the logits, without waiting for it
Upload = Callable[..., list[torch.Tensor]]


class Parameters(NamedTuple):
    """The sampling parameters and random numbers of R rows, as one array for one copy to the device.

    `packed` is [3, P] int64 with P >= R: top_k in the first row, and in the others temperature, top_p, min_p and u in
    fp32. P is a multiple of 4, so that each of the five begins at a multiple of 16 bytes: Triton compiles another
    kernel for another alignment.
    """

    packed: np.ndarray
    rows: int  # R

    @classmethod
    def of(cls, top_k: np.ndarray, floats: np.ndarray) -> Parameters:
        """From top_k[R] and floats[4, R]: temperature, top_p, min_p, u."""
        count = len(top_k)
        packed = np.zeros((3, -(-count // 4) * 4), dtype=np.int64)
        packed[0, :count] = top_k
        packed[1:].view(np.float32).reshape(4, -1)[:, :count] = floats
        return cls(packed, count)

    def unpack(
        self, packed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """temperature, top_k, top_p, min_p and u, in the order of ops.sample, from `packed` on the device."""
        temperature, top_p, min_p, u = packed[1:].view(torch.float32).view(4, -1)[:, : self.rows]
        return temperature, packed[0, : self.rows], top_p, min_p, u


def sample(
    logits: torch.Tensor,
    parameters: Parameters,
    changes: Changes | None,
    upload: Upload,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample a token for each row of logits[R, V]: [R] int64 on their device. Does not change `logits`. `mask` is
    [R, W] int32 on the host, with a bit for each token that may be sampled; for a GPU in pinned memory."""
    allowed = None if mask is None else mask.to(logits.device, non_blocking=True)
    if changes is None:
        (packed,) = upload(parameters.packed)
        return ops.sample(logits, *parameters.unpack(packed), allowed=allowed)
    packed, ids, terms = upload(parameters.packed, changes.ids, changes.terms)
    values = changed(logits, ids, terms)
    return ops.sample(logits, *parameters.unpack(packed), ids=ids, values=values, allowed=allowed)


class RowLogprobs(NamedTuple):
    """Logprobs of R rows on the device of the logits: of each target, and of the most probable tokens if some are
    needed. Reading them (`details`) waits for the device."""

    own: torch.Tensor  # [R] fp32
    counts: Sequence[int]  # of top tokens, for each row
    top: torch.Tensor | None = None  # [R, k] fp32
    ids: torch.Tensor | None = None  # [R, k]

    def to_host(self) -> RowLogprobs:
        """Start copies to the host. They are complete after an event that is recorded next on the stream."""
        top, ids = (None if t is None else t.to("cpu", non_blocking=True) for t in (self.top, self.ids))
        return RowLogprobs(self.own.to("cpu", non_blocking=True), self.counts, top, ids)

    def details(self) -> list[float] | list[TokenLogprob]:
        """One for each row: numbers if no row has top tokens, since an object for each of 512 rows takes longer."""
        own: list[float] = self.own.tolist()
        if self.top is None or self.ids is None:
            return own
        columns = zip(own, self.top.tolist(), self.ids.tolist(), self.counts, strict=True)
        return [TokenLogprob(value, tuple(zip(i[:n], ls[:n], strict=True))) for value, ls, i, n in columns]


def top_logprobs(
    logits: torch.Tensor, logprobs: torch.Tensor, targets: torch.Tensor, counts: Sequence[int]
) -> RowLogprobs:
    """The logprob of each row's target, and its `counts[i]` most probable tokens with their logprobs.

    `logprobs[R]` are those of the targets, from ops.linear_cross_entropy. The target's logit minus its logprob is the
    row's logsumexp, which gives the other logprobs.
    """
    k = max(counts, default=0)
    if not k:
        return RowLogprobs(logprobs, counts)
    top, ids = logits.topk(min(k, logits.shape[1]))
    lse = logits.gather(1, targets.unsqueeze(1)).float() - logprobs.unsqueeze(1)
    return RowLogprobs(logprobs, counts, top.float() - lse, ids)
