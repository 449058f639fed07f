"""A small run on preference pairs: what the tests of the reward model and of DPO train."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bagu.cli import main
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.corpus import SourceConfig
from bagu.data.loader import DataConfig
from bagu.data.preference_batch import PreferenceBatch, batches_of
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.recipes.inputs import read_inputs
from bagu.recipes.models import save_model
from bagu.recipes.run import Run
from bagu.recipes.training import train
from bagu.runs.folder import RunFolder
from bagu.runs.observer import Observer
from bagu.train.loss import Loss
from bagu.train.objective import Objective
from bagu.train.optim import OptimizerConfig
from bagu.train.preference.preference_objective import PreferenceData
from bagu.train.state import TrainConfig
from bagu.types import IGNORE

MODEL = ModelConfig(
    vocab_size=270, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
    max_len=32,
)  # fmt: skip


def base_model(folder: Path) -> Path:
    """A model to start from, with a chat template."""
    tokenizer = BpeTokenizer.train(["please go off"], vocab_size=270, chat_template=DEFAULT_TEMPLATE)
    save_model(init_weights(Transformer(MODEL, dtype=torch.float32), seed=0), tokenizer, folder / "base")
    return folder / "base"


def write_pairs(path: Path, count: int) -> Path:
    """Polite answers are chosen over rude ones: a preference that can be learned."""
    rows = [{"prompt": f"{i}?", "chosen": f"{i} please", "rejected": f"{i} go off"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small_run(folder: Path, objective: Objective) -> Run:
    """Eight steps from `folder / "base"` on `folder / "pairs.jsonl"`, both written here."""
    pairs = write_pairs(folder / "pairs.jsonl", 24)
    return Run(
        objective=objective, init_from=str(base_model(folder)), sources={"pairs": SourceConfig(path=str(pairs))},
        data=DataConfig(context=32, rows=4, micro_batches=2), validation=0.3, dedup=None, dtype="fp32", device="cpu",
        train=TrainConfig(
            steps=8, eval_every=2, save_every=2, keep_best=True, optimizer=OptimizerConfig(kind="adamw", lr=0.01)
        ),
    )  # fmt: skip


def bagu(*args: str | Path) -> int:
    """Exit status of the command."""
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in args])
    return int(end.value.code or 0)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what the machine decides."""
    left_out = ("tokens_per_s", "memory_bytes", "data_wait_s", "mfu_percent")
    return [{k: v for k, v in row.items() if k not in left_out} for row in RunFolder(folder).metrics()]


def data_of(run: Run, tmp_path: Path) -> PreferenceData:
    data = read_inputs(run, tmp_path / "none").data
    assert isinstance(data, PreferenceData)
    return data


def sequences_of(batch: PreferenceBatch) -> list[tuple[list[int], int]]:
    """Ids and start of each sequence."""
    ends, targets = batch.batch.cu_seqlens.tolist(), batch.batch.targets
    found = []
    for a, b in itertools.pairwise(ends[: batch.num_sequences + 1]):
        found.append((batch.batch.ids[a:b].tolist(), b - a - int((targets[a:b] != IGNORE).sum())))
    return found


def in_micro_batches(
    loss: Loss[Any, Any], model: Transformer, data: PreferenceData, sizes: Sequence[int], *, paired: bool
) -> dict[str, float | int | None]:
    """The loss and the metrics of eight pairs, in micro-batches of these sizes."""
    config, found = DataConfig(context=32, rows=16), data.train["pairs"]
    parts = torch.arange(8).split(list(sizes))
    batches = batches_of([(found, part.numpy()) for part in parts], config, mismatched=not paired)
    totals = loss.totals(batches)
    done = [loss(model, batch, totals) for batch in batches]
    sums = {name: float(sum(p.metrics[name] for p in done)) for name in done[0].metrics}
    return {"whole": float(sum(p.loss.detach() for p in done)), **loss.metrics(0.0, sums, totals)}


class KillAt(Observer):
    """Kills its process as soon as a step is recorded."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: int, metrics: object) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_be_killed(run: Run, out: Path, cache: str, *, after_step: int) -> None:
    """A run for a process of its own, which has the environment of the fork server and not that of the test."""
    os.environ["BAGU_CACHE"] = cache
    train(run, out, progress=KillAt(after_step))
