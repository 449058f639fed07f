"""Whole sequences of tokens to packed batches: for pairs, rollouts and other data whose sequences stay in one piece.

The loader (loader.py) packs documents of a store and may cut them; a preference or a rollout is worthless in pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bagu.data.batch import PAD_ID
from bagu.errors import ArgumentError
from bagu.types import IGNORE, Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """A prompt and its answer. The targets are ids[start:], each predicted from the tokens before it."""

    ids: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.ids):
            raise ArgumentError(
                f"a sequence of {len(self.ids)} tokens whose answer starts at {self.start}",
                hint="the prompt and the answer have at least one token each",
            )

    @property
    def num_targets(self) -> int:
        return len(self.ids) - self.start


def pack(sequences: Sequence[Tokens], *, tokens: int, max_segments: int, context: int | None = None) -> Batch:
    """Pack whole sequences into a batch of exactly `tokens`: sequence i is segment i, and padding follows.

    `context` is the most tokens of a sequence; padding is split into segments of at most that length, because a model
    has positions for no more. `cu_seqlens` has room for `max_segments` sequences and for padding, and with `context`
    `max_len` is always `context`: so batches of one run have one shape. Without it padding is one segment.
    """
    used = sum(len(s.ids) for s in sequences)
    if used > tokens or not 0 < len(sequences) <= max_segments:
        raise ArgumentError(
            f"{len(sequences)} sequences of {used} tokens do not fit in {max_segments} sequences and {tokens} tokens",
            hint="plan the batches with micro_batches",
        )
    ids = np.full(tokens, PAD_ID, np.int64)
    targets = np.full(tokens, IGNORE, np.int64)
    longest = max(len(s.ids) for s in sequences)
    if context is not None and longest > context:
        raise ArgumentError(f"a sequence has {longest} tokens; context is {context}", hint="leave it out")
    pieces = 1 if context is None else -(-tokens // context)  # of padding, at most
    offsets = np.full(max_segments + pieces + 1, tokens, np.int32)
    offsets[: len(sequences) + 1] = np.cumsum([0, *(len(s.ids) for s in sequences)])
    if context is not None:
        ends = np.arange(used, tokens, context)[1:]
        offsets[len(sequences) + 1 : len(sequences) + 1 + len(ends)] = ends
    for at, s in zip(offsets.tolist(), sequences, strict=False):
        ids[at : at + len(s.ids)] = s.ids
        targets[at + s.start - 1 : at + len(s.ids) - 1] = s.ids[s.start :]
    starts = offsets[:-1].astype(np.int64)
    positions = np.arange(tokens) - np.repeat(starts, np.diff(offsets))
    return Batch(
        ids=torch.from_numpy(ids),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(offsets),
        max_len=max(longest, tokens - used) if context is None else context,
        num_targets=sum(s.num_targets for s in sequences),
        target_bytes=0,
        num_padding=tokens - used,
    )


def micro_batches(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Distribute sequences of these lengths over micro-batches of at most `capacity` tokens, first fit in order.

    Returns indices. A sequence longer than that is refused: cutting it would change what is scored.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ArgumentError(
                f"a sequence has {length} tokens, and a micro-batch {capacity}",
                hint="raise data.context or data.rows, or leave out long sequences",
            )
        at = next((i for i, left in enumerate(room) if left >= length), None)
        if at is None:
            at = len(batches)
            batches.append([])
            room.append(capacity)
        batches[at].append(index)
        room[at] -= length
    return batches
