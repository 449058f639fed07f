"""The fp8 linear layer in PyTorch: torch._scaled_mm on Hopper where it takes the sizes, else fp32 products.

_scaled_mm with a scale per row returns bf16, so the rest of the epilogue starts from rounded sums there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.activations import activate
from bagu.ops.contract.signature import accumulator
from bagu.ops.fp8_matmul.spec import Args, takes_scaled_mm


def forward(a: Args) -> tuple[torch.Tensor]:
    x, w = a.x, a.w
    to, acc = getattr(torch, a.dtype), accumulator(a.x_scale.dtype)
    if takes_scaled_mm(x, w, a.dtype):
        scales = a.x_scale.float().reshape(-1, 1).contiguous(), a.w_scale.float().view(1, -1).contiguous()
        rows = torch._scaled_mm(x.reshape(-1, x.shape[-1]).contiguous(), w.contiguous().T, *scales, out_dtype=to)
        z = rows.view(*x.shape[:-1], w.shape[0])
    else:
        z = F.linear(x.to(acc), w.to(acc)) * a.x_scale.to(acc).unsqueeze(-1) * a.w_scale.to(acc)
    y = activate(z if a.bias is None else z + a.bias.to(z.dtype), a.activation)
    return ((y if a.residual is None else y + a.residual.to(y.dtype)).to(to),)
