"""MLA attention with PyTorch: paged attention with one key head, whose values are a view of the keys."""

from __future__ import annotations

import torch

from bagu.ops.mla_attention.spec import Args, as_paged
from bagu.ops.paged_attention import torch_backend as paged


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    return paged.forward(as_paged(a), op="mla_attention")


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The same bits that `attention` gives these tokens in batch-invariant mode."""
    return paged.invariant_forward(as_paged(a), op="mla_attention")
