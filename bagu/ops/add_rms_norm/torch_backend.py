"""Residual add and RMSNorm in PyTorch: the sum, then the norm of the rounded sum."""

import torch

from bagu.ops.rms_norm import torch_backend as rms_norm


def forward(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s = x + residual
    y, r = rms_norm.forward(s, w, eps)
    return y, s, r


def invariant_forward(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s = x + residual
    y, r = rms_norm.invariant_forward(s, w, eps)
    return y, s, r


def backward(
    dy: torch.Tensor, ds: torch.Tensor, s: torch.Tensor, w: torch.Tensor, r: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, dw = rms_norm.backward(dy, s.to(r.dtype), w, r, eps)
    dx = (normed + ds.to(r.dtype)).to(s.dtype)
    return dx, dw
