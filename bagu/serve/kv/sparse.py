"""Attention to few pages of the pool: block-sparse attention, whose queries choose them, and the first positions beside
a window (attention sinks).

A block of `ModelConfig.blocks` is a page. Beside its keys a page has their mean, written when it is filled; a new token
chooses pages by the means of its sequence (ops.choose_blocks). What it chose is a short block table for each key head,
and `ops.paged_attention` reads those pages as it reads a sequence: each token and key head is a sequence of its own,
whose last page is the token's own.

Dims: t = tokens, G = key heads, n = query heads of a key head, K = most pages of a token, B = positions of a page.
"""

from __future__ import annotations

import torch

from bagu import ops
from bagu.nn.choices import BlockChoice
from bagu.ops.choose_blocks.means import block_means


def write_means(means: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor) -> None:
    """Write the mean keys of these pages. The mean of a page that is not full is not read."""
    own = keys.index_select(0, pages)
    if scales is not None:
        own = own.to(scales.dtype) * scales[pages].unsqueeze(-1)
    means.index_copy_(0, pages, block_means(own.to(means.dtype)))


def owners(cu_seqlens: torch.Tensor, count: int) -> torch.Tensor:
    """[count] int64: the sequence of each token."""
    t = torch.arange(count, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], t, right=True).clamp(max=len(cu_seqlens) - 2)


def attend_chosen(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, means: torch.Tensor, tables: torch.Tensor,
    cu_seqlens: torch.Tensor, context_lens: torch.Tensor, max_len: int, max_context: int, count: torch.Tensor,
    choice: BlockChoice, scale: float, scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:  # fmt: skip
    """The attention [t, H, E] of the new tokens q[t, H, D] to the pages that they choose. `count` has the int32 numbers
    0, 1, … to t * G or more."""
    (t, H, _), (B, G) = q.shape, keys.shape[1:3]
    pages, lengths = ops.choose_blocks(
        q, means, tables, cu_seqlens, context_lens, max_len, max_context, size=choice.size, top=choice.top,
        near=choice.near, dense_below=choice.dense_below, pages=True,
    )  # fmt: skip
    K = pages.shape[-1]
    if q.is_cuda and scales[0] is None:  # one launch: page p of key head g begins at row p * B * G + g of D features
        rows = count[:G].view(-1, 1).add(pages, alpha=B * G).flatten(0, 1)
        own = q.reshape(t * G, H // G, q.shape[-1])
        out, _ = ops.paged_attention(
            own,
            _head_pages(keys),
            _head_pages(values),
            rows,
            count[: t * G + 1],
            lengths.flatten(),
            1,
            K * B,
            scale=scale,
        )
        return out.reshape(t, H, values.shape[-1])
    outs = []
    for g in range(G):
        head = slice(g, g + 1)
        k_scale, v_scale = (None if s is None else s[:, :, head] for s in scales)
        out, _ = ops.paged_attention(
            q[:, g * (H // G) : (g + 1) * (H // G)], keys[:, :, head], values[:, :, head], pages[:, g], count[: t + 1],
            lengths[:, g].contiguous(), 1, K * B, scale=scale, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        outs.append(out)
    return torch.cat(outs, 1)


def _head_pages(pool: torch.Tensor) -> torch.Tensor:
    """A view [rows, B, 1, D] of a pool [N, B, G, D] in which a page of one key head is a block: they overlap."""
    N, B, G, D = pool.shape
    return pool.as_strided(((N - 1) * B * G + G, B, 1, D), (D, G * D, D, 1))


def join(outs: tuple[torch.Tensor, torch.Tensor], lses: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The attention to two sets of keys, from the attention to each of them."""
    both = torch.logaddexp(*lses)
    first, second = ((lse - both).exp().unsqueeze(-1).to(out.dtype) * out for out, lse in zip(outs, lses, strict=True))
    return first + second
