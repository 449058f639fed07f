"""A small run of each objective whose batches do not depend on the model, through `recipes.training.train`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tiny
import torch

from bagu.config import override
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.config import ModelConfig, MoEConfig
from bagu.nn.hollow import is_hollow
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.parallel.mesh import open_mesh
from bagu.recipes.catalogue import recipe, with_data, with_start
from bagu.recipes.models import save_model
from bagu.recipes.run import Run
from bagu.recipes.training import train
from bagu.runs.folder import RunFolder

SHAPE: dict[str, Any] = {
    "vocab_size": 270, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "max_len": 32,
}  # fmt: skip
SETTINGS = [
    "data.context=32", "data.rows=2", "data.micro_batches=2", "dtype=fp32", "device=cpu", "validation=0.3",
    "dedup=null", "eval_batches=2", "train.optimizer.kind=adamw", "train.optimizer.lr=0.005", "train.steps=4",
    "train.eval_every=2", "train.save_every=4", "train.sample_every=null", "train.schedule.warmup_steps=0",
]  # fmt: skip
EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_size=16)
LEFT_OUT = ("tokens_per_s", "memory_bytes", "data_wait_s", "mfu_percent")  # what the machine decides


def saved(folder: Path, seed: int, **changes: Any) -> Path:
    model = init_weights(Transformer(ModelConfig(**SHAPE | changes), dtype=torch.float32), seed)
    save_model(model, BpeTokenizer.train(["please go"], vocab_size=270, chat_template=DEFAULT_TEMPLATE), folder)
    return folder


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(folder: Path, kind: str) -> Run:
    """The run of an objective, with its data and its models in `folder`."""
    changes = {"moe": EXPERTS} if kind == "dpo" else {}
    start, more = str(saved(folder / "base", 0, **changes)), list[str]()
    if kind in ("dpo", "reward"):
        rows = [{"prompt": f"{i}?", "chosen": f"{i} please", "rejected": f"{i} go off"} for i in range(24)]
        data = written(folder / "pairs.jsonl", rows)
    elif kind == "sft":
        turns = [[("user", f"{i}?"), ("assistant", f"{i} please")] for i in range(24)]
        data = written(
            folder / "chats.jsonl", [{"messages": [{"role": r, "content": t} for r, t in turn]} for turn in turns]
        )
    else:
        data = folder / "texts"
        data.mkdir()
        for i in range(24):
            (data / f"{i}.txt").write_text("".join("abcd"[(i * j + j * j // 7) % 4] for j in range(120)))
    run = with_data(recipe(kind), [str(data)])
    if kind == "mlm":
        shape = {**SHAPE, "vocab_size": 262}
        more = [f"model.{name}={value}" for name, value in shape.items()] + ["tokenizer.vocab_size=262"]
    else:
        run = with_start(run, start)
    if kind == "distill":
        more = [f"objective.teacher={saved(folder / 'teacher', 1)}"]
    return override(run, [*SETTINGS, *more])


def go(run: Run, out: Path, *, alone: bool) -> bool:
    """Train; whether this rank's model is hollow afterwards, because only rank 0 gets all weights."""
    mesh = None
    if not alone:
        os.environ["BAGU_CACHE"] = str(out.parent / "cache")  # of the rank's process, which runs tests only
        mesh = open_mesh(run.train.mesh, tiny.CPU)
    trained = train(run, out, mesh=mesh, progress=_Silent())
    return any(is_hollow(p) for p in trained.model.parameters())


class _Silent:
    """An observer that shows nothing."""

    def on_step(self, step: int, metrics: object) -> None: ...
    def on_event(self, kind: str, step: int, **facts: object) -> None: ...
    def on_sample(self, step: int, texts: object) -> None: ...
    def rewind(self, step: int) -> None: ...
    def close(self) -> None: ...


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in LEFT_OUT} for row in RunFolder(folder).metrics()]
