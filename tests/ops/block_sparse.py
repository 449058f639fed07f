"""Block-sparse attention of texts, packed and alone, for the tests of invariant mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagu import ops
from bagu.ops.choose_blocks.means import packed_means

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
CHOICE = {"size": 4, "near": 1, "dense_below": 8}
TOP = 3


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> Found:
    """The chosen blocks, out and lse of packed texts of these lengths."""
    cu, longest = torch.tensor([0, *lengths], device=q.device).cumsum(0).to(torch.int32), max(lengths)
    means, tables = packed_means(k, cu, longest, CHOICE["size"])
    blocks, _ = ops.choose_blocks(q, means, tables, cu, cu.diff(), longest, longest, top=TOP, **CHOICE)
    return blocks, *ops.block_attention(q, k, v, blocks, cu, longest, **CHOICE)


def check_company(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> None:
    """Every text, and its first tokens, have alone the bits that they have between the others."""
    whole, begin = attend(q, k, v, lengths), 0
    for length in lengths:
        for count in {length, length // 2, length - 1} - {0}:
            own = slice(begin, begin + count)
            blocks, *alone = attend(q[own], k[own], v[own], [count])
            K = blocks.shape[-1]
            assert torch.equal(blocks, whole[0][own, :, :K]) and (whole[0][own, :, K:] == -1).all()
            for want, got in zip(whole[1:], alone, strict=True):
                assert torch.equal(want[own], got), f"{count} tokens of the text from {begin} on"
        begin += length
