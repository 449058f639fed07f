"""A hash that identifies weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

__all__ = ["digest_of"]


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the names, shapes, dtypes and values of tensors."""
    digest = hashlib.sha256()
    for name, t in tensors.items():
        digest.update(f"{name} {tuple(t.shape)} {t.dtype}".encode())
        digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
