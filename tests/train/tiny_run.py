"""A small real run: the model, the loader and the trainer in miniature, and `train` for a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bagu.config import from_dict
from bagu.data.loader import DataConfig, Loader
from bagu.data.store import TokenDocument
from bagu.data.store_writer import in_memory
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.runs.folder import RunFolder, RunRecorder
from bagu.train import TrainConfig, fit
from bagu.train.checkpoint import writing
from bagu.types import Batch

VOCAB, CONTEXT = 64, 32


def model(dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> Transformer:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
        "intermediate_size": 48, "max_len": CONTEXT,
    }  # fmt: skip
    return init_weights(Transformer(ModelConfig(**sizes | changes), dtype=dtype, device=device), seed=1)


def loader(*, micro_batches: int = 1, rows: int = 4, seed: int = 0) -> Loader:
    """Documents of unlike lengths that count upwards by a stride of their own: something a small model can learn."""
    stream = np.random.default_rng(0)
    documents = [
        TokenDocument(id=str(i), tokens=(stream.integers(VOCAB) + stream.integers(1, 4) * np.arange(n)) % VOCAB)
        for i, n in enumerate(stream.integers(2, 3 * CONTEXT, size=60))
    ]
    store = in_memory(documents, token_bytes=np.full(VOCAB, 3, np.int32))
    shape = DataConfig(context=CONTEXT, rows=rows, micro_batches=micro_batches, seed=seed, max_segments_per_row=8)
    return Loader({"counting": store}, shape)


def batches(step: int = 0, *, micro_batches: int = 1, rows: int = 4) -> tuple[Batch, ...]:
    return loader(micro_batches=micro_batches, rows=rows).batch(step)


class Notes:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.texts: dict[int, list[str]] = {}

    def on_step(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        assert not self.rows or step == max(self.rows) + 1, "steps ascend by one"
        self.rows[step] = dict(metrics)

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        self.events.append({"kind": kind, "step": step, **facts})

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        self.texts[step] = list(texts)

    def rewind(self, step: int) -> None:
        self.rows = {s: row for s, row in self.rows.items() if s < step}

    def close(self) -> None:
        pass

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


class KillAt(Notes):
    """Kills its process as soon as a step is recorded."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.at = step

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, options: Mapping[str, Any], *, resume: bool, kill_at: int | None, kill_in_save: bool) -> None:
    """A run in a folder of its own, with everything on that a resume must bring back: bf16, dropout, micro-batches.

    It kills itself after step `kill_at`, or within its first save: a kill from outside could come too late.
    """
    if kill_in_save:
        writing._sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
    torch.set_num_threads(1)
    config = from_dict(TrainConfig, options)
    run = RunFolder.create(folder, config, resume=resume)
    with RunRecorder(run, tensorboard=False) as recorder:
        trained = model(torch.bfloat16, dropout=0.1)
        data = loader(micro_batches=2)
        fit(
            config,
            trained,
            data,
            folder=run.checkpoints,
            resume=resume,
            observers=[recorder, *([] if kill_at is None else [KillAt(kill_at)])],
        )
