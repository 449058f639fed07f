"""Quantization of a matrix to fp8 in PyTorch."""

import torch

from bagu.ops.contract.signature import accumulator


def forward(x: torch.Tensor, amax: torch.Tensor | None, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    to, wide = getattr(torch, dtype), x.to(accumulator(x.dtype))
    if not x.numel():  # no number is the largest, and the scale counts as zero
        return x.to(to), x.to(to).mT.contiguous(), wide.new_zeros(())
    scale = (wide.abs() if amax is None else amax).amax() / torch.finfo(to).max
    scale = torch.where(scale < 2.0**-126, 0.0, scale)
    q = torch.where((scale > 0) & scale.isfinite(), wide / scale, 0.0).to(to)
    return q, q.mT.contiguous(), scale
