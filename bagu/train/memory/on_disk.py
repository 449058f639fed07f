"""Tensors whose memory is a file: what one rank writes for all ranks without holding it.

A rank that saves a divided model gathers it tensor by tensor, puts each into such a tensor and lets the kernel write it
back. The file has no name: it is gone when the tensor is.
"""

import mmap
import tempfile
from pathlib import Path

import numpy as np
import torch


def on_disk(values: torch.Tensor, folder: Path) -> torch.Tensor:
    """A copy of `values` in a nameless file of `folder`. Its pages are not resident afterwards; reading loads them."""
    if values.nbytes == 0:
        return values.detach().cpu().clone()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, prefix="bagu-") as file:
        file.truncate(values.nbytes)
        pages = mmap.mmap(file.fileno(), values.nbytes)
    flat = torch.from_numpy(np.frombuffer(pages, dtype=np.uint8))  # keeps `pages` alive
    copy = flat.view(values.dtype).view(values.shape)
    copy.copy_(values.detach())
    if hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)
    return copy
