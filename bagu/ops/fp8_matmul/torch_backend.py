"""The fp8 linear layer in PyTorch: torch._scaled_mm on Hopper where it takes the sizes, else fp32 products.

_scaled_mm with a scale per row returns bf16, so the rest of the epilogue starts from rounded sums there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.activations import activate
from bagu.ops.contract.signature import accumulator
from bagu.ops.kernels.launch import is_hopper


def takes_scaled_mm(x: torch.Tensor, w: torch.Tensor, dtype: str) -> bool:
    """Whether torch._scaled_mm multiplies these with a scale per row."""
    fits = x.numel() > 0 and x.shape[-1] % 16 == 0 and w.shape[0] % 16 == 0 and dtype == "bfloat16"
    return x.is_cuda and fits and is_hopper(x.device)


def forward(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, activation: str | None, dtype: str,
) -> tuple[torch.Tensor]:  # fmt: skip
    to, acc = getattr(torch, dtype), accumulator(x_scale.dtype)
    if takes_scaled_mm(x, w, dtype):
        scales = x_scale.float().reshape(-1, 1).contiguous(), w_scale.float().view(1, -1).contiguous()
        rows = torch._scaled_mm(x.reshape(-1, x.shape[-1]).contiguous(), w.contiguous().T, *scales, out_dtype=to)
        z = rows.view(*x.shape[:-1], w.shape[0])
    else:
        z = F.linear(x.to(acc), w.to(acc)) * x_scale.to(acc).unsqueeze(-1) * w_scale.to(acc)
    y = activate(z if bias is None else z + bias.to(z.dtype), activation)
    return ((y if residual is None else y + residual.to(y.dtype)).to(to),)
