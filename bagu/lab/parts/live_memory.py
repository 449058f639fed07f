"""The peak of the memory that tensors take, on a CPU as well: for labs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While open, counts the bytes of the storages that ops return, until each is freed. Temporaries inside an op are
    not seen, nor are tensors that exist before."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = [t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage(), known)
        return out

    def _add(self, storage: Any, known: list[Any]) -> None:
        if storage in self._seen or any(storage.data_ptr() == other.data_ptr() for other in known):
            return  # a view, or the result of an op in place
        size = storage.nbytes()
        self._seen[storage] = size
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.bytes -= size
