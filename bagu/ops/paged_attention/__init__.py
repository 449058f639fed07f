"""Attention over a paged cache. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.paged_attention.spec import SPEC


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    max_len: int,
    max_context: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out[T, H, E], lse[T, H]) of the new tokens q[T, H, D] over k_cache[N, B, G, D] and v_cache[N, B, G, E]; causal.

    The tokens cu_seqlens[s] … cu_seqlens[s + 1] are the last ones of sequence s, which has `context_lens[s]` tokens in
    all, including the new ones (which are already written). Position j of a sequence is row j % B of block
    block_tables[s, j // B]; table entries that its queries do not attend to are not read. `max_len` is an upper bound
    for the new tokens of a sequence and `max_context` for its length: they are host numbers, so that nothing is copied
    from the device. An int8 or float8_e4m3fn cache has k_scale[N, B, G] and v_scale[N, B, G], one scale per position
    and head, as `kv_write` stores them. The other arguments are as in `attention`. There are no gradients.
    """
    return call(
        SPEC, backend, q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, cu_seqlens=cu_seqlens,
        context_lens=context_lens, slopes=slopes, bias=bias, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
        max_len=max_len, max_context=max_context, window=window, scale=scale,
    )  # fmt: skip
