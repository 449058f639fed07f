"""Other implementations of GroupNorm, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.group_norm.spec import Args


def eager(a: Args) -> torch.Tensor:
    return F.group_norm(a.x, a.groups, a.w, a.b, a.eps)


def liger(a: Args) -> torch.Tensor:
    from liger_kernel.ops import LigerGroupNormFunction

    return LigerGroupNormFunction.apply(a.x, a.w, a.b, a.x.shape[1], a.groups, a.eps)
