"""Attention over a paged cache of latents (MLA). spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.mla_attention.spec import SPEC


def mla_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    rank: int,
    max_len: int,
    max_context: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out[T, H, rank], lse[T, H]) of the new tokens q[T, H, D] over the latents cache[N, B, D]; causal.

    All heads share one row of the cache per token: all D features of a row are its key, and the first `rank` of them
    its value. `q` is in the latent space (the key projection is absorbed into it), and so is `out`. The other arguments
    are as in `paged_attention`. There are no gradients.
    """
    return call(
        SPEC, backend, q=q, cache=cache, block_tables=block_tables, cu_seqlens=cu_seqlens, context_lens=context_lens,
        rank=rank, max_len=max_len, max_context=max_context, window=window, scale=scale,
    )  # fmt: skip
