"""Other implementations of grouped products, for the benchmark."""

import itertools

import torch


def eager(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A product for each expert. The offsets are read on the host, which waits for the device."""
    ends = [0, *offsets.tolist()]
    parts = [x[a:b] @ own.mT for (a, b), own in zip(itertools.pairwise(ends), w, strict=True)]
    return torch.cat((*parts, x.new_zeros(x.shape[0] - ends[-1], w.shape[1])))


def torch_grouped_mm(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """CUTLASS's grouped GEMM, for bf16. It does not write the rows past the last end."""
    return torch._grouped_mm(x, w.mT, offsets)
