"""The same state in torch's distributed checkpoint format (DCP), for tools that read it; not for divided states.

DCP's file system format pickles its metadata. Its Hugging Face storage writes safetensors and a JSON index without
pickle, so this module uses it. It works without a process group. It has no atomicity, no checksums and no position of
the run: `checkpoint` has them, and a run resumes from a `checkpoint`.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from bagu.errors import BaguError
from bagu.train.memory.sharded import ShardedParameters
from bagu.train.state import TrainState

__all__ = ["load_dcp", "save_dcp"]


def save_dcp(path: Path, state: TrainState) -> None:
    """Write masters ("model/…") and optimizer state ("optimizer/…") to the folder `path`."""
    path.mkdir(parents=True, exist_ok=True)
    with _quiet():
        dcp.save(
            _tensors(state), storage_writer=dcp.HuggingFaceStorageWriter(str(path)), no_dist=not _distributed()
        )  # fmt: skip


def load_dcp(path: Path, state: TrainState) -> None:
    """Read them back in place; if a tensor is missing, DCP raises an error that names it."""
    with _quiet(), torch.no_grad():
        dcp.load(_tensors(state), storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=not _distributed())
    state.flat.publish()


def _tensors(state: TrainState) -> dict[str, torch.Tensor]:
    if isinstance(state.flat, ShardedParameters):
        raise BaguError("states that are divided over ranks have no DCP form", hint="use bagu.train.checkpoint")
    model = {f"model/{name}": t for name, t in state.flat.masters().items()}
    return model | {f"optimizer/{name}": t for name, t in state.optimizer.tensors().items()}


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class _quiet(warnings.catch_warnings):
    """Suppresses DCP's warning that there is no process group, which is intended here."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
