"""The mean keys of blocks, by the same sums in training and in a paged cache."""

import torch


def block_means(keys: torch.Tensor) -> torch.Tensor:
    """The means [B, G, D] of full blocks of keys [B, size, G, D], in their dtype. PyTorch sums bf16 in fp32."""
    return keys.mean(1)


def packed_blocks(T: int, cu_seqlens: torch.Tensor, max_len: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows [B, size] of the blocks of packed segments, and their table [S, W]. Rows past the end of a segment are
    any others."""
    S, cu, device = len(cu_seqlens) - 1, cu_seqlens.long(), cu_seqlens.device
    base = cu[:-1] // size + torch.arange(S, device=device)  # the first block of a segment: with room for a last one
    n = torch.arange(T // size + S, device=device)
    segment = (torch.searchsorted(base, n, right=True) - 1).clamp(min=0)
    first = cu[segment] + (n - base[segment]) * size
    rows = (first.unsqueeze(1) + torch.arange(size, device=device)).clamp(max=T - 1)
    tables = base.unsqueeze(1) + torch.arange(-(-max_len // size), device=device)
    return rows, tables.clamp(max=len(n) - 1).to(torch.int32)


@torch.no_grad()
def packed_means(
    k: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The means [B, G, D] of the blocks of packed segments k[T, G, D], and their table [S, W] for `choose_blocks`. The
    mean of a block that is not full is any number: it is not read."""
    rows, tables = packed_blocks(len(k), cu_seqlens, max_len, size)
    return block_means(k.detach()[rows]), tables
