"""Tensors of a weight file, before they are read: what a reader of a file format gives to weights.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `dtype` is the dtype of the values that `read` returns, by torch's name."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]


Stored = Mapping[str, StoredTensor]  # by the name in the file
