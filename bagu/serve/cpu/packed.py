"""A model's linear layers as a CPU wants them: each weight laid out once, for many products with few rows.

fp32 is there twice: as [out, in], the layout of checkpoints, for one or two rows, and as [in, out] for more. bf16 is in
oneDNN's tiles, which AMX reads, where oneDNN has bf16 for this CPU; torch would tile it anew at each call. int8 is
quantize.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from bagu.machine.device import onednn_has_bf16
from bagu.nn.linear import Linear

__all__ = ["Pack", "Packed", "Plain", "merged", "pack", "product"]


class Packed(Protocol):
    """y = x Wᵀ + b."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x Wᵀ + b; the residual may be overwritten with it."""
        ...


Pack = Callable[[torch.Tensor, torch.Tensor | None], Packed]  # of a weight [out, in] and a bias


class Plain:
    """fp32 (or fp64) by BLAS. All linears of the 8M model on two cores, us by rows:

        rows                1      2      4      8     16     32     64
        [out, in]         729    891   1312   2051   3047   4270   5666
        [in, out]         815   1030   1062   1401   1933   3348   5526

    Blocks of 16 rows, each a call, are no better than one (3.9 to 4.5 ms at 32). MKL's packed weights are (3.1 ms),
    but are packed for one number of rows.
    """

    FEW = 2

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.bias, self.few, self.many = bias, weight.t(), weight.t().contiguous()

    def _weight(self, x: torch.Tensor) -> torch.Tensor:
        return self.few if x.shape[0] <= self.FEW else self.many

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        w = self._weight(x)
        return torch.mm(x, w, out=out) if self.bias is None else torch.addmm(self.bias, x, w, out=out)

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        residual.addmm_(x, self._weight(x))
        return residual if self.bias is None else residual.add_(self.bias)


class Tiled:
    """bf16 in oneDNN's own layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, None), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self(x).add_(residual)


def product(packed: Packed, x: torch.Tensor, out: torch.Tensor) -> None:
    """out = x Wᵀ + b: by the product itself where it can, else by a copy."""
    if isinstance(packed, Plain):
        packed(x, out)
    else:
        out.copy_(packed(x))


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    """A weight [out, in] in the layout of its dtype."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    tiled = weight.dtype == torch.bfloat16 and onednn_has_bf16()
    return (Tiled if tiled else Plain)(weight, bias)


def merged(linear: Linear, scale: torch.Tensor | None = None) -> torch.Tensor:
    """A layer's weight with all that is laid over it, and with the gain of the norm before it."""
    w = linear.merged().detach()
    return w if scale is None else (w.float() * scale.float()).to(w.dtype)
