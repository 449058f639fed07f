"""Other implementations of int8 dequantization, for the benchmark."""

import torch


def eager(q: torch.Tensor, scale: torch.Tensor, granularity: str, dtype: str) -> torch.Tensor:
    return (q * (scale.unsqueeze(-1) if granularity == "row" else scale)).to(getattr(torch, dtype))
