"""Runs whose ranks must decide together: one rank has a bad batch, all evaluate, one is interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import resume
import tiny
from tiny import Case

from bagu.nn.sample import generate
from bagu.parallel.mesh import open_mesh
from bagu.train import TrainState, step
from bagu.train.cross_entropy import CrossEntropy, TargetTotals, held_out_loss
from bagu.train.loop import fit
from bagu.train.memory.divided import DividedModel
from bagu.train.memory.divided_forward import divided_generate


class PoisonedOn(CrossEntropy):
    """The loss of a micro-batch, by number, is NaN on one rank."""

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.number, self.calls = number, 0

    def of_hidden(self, *args: Any) -> Any:
        loss, metrics = super().of_hidden(*args)
        self.calls += 1
        return (loss * float("nan") if self.calls == self.number else loss), metrics


def poisoned(case: Case) -> tuple[list[str | None], list[int]]:
    """The reasons to skip, and the counts of updates and data steps, of three steps; rank 1's second one is NaN."""
    config, model = tiny.config(case, alone=False), tiny.model(case)
    mesh = open_mesh(config.mesh, tiny.CPU)
    a_step = case.micro_batches // mesh.size("data")
    state = TrainState(model, config, PoisonedOn(a_step + 1 if mesh.rank == 1 else None), mesh)
    data = tiny.loader(case.micro_batches)
    found = [step(state, data.batch(s)).skipped for s in range(3)]
    state.close()
    assert all(p.isfinite().all() for p in model.parameters())
    return found, [state.step, state.data_step]


def evaluated(
    case: Case, *, alone: bool, gathers: bool = True, temperature: float = 1.0
) -> tuple[dict[int, float], dict[int, list[str]]]:
    """The held-out loss after each step, and tokens that the model continues prompts with."""
    config, model = tiny.config(case, alone=alone), tiny.model(case)
    mesh = None if alone else open_mesh(config.mesh, tiny.CPU)
    held_out = tiny.loader(case.micro_batches).batch(1000)
    losses, texts = {}, {}

    class Rows(resume.Rows):
        def on_step(self, step: int, metrics: Any) -> None:
            losses[step] = metrics["val_loss_nats"]

        def on_sample(self, step: int, texts_: Any) -> None:
            texts[step] = list(texts_)

    def sample(m: Any) -> list[str]:
        make: Any = divided_generate if isinstance(m, DividedModel) else generate
        assert gathers or alone or all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
        return [str(new) for new in make(m, [[1, 2, 3], [5]], 8, temperature=temperature, eos_id=0)]

    fit(
        config, model, tiny.loader(case.micro_batches), observers=[Rows()], mesh=mesh, gathers=gathers,
        evaluate=held_out_loss(lambda: held_out), sample=sample,
    )  # fmt: skip
    return losses, texts


def assembled(case: Case, *, alone: bool) -> tuple[set[int], list[float]]:
    """The numbers of the micro-batches that this rank has assembled, and the losses of rank 0."""
    config, model = tiny.config(case, alone=alone), tiny.model(case)
    mesh = None if alone else open_mesh(config.mesh, tiny.CPU)
    loader, rows, numbers = tiny.loader(case.micro_batches), resume.Rows(), set[int]()
    make = loader._assembled

    def watched(step: int, wanted: Sequence[int]) -> Any:
        numbers.update(wanted)
        return make(step, wanted)

    loader._assembled = watched  # type: ignore[method-assign]
    fit(config, model, loader, observers=[rows], mesh=mesh)
    return numbers, list(rows.losses.values())


class PressOn(CrossEntropy):
    """Ctrl-C on one rank, in its third micro-batch."""

    def __init__(self, pressed: bool) -> None:
        super().__init__()
        self.pressed, self.calls = pressed, 0

    def of_hidden(self, *args: Any) -> Any:
        self.calls += 1
        if self.pressed and self.calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().of_hidden(*args)


def interrupted(case: Case) -> tuple[bool, int]:
    config, model = tiny.config(case, alone=False), tiny.model(case)
    mesh = open_mesh(config.mesh, tiny.CPU)
    result = fit(config, model, tiny.loader(case.micro_batches), loss=PressOn(mesh.rank == 1), mesh=mesh)
    return result.interrupted, result.step


def batch_norm(case: Case) -> str:
    config, model = tiny.config(case, alone=False), tiny.model(case)
    try:
        TrainState(model, config, mesh=open_mesh(config.mesh, tiny.CPU))
    except ValueError as error:
        return str(error)
    return ""


def memory(case: Case) -> tuple[int, int, int]:
    """The bytes of parameters in memory after a step: of the caller's model, of this rank's part of it; and of all."""
    config, model = tiny.config(case, alone=False), tiny.model(case)
    whole = sum(p.nbytes for p in model.parameters())
    state = TrainState(model, config, mesh=open_mesh(config.mesh, tiny.CPU))
    step(state, tiny.loader(case.micro_batches).batch(0))
    held, part = ([p.untyped_storage() for p in m.parameters()] for m in (model, state.model))
    sizes = [sum({s.data_ptr(): s.nbytes() for s in storages}.values()) for storages in (held, part)]  # one is flat
    return sizes[0], sizes[1], whole


def failing(case: Case) -> str:
    """One rank fails in a step: it ends with its own error, and does not wait for the others to gather the model."""
    config, model = tiny.config(case, alone=False), tiny.model(case)
    mesh = open_mesh(config.mesh, tiny.CPU)

    class Failing(CrossEntropy):
        def totals(self, batches: Any) -> TargetTotals:
            raise ValueError("a bug")

    try:
        fit(config, model, tiny.loader(case.micro_batches), loss=Failing(), mesh=mesh)
    except ValueError as error:
        return f"{error}, {sum(p.numel() for p in model.parameters())} parameters"
    return ""
