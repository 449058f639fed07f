"""MLA attention with PyTorch: paged attention with one key head, whose values are a view of the keys."""

from __future__ import annotations

import torch

from bagu.ops.paged_attention import torch_backend as paged

UNUSED = dict.fromkeys(("slopes", "bias", "sinks", "k_scale", "v_scale"))  # what MLA has no use for


def forward(
    q: torch.Tensor, cache: torch.Tensor, block_tables: torch.Tensor, cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor, rank: int, max_len: int, max_context: int, window: int | None, scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    keys = cache.unsqueeze(2)
    return paged.forward(
        q, keys, keys[..., :rank], block_tables, cu_seqlens, context_lens, max_len=max_len, max_context=max_context,
        window=window, scale=scale, op="mla_attention", **UNUSED,
    )  # fmt: skip


def invariant_forward(
    q: torch.Tensor, cache: torch.Tensor, block_tables: torch.Tensor, cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor, rank: int, max_len: int, max_context: int, window: int | None, scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same bits that `attention` gives these tokens in batch-invariant mode."""
    keys = cache.unsqueeze(2)
    return paged.invariant_forward(
        q, keys, keys[..., :rank], block_tables, cu_seqlens, context_lens, max_len=max_len, max_context=max_context,
        window=window, scale=scale, op="mla_attention", **UNUSED,
    )  # fmt: skip
