"""Paged attention on a GPU by the kernel that ships with PyTorch, until bagu's own is there. Nothing is read back.

FlashAttention-2 takes keys packed, or block tables whose blocks are a multiple of 256 places; small blocks are gathered
first, so each key is read twice and written once. Its causal mask is aligned at the last token, which is this op's.
"""

from __future__ import annotations

import torch

from bagu.ops.attention.shape import Shape
from bagu.ops.paged_attention.pages import Pages

__all__ = ["forward"]


def forward(
    shape: Shape, scale: float, q: torch.Tensor, pages: Pages, cu_seqlens: torch.Tensor, max_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[T, H, E] and lse[T, H]. The kernel wants q, k and v of one width, a multiple of 8: zeros fill it up."""
    E, wide = pages.v.shape[-1], -(-max(q.shape[-1], pages.v.shape[-1]) // 8) * 8
    B, S = pages.k.shape[1], pages.tables.shape[0]
    P = -(-pages.longest // B)
    used = torch.arange(0, P * B, B, device=q.device) < pages.lengths.unsqueeze(1)
    blocks = pages.tables[:, :P].masked_fill(~used, 0).flatten()  # an entry past the end may be anything
    k, v = (_fill(x.index_select(0, blocks).flatten(0, 1), wide) for x in (pages.k, pages.v))  # [S * P * B, G, wide]
    begins = torch.arange(0, (S + 1) * P * B, P * B, device=q.device, dtype=torch.int32)
    side = None if shape.window is None else shape.window - 1  # the kernel counts keys beside the query's own
    if max_len == 1 and q.shape[0] != S:
        max_len = 2  # for decodes it folds the heads of a group into rows, and takes it that every sequence has a token
    out, lse = torch.ops.aten._flash_attention_forward(
        _fill(q, wide), k, v, cu_seqlens, begins, max_len, P * B, 0.0, True, False, scale=scale,
        window_size_left=side, window_size_right=None if side is None else 0, seqused_k=pages.lengths,
    )[:2]  # fmt: skip
    return out[..., :E], lse.T


def _fill(x: torch.Tensor, features: int) -> torch.Tensor:
    if x.shape[-1] < features:
        return torch.nn.functional.pad(x, (0, features - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
