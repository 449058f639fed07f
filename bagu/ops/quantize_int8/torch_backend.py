"""Quantization to int8 in PyTorch: for CPUs and torch.compile, and as readable formulas."""

import torch

from bagu.ops.contract.signature import accumulator


def forward(x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    xf = x.to(accumulator(x.dtype))
    if not x.numel():  # an empty group has no largest number and counts as zero
        shape = {"tensor": (1,), "row": x.shape[:-1], "channel": x.shape[-1:]}[granularity]
        return torch.zeros_like(x, dtype=torch.int8), xf.new_zeros(shape)
    top = xf.abs()
    if granularity == "row":
        top = top.amax(-1, keepdim=True)
    else:
        top = top.amax().reshape(1) if granularity == "tensor" else top.reshape(-1, x.shape[-1]).amax(0)
    scale = top / 127
    scale = torch.where(scale < 2.0**-126, 0.0, scale)
    q = torch.where((scale > 0) & scale.isfinite(), xf / scale, 0.0).round().clamp(-127, 127).to(torch.int8)
    return q, scale.squeeze(-1) if granularity == "row" else scale
