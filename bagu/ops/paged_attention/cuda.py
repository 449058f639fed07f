"""Paged attention on a GPU with PyTorch's FlashAttention-2, until bagu has its own kernel; no copies to the host.

PyTorch's FlashAttention-2 does not support block tables, but it reads a sequence's keys from any position: it takes the
start and the number of keys of each sequence.

    decodes, large blocks    each block is passed as a sequence, read in place in the pool, and the partial results are
                             combined by their logsumexps (https://crfm.stanford.edu/2023/10/12/flashdecoding.html)
    all other cases          the blocks in use are gathered first, so each key is read twice and written once

The kernel's causal mask is aligned at the last token, as this op's is.
"""

import torch

from bagu.ops.attention.cuda import on_16_bytes
from bagu.ops.attention.shape import Shape
from bagu.ops.paged_attention.pages import Pages

LARGE = 128  # positions per block from which a separate part pays off: the kernel processes 64 or 128 keys at a time

Pair = tuple[torch.Tensor, torch.Tensor]


def forward(shape: Shape, scale: float, q: torch.Tensor, pages: Pages, cu_seqlens: torch.Tensor, max_len: int) -> Pair:
    """out[T, H, E] and lse[T, H]."""
    widths = {q.shape[-1], pages.k.shape[-1], pages.v.shape[-1]}
    dense = all(pool.is_contiguous() and pool.storage_offset() % 8 == 0 for pool in (pages.k, pages.v))
    decodes = max_len == 1 and q.shape[0] == pages.tables.shape[0]
    if decodes and dense and pages.k.shape[1] >= LARGE and len(widths) == 1 and q.shape[-1] % 8 == 0:
        return _in_place(shape, scale, q, pages)
    return _gathered(shape, scale, q, pages, cu_seqlens, max_len)


def _in_place(shape: Shape, scale: float, q: torch.Tensor, pages: Pages) -> Pair:
    """One query per sequence, whose P blocks are passed as P sequences: P partial results per query."""
    (S, H, D), B = q.shape, pages.k.shape[1]
    P = -(-pages.longest // B)
    lengths = pages.lengths.unsqueeze(1)
    start = torch.arange(0, P * B, B, device=q.device, dtype=torch.int32)
    first = start.expand(S, P) if shape.window is None else torch.maximum(start, lengths - shape.window)
    used = torch.clamp(torch.minimum(lengths, start + B) - first, min=0)  # [S, P]
    begins = pages.tables[:, :P] * B + (first - start)
    begins = torch.nn.functional.pad(begins.masked_fill(used == 0, 0).flatten(), (0, 1))
    queries = q.unsqueeze(1).expand(S, P, H, D).reshape(S * P, H, D)
    offsets = torch.arange(S * P + 1, device=q.device, dtype=torch.int32)
    out, lse = torch.ops.aten._flash_attention_forward(
        queries, pages.k.flatten(0, 1), pages.v.flatten(0, 1), offsets, begins, 1, B, 0.0, False, False, scale=scale,
        seqused_k=used.flatten(),
    )[:2]  # fmt: skip
    lse = lse.view(H, S, P).masked_fill(used == 0, -torch.inf)
    weights = lse.softmax(-1).permute(1, 2, 0).unsqueeze(-1)  # [S, P, H, 1]
    whole = (out.view(S, P, H, D) * weights).sum(1).to(q.dtype)
    return whole, lse.logsumexp(-1).T


def _gathered(
    shape: Shape, scale: float, q: torch.Tensor, pages: Pages, cu_seqlens: torch.Tensor, max_len: int
) -> Pair:
    """The kernel requires q, k and v of the same head dim, a multiple of 8: pad with zeros."""
    E, wide = pages.v.shape[-1], -(-max(q.shape[-1], pages.v.shape[-1]) // 8) * 8
    B, S = pages.k.shape[1], pages.tables.shape[0]
    P = -(-pages.longest // B)
    used = torch.arange(0, P * B, B, device=q.device) < pages.lengths.unsqueeze(1)
    blocks = pages.tables[:, :P].masked_fill(~used, 0).flatten()  # an entry past the end may have any value
    k, v = (_fill(x.index_select(0, blocks).flatten(0, 1), wide) for x in (pages.k, pages.v))  # [S * P * B, G, wide]
    begins = torch.arange(0, (S + 1) * P * B, P * B, device=q.device, dtype=torch.int32)
    side = None if shape.window is None else shape.window - 1  # the kernel does not count the query's own key
    if max_len == 1 and q.shape[0] != S:
        max_len = 2  # for decodes it folds the heads of a group into rows, and assumes that every sequence has a token
    out, lse = torch.ops.aten._flash_attention_forward(
        _fill(q, wide), k, v, cu_seqlens.contiguous(), begins, max_len, P * B, 0.0, True, False, scale=scale,
        window_size_left=side, window_size_right=None if side is None else 0, seqused_k=pages.lengths.contiguous(),
    )[:2]  # fmt: skip
    return out[..., :E], lse.T


def _fill(x: torch.Tensor, features: int) -> torch.Tensor:
    if x.shape[-1] < features:
        return torch.nn.functional.pad(x, (0, features - x.shape[-1]))
    return on_16_bytes(x)
