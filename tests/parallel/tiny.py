"""A small run on any mesh, in this process or on ranks: the losses of its steps, and the weights it ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bagu.data.loader import DataConfig, Loader, Packing
from bagu.data.store import TokenDocument
from bagu.data.store_writer import in_memory
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.lora import add_lora
from bagu.nn.model import Transformer
from bagu.parallel.mesh import MeshConfig, open_mesh
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step
from bagu.train.prepare import prepared

VOCAB, CONTEXT = 64, 32
CPU = torch.device("cpu")
OF_A_MESH = ("offload", "pipeline", "stages_per_rank", "context_parallel")  # options that mean nothing without one
Run = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]  # (loss, norm) of each step, and the weights at the end


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `mesh` is its mesh on ranks; the run that it must equal is the same without one."""

    name: str
    mesh: str = "dp=2"
    zero: Any = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    micro_batches: int = 4
    lora: bool = False
    steps: int = 20


def loader(micro_batches: int, packing: Packing = "stream") -> Loader:
    """Documents of unlike lengths that count upwards by a stride: micro-batches have unlike numbers of targets."""
    stream = np.random.default_rng(0)
    documents = [
        TokenDocument(id=str(i), tokens=(stream.integers(VOCAB) + stream.integers(1, 4) * np.arange(n)) % VOCAB)
        for i, n in enumerate(stream.integers(2, 3 * CONTEXT, size=60))
    ]
    store = in_memory(documents, token_bytes=np.full(VOCAB, 3, np.int32))
    most = None if packing == "joined" else 8
    shape = DataConfig(context=CONTEXT, rows=1, micro_batches=micro_batches, max_segments_per_row=most, packing=packing)
    return Loader({"counting": store}, shape)


def model_config(case: Case) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
        "intermediate_size": 48, "max_len": CONTEXT,
    }  # fmt: skip
    return ModelConfig(**sizes | dict(case.model))


def model(case: Case) -> Transformer:
    made = init_weights(Transformer(model_config(case), dtype=case.dtype), seed=1)
    return with_lora(made) if case.lora else made


def with_lora(made: Transformer) -> Transformer:
    add_lora(made, rank=4, alpha=8.0, targets=".*", seed=1, base=None)
    return made


def config(case: Case, *, alone: bool) -> TrainConfig:
    mesh = MeshConfig() if alone else MeshConfig.parse(case.mesh)
    optimizer = OptimizerConfig(**{"kind": "adamw", "lr": 0.01, **case.optimizer})
    options = {"steps": case.steps, "clip": 0.5, "bucket_mb": 0.02, **case.options}
    if alone:
        options = {k: v for k, v in options.items() if k not in OF_A_MESH}
    return TrainConfig(optimizer=optimizer, mesh=mesh, zero=None if alone else case.zero, **options)


class Alone:
    """Runs in this process. Cases that differ in nothing but their mesh share one."""

    def __init__(self) -> None:
        self._found: dict[str, Run] = {}

    def run(self, case: Case) -> Run:
        options = {k: v for k, v in case.options.items() if k not in OF_A_MESH}
        case = replace(case, name="", mesh="", zero=None, options=options)
        if (key := repr(case)) not in self._found:  # a case has mappings, which are not hashable
            self._found[key] = run(case, alone=True)
        return self._found[key]


def run(case: Case, *, alone: bool) -> Run:
    how, made = config(case, alone=alone), model(case)
    mesh = None if alone else open_mesh(how.mesh, CPU)
    state, data = TrainState(made, how, mesh=mesh), loader(case.micro_batches)
    found = []
    with prepared(state.model, how, CPU):
        for s in range(case.steps):
            result = step(state, data.batch(s))
            assert result.skipped is None
            found.append((result.loss, result.grad_norm))
    state.close()
    return found, {name: t.detach().clone() for name, t in made.state_dict().items()}
