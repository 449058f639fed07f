"""Build a `Batch` from pieces of documents: read the tokens, shift them by one, compute the segment offsets.

Token t of a document predicts token t + 1. The targets of a piece are its tokens shifted by one, up to the first token
after the piece, so that splitting a document loses no target. The last token of a document has no target. If the store
has a loss mask, a target counts if the mask of the predicted token is 1.
"""

from collections.abc import Sequence

import numpy as np

from bagu.data.pack import Piece
from bagu.data.store import TokenStore
from bagu.types import IGNORE, Batch

PAD_ID = 0  # any id works: its target is IGNORE, and no document attends to it

Row = tuple[TokenStore, Sequence[Piece]]


def assemble(rows: Sequence[Row], *, context: int, max_segments: int, joined: bool = False) -> Batch:
    """Build a batch from `rows`, each with at most `context` tokens in at most `max_segments` pieces, and pad the rest.

    `cu_seqlens` has space for one segment of padding per row. With `joined` a row is one segment: its documents attend
    to each other, positions run through the row, and padding at the end of a row is part of the segment.
    """
    import torch  # here, since the HTTP server's process imports this package for its tokenizer, and not torch

    total = len(rows) * context
    ids = np.full(total, PAD_ID, np.int64)
    targets = np.full(total, IGNORE, np.int64)
    offsets = [0]
    padding = target_bytes = 0
    for number, (store, pieces) in enumerate(rows):
        assert len(pieces) <= max_segments, "the layout was built with a larger max_segments"
        at = number * context
        for document, start, end in pieces:
            tokens = store.tokens(document, start, end + 1)  # one token more, for the last target
            mask = store.mask(document, start + 1, end + 1)
            n, followers = end - start, len(tokens) - 1
            ids[at : at + n] = tokens[:n]
            following = tokens[1:].astype(np.int64)
            if mask is not None:
                following[mask == 0] = IGNORE
            targets[at : at + followers] = following
            target_bytes += int(store.token_bytes[following[following != IGNORE]].sum())
            at += n
            offsets.append(at)
        row_end = (number + 1) * context
        if at < row_end:
            padding += row_end - at
            offsets.append(row_end)
    if joined:
        offsets = list(range(0, total + 1, context))
    starts = np.array(offsets, np.int64)
    positions = np.arange(total) - np.repeat(starts[:-1], np.diff(starts))
    num_segments = len(rows) if joined else len(rows) * (max_segments + 1)
    cu_seqlens = np.full(num_segments + 1, total, np.int32)
    cu_seqlens[: len(offsets)] = offsets
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
