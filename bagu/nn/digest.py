"""A hash that identifies weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from bagu.machine.cores import available_cores

# A core hashes 1.5 GB/s with SHA instructions, and hashlib releases the GIL. The number of threads is bounded because
# each holds a copy of its tensor, if that is on a GPU.
MAX_THREADS = 16


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the names, shapes, dtypes and values of tensors, where a value is its own SHA-256."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(min(MAX_THREADS, available_cores())) as pool:
        for (name, t), values in zip(tensors.items(), pool.map(_of_values, tensors.values()), strict=True):
            digest.update(f"{name} {tuple(t.shape)} {t.dtype} {values}\n".encode())
    return digest.hexdigest()


def _of_values(t: torch.Tensor) -> str:
    return hashlib.sha256(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
