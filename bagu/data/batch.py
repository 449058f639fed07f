"""From pieces to a `Batch`: read the tokens, shift them by one, and say where segments begin.

Token t of a document predicts token t + 1. So the targets of a piece are its tokens shifted by one, up to the first
token after the piece: a cut costs no target. The last token of a document has none. Where the store has a loss mask, a
target counts where the mask of the predicted token is 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bagu.data.pack import Piece
from bagu.data.store import TokenStore
from bagu.types import IGNORE, Batch

__all__ = ["PAD_ID", "assemble"]

PAD_ID = 0  # any id would do: its target is IGNORE and no document sees it

Row = tuple[TokenStore, Sequence[Piece]]


def assemble(rows: Sequence[Row], *, context: int, max_segments: int, joined: bool = False) -> Batch:
    """The batch of `rows`, each at most `context` tokens in at most `max_segments` pieces; the rest is padding.

    `cu_seqlens` has room for one segment of padding per row. With `joined` a row is one segment: its documents see each
    other, positions run through the row, and padding at a row's end is part of the segment.
    """
    total = len(rows) * context
    ids = np.full(total, PAD_ID, np.int64)
    targets = np.full(total, IGNORE, np.int64)
    edges = [0]
    padding = target_bytes = 0
    for number, (store, pieces) in enumerate(rows):
        assert len(pieces) <= max_segments, "the layout was made for another max_segments"
        at = number * context
        for document, start, end in pieces:
            tokens = store.tokens(document, start, end + 1)  # one more than the piece, where the document goes on
            mask = store.mask(document, start + 1, end + 1)
            n, followers = end - start, len(tokens) - 1
            ids[at : at + n] = tokens[:n]
            following = tokens[1:].astype(np.int64)
            if mask is not None:
                following[mask == 0] = IGNORE
            targets[at : at + followers] = following
            target_bytes += int(store.token_bytes[following[following != IGNORE]].sum())
            at += n
            edges.append(at)
        row_end = (number + 1) * context
        if at < row_end:
            padding += row_end - at
            edges.append(row_end)
    if joined:
        edges = list(range(0, total + 1, context))
    starts = np.array(edges, np.int64)
    positions = np.arange(total) - np.repeat(starts[:-1], np.diff(starts))
    num_segments = len(rows) if joined else len(rows) * (max_segments + 1)
    cu_seqlens = np.full(num_segments + 1, total, np.int32)
    cu_seqlens[: len(edges)] = edges
    return Batch(
        ids=torch.from_numpy(ids),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_len=context,
        num_targets=int((targets != IGNORE).sum()),
        target_bytes=target_bytes,
        num_padding=padding,
    )
