"""The same state through torch's distributed checkpoint (DCP), for runs whose tensors are sharded over ranks.

DCP's own file system format pickles its metadata; its Hugging Face storage writes safetensors and a JSON index, and no
pickle, so that is the one used. It works without a process group. What it does not give is atomicity, checksums and
the run's place: `checkpoint` does, and a run resumes from there.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

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
    """Read them back in place; a tensor that is not there is an error of DCP's that names it."""
    with _quiet(), torch.no_grad():
        dcp.load(_tensors(state), storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=not _distributed())
    state.flat.publish()


def _tensors(state: TrainState) -> dict[str, torch.Tensor]:
    model = {f"model/{name}": t for name, t in state.flat.masters().items()}
    return model | {f"optimizer/{name}": t for name, t in state.optimizer.tensors().items()}


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class _quiet(warnings.catch_warnings):
    """DCP warns that there is no process group each time; here that is meant."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
