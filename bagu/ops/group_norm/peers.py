"""Other implementations of GroupNorm, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def eager(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None, groups: int, eps: float) -> torch.Tensor:
    return F.group_norm(x, groups, w, b, eps)


def liger(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None, groups: int, eps: float) -> torch.Tensor:
    from liger_kernel.ops import LigerGroupNormFunction

    return LigerGroupNormFunction.apply(x, w, b, x.shape[1], groups, eps)
