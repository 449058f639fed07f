"""A run through `fit`, on ranks or alone: for tests of checkpoints that go from one mesh to another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from tiny import Case

from bagu.parallel.mesh import open_mesh
from bagu.train.loop import fit

DROPOUT = {"dropout": 0.1}  # so that a resume must bring the random state back


class Rows:
    """An observer that keeps losses and events."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.losses[step] = metrics["loss_nats"]

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        self.events.append((kind, facts))

    def on_sample(self, step: int, texts: object) -> None: ...
    def rewind(self, step: int) -> None: ...
    def close(self) -> None: ...


def go(
    folder: Path | None, case: Case, *, alone: bool, resume: bool = False, pause_after: int | None = None
) -> tuple[Rows, dict[str, torch.Tensor]]:
    made, rows = tiny.model(case), Rows()
    config = tiny.config(case, alone=alone)
    mesh = None if alone else open_mesh(config.mesh, tiny.CPU)
    fit(
        config, made, tiny.loader(case.micro_batches), folder=folder, resume=resume, pause_after=pause_after,
        observers=[rows], mesh=mesh,
    )  # fmt: skip
    return rows, {name: t.detach().clone() for name, t in made.state_dict().items()}
