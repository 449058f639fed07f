"""Block-sparse attention over packed segments. spec.py has its definition and cost."""

import torch

from bagu.ops.block_attention.spec import SPEC
from bagu.ops.call.dispatch import call


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_len: int,
    *,
    size: int,
    near: int,
    dense_below: int,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out[T, H, E], lse[T, H]) of q[T, H, D] over the blocks of k[T, G, D] and v[T, G, E] that `blocks` lists for each
    query and key head; causal, separately for each segment.

    `blocks[T, G, K]` is the result of `choose_blocks` with the same `size`, `near` and `dense_below`. `cu_seqlens` and
    `max_len` are as in `attention`. `lse` has no gradient.
    """
    return call(
        SPEC, backend, q=q, k=k, v=v, blocks=blocks, cu_seqlens=cu_seqlens, max_len=max_len, size=size, near=near,
        dense_below=dense_below, scale=scale,
    )  # fmt: skip
