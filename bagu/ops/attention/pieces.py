"""Splits queries into pieces, each with the keys it attends to, for CPU kernel calls that need an additive mask.

PyTorch's blocked kernel takes a window, ALiBi or a past as an additive mask, and computes every score, also the masked
ones. L queries in one call need a mask of L * L numbers and as many scores. In pieces of I queries they need
L * (I + W) with a window of W, and half of L * L without one, since a piece needs no key after its last query. If the
mask has only a window, adjacent pieces share the same mask.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bagu.ops.attention.shape import Shape

# Per piece. 8192 tokens, a window of 512, two cores, fp32, 4 heads of 64, ms of a forward / forward and backward: 128
# queries 50 / 228, 256 queries 65 / 212, 512 queries 84 / 240; all queries in one piece 952 / 2707.
QUERIES = 256


class Piece(NamedTuple):
    queries: slice  # into the new tokens
    keys: slice  # into all tokens
    added: torch.Tensor | None  # [I, J], or [1, H, I, J] where heads differ


def pieces(shape: Shape, past: int, new: int, like: torch.Tensor) -> Iterator[Piece]:
    """`new` queries that follow `past` tokens of their sequence; masks are in the dtype of `like`."""
    length, known, added = past + new, None, None
    for a in range(0, new, QUERIES):
        b, w = min(a + QUERIES, new), length if shape.window is None else shape.window
        first = max(0, past + a - w + 1)
        end = past + b if shape.causal else min(length, past + b + w - 1)
        at = (b - a, first - past - a, end - past - a)  # the distances of the first and last key determine the mask
        if at != known:
            known, place = at, torch.arange(b - a, device=like.device).unsqueeze(1)
            added = shape.between(torch.arange(at[1], at[2], device=like.device) - place, like)
            added = added.unsqueeze(0) if added is not None and added.ndim == 3 else added
        yield Piece(slice(a, b), slice(first, end), added)
