"""Other implementations of quantization to fp8, for the benchmark."""

import torch


def eager(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual user code; a smallest scale avoids division by zero for a row of zeros."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)
