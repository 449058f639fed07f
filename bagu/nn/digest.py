"""Hashes that identify weights: `digest_of` of every value, `fingerprint_of` of a sample that takes no time."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from bagu.machine.cores import available_cores
from bagu.nn.hollow import Values, value_of

# A core hashes 1.5 GB/s with SHA instructions, and hashlib releases the GIL. The number of threads is bounded because
# each holds a copy of its tensor, if that is on a GPU.
MAX_THREADS = 16
BLOCK, BLOCKS = 4096, 64  # bytes, and their number, of each tensor that a fingerprint reads


def digest_of(tensors: Mapping[str, torch.Tensor], values: Values | None = None) -> str:
    """SHA-256 of the names, shapes, dtypes and values of tensors, where a value is its own SHA-256. `values` has those
    of hollow tensors, of which one exists at a time."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1 if values is not None else min(MAX_THREADS, available_cores())) as pool:
        found = pool.map(lambda item: _of_values(value_of(item[0], item[1], values)), tensors.items())
        for (name, t), value in zip(tensors.items(), found, strict=True):
            digest.update(f"{name} {tuple(t.shape)} {t.dtype} {value}\n".encode())
    return digest.hexdigest()


def fingerprint_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The digest of the tensors with BLOCKS blocks of each, evenly spaced from its first byte to its last. Training
    changes nearly every value, so other weights have another fingerprint; a change of single values can go unseen."""
    return digest_of({f"{name} {tuple(t.shape)} {t.dtype}": _sample(t) for name, t in tensors.items()})


def _sample(t: torch.Tensor) -> torch.Tensor:
    values = t.detach().reshape(-1)
    size = BLOCK // values.element_size()
    if values.numel() <= size * BLOCKS:
        return values
    starts = torch.linspace(0, values.numel() - size, BLOCKS, dtype=torch.float64).long().tolist()
    return torch.cat([values[at : at + size] for at in starts])


def _of_values(t: torch.Tensor) -> str:
    return hashlib.sha256(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
