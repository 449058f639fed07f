"""A model's linear layers as a CPU wants them: each weight laid out once, for many products with few rows.

fp32 is kept as [in, out], with which BLAS multiplies 4 to 16 rows in 0.6 to 0.7 of the time of [out, in], the layout of
checkpoints. bf16 is in oneDNN's tiles, which AMX reads; torch would tile it anew at each call. int8 is quantize.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from bagu.nn.linear import Linear

__all__ = ["Pack", "Packed", "merged", "pack"]


class Packed(Protocol):
    """y = x Wᵀ + b."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x Wᵀ + b."""
        ...


Pack = Callable[[torch.Tensor, torch.Tensor | None], Packed]  # of a weight [out, in] and a bias


class Plain:
    """fp32 (or fp64): BLAS calls of 16 rows, residual or bias included.

    MKL has a kernel for up to 16 rows that reads the weight as it lies, and from 17 rows on packs it first. Two cores,
    32 rows and all linears of the 8M model: 6.4 ms in blocks of 16, 9.0 ms as `F.linear`, 11.6 ms in one piece.
    """

    BLOCK, MOST = 16, 128  # with more rows than MOST the packing pays

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight.t().contiguous(), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return self.add(self.bias.expand(x.shape[0], -1), x, biased=True)
        M, w, B = x.shape[0], self.weight, self.BLOCK
        if M <= B or M > self.MOST:
            return torch.mm(x, w)
        y = x.new_empty(M, w.shape[1])
        for i in range(0, M, B):
            torch.mm(x[i : i + B], w, out=y[i : i + B])
        return y

    def add(self, residual: torch.Tensor, x: torch.Tensor, *, biased: bool = False) -> torch.Tensor:
        M, w, B = x.shape[0], self.weight, self.BLOCK
        if M <= B or M > self.MOST:
            y = torch.addmm(residual, x, w)
        else:
            y = x.new_empty(M, w.shape[1])
            for i in range(0, M, B):
                torch.addmm(residual[i : i + B], x[i : i + B], w, out=y[i : i + B])
        return y if self.bias is None or biased else y.add_(self.bias)


class Tiled:
    """bf16 in oneDNN's own layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, None), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self(x).add_(residual)


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    """A weight [out, in] in the layout of its dtype."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    tiled = weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
    return (Tiled if tiled else Plain)(weight, bias)


def merged(linear: Linear, scale: torch.Tensor | None = None) -> torch.Tensor:
    """A layer's weight with all that is laid over it, and with the gain of the norm before it."""
    w = linear.merged().detach()
    return w if scale is None else (w.float() * scale.float()).to(w.dtype)
