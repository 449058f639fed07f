"""One optimizer step: the central function of the trainer.

Forward and backward of each micro-batch, the gradient norm, one copy of all numbers to the host (the only time the
host waits for the device), the guard, the update. Under a mesh each rank has the micro-batches of the whole step and
runs its share of them: counts are of the whole step, gradients and numbers are summed over the ranks, and so every rank
makes the same decision and the same update. A model that is divided over ranks runs its part of each (divided.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bagu.errors import ArgumentError
from bagu.machine.timing import Stopwatch
from bagu.parallel.collectives import all_reduce
from bagu.parallel.data_parallel import combine
from bagu.parallel.mesh import Mesh
from bagu.parallel.spread import EVERYWHERE
from bagu.parallel.unlike.shares import dealt
from bagu.train.loss import Metrics, MicroBatch, MicroBatchLoss, Totals
from bagu.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a step. `skipped` is the reason why there was no update, and None if there was one."""

    loss: float  # the minimised value
    metrics: Metrics  # of the loss: see Loss.metrics
    grad_norm: float  # before clipping
    lr: float
    totals: Totals
    skipped: str | None


def step(state: TrainState, batches: Sequence[MicroBatch]) -> StepResult:
    """Run one update from the micro-batches of one global step, or refuse it (see `stability`)."""
    totals, lr = state.loss.totals(batches), state.lr
    if totals.idle:
        return idle_step(state, totals, lr)
    if state.mesh is not None:
        state.mesh.traffic.step = state.step
    counts = _counts(state, len(batches))
    mine = dealt(counts, 0 if state.mesh is None else state.mesh.coordinate("data"))
    watch = None if state.shares is None else Stopwatch(state.device)
    parts = run_backwards(state, batches, mine, totals)
    seconds = None if watch is None else watch.seconds()
    loss, sums, grad_norm = _read(state, parts, state.flat.finish(), counts, seconds)
    metrics = state.loss.metrics(loss, sums, totals)
    skipped = state.guard.judge(loss, grad_norm)
    if skipped is None:
        clip = state.config.clip
        scale = clip / grad_norm if clip is not None and grad_norm > clip else 1.0
        state.updates += 1
        state.optimizer.update(lr=lr, step=state.updates, scale=scale)
        state.publish()
        if parts[0].expert_load:
            balanced = state.model if state.divided is None else state.divided
            balanced.update_balance(_expert_load(state.mesh, parts))
        state.loss.updated(metrics)
        state.loss.stepped(metrics)
        state.step += 1
    state.data_step += 1
    return StepResult(loss=loss, metrics=metrics, grad_norm=grad_norm, lr=lr, totals=totals, skipped=skipped)


def run_backwards(
    state: TrainState, batches: Sequence[MicroBatch], mine: Sequence[int], totals: Totals, *, ahead: int = 0
) -> list[MicroBatchLoss]:
    """Forward and backward of this rank's micro-batches, of the data `ahead` steps after the state's. Gradients go to
    `state.flat`."""
    divided = state.divided
    if divided is not None and divided.has_stages:
        state.flat.begin(None)
        own: Any = [batches[number] for number in mine]
        return [divided.run_stages(state.loss, own, totals, state.flat)]  # type: ignore[arg-type]
    state.flat.begin(len(mine))
    parts = []
    for number in mine:
        seed_step(state.config.seed, state.data_step + ahead, number)
        if divided is None:
            part = state.loss(state.model, batches[number].to(state.device, non_blocking=True), totals)
        else:
            part = divided.run(state.loss, batches[number], totals)
        part.loss.backward()
        state.flat.end_backward()
        parts.append(part._replace(loss=part.loss.detach()))  # frees the graph
    return parts


def idle_step(state: TrainState, totals: Totals, lr: float) -> StepResult:
    """Count a step without an update: no gradient, and no change of the optimizer's state either."""
    state.step += 1
    state.data_step += 1
    metrics = state.loss.metrics(0.0, {}, totals)
    state.loss.stepped(metrics)
    return StepResult(loss=0.0, metrics=metrics, grad_norm=0.0, lr=lr, totals=totals, skipped=None)


def _counts(state: TrainState, number: int) -> tuple[int, ...]:
    """How many of a step's micro-batches each rank of the data runs: equally many, or by their measured speed."""
    if state.mesh is None:
        return (number,)
    if state.shares is not None:
        return state.shares.counts(number)
    ranks = state.mesh.size("data")
    if number % ranks:
        raise ArgumentError(
            f"a step has {number} micro-batches, and the mesh {state.mesh.config} divides them over {ranks} ranks",
            hint=f"set data.micro_batches to a multiple of {ranks}, or train.shares=measured",
        )
    return (number // ranks,) * ranks


def _read(
    state: TrainState,
    parts: Sequence[MicroBatchLoss],
    norm: torch.Tensor,
    counts: Sequence[int],
    seconds: float | None,
) -> tuple[float, Mapping[str, float], float]:
    """Loss and metrics of a step over its micro-batches, and the gradient norm, in one copy to the host."""
    names, peaks = list(parts[0].metrics), list(parts[0].peaks)
    sums, largest = sums_of(parts)
    if state.mesh is None:
        loss, *values, grad_norm = torch.stack([*sums, *largest, norm]).tolist()
    else:
        tops = torch.stack([*largest, norm.new_tensor(float(state.stop_asked))])
        total = combine(state.mesh, torch.stack(sums), tops, norm, seconds)
        if state.shares is not None:  # of ranks that have the same data (tp, cp), the slowest
            computed = [0.0] * len(counts)
            for rank, each in enumerate(total.seconds):
                at = state.mesh.config.coordinate("data", rank)
                computed[at] = max(computed[at], each)
            state.shares.record(counts, computed)
        *most, stop = total.peaks
        state.stop_asked = stop > 0
        loss, *values, grad_norm = *total.sums, *most, total.norm
    return loss, dict(zip([*names, *peaks], values, strict=True)), grad_norm


def sums_of(parts: Sequence[MicroBatchLoss]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Loss and metrics summed over micro-batches, and the largest of each peak, in the order of their names."""
    names, peaks = list(parts[0].metrics), list(parts[0].peaks)
    sums: Any = [sum(p.loss for p in parts), *(sum(p.metrics[name] for p in parts) for name in names)]
    return sums, [torch.stack([p.peaks[name] for p in parts]).amax() for name in peaks]


def _expert_load(mesh: Mesh | None, parts: Sequence[MicroBatchLoss]) -> list[torch.Tensor]:
    """Tokens per expert of each MoE layer over the whole step."""
    loads: list[torch.Tensor] = [sum(layer) for layer in zip(*(p.expert_load for p in parts), strict=True)]
    if mesh is not None:
        for load in loads:
            all_reduce(mesh, load, EVERYWHERE.data_group(mesh))
    return loads


def seed_step(seed: int, data_step: int, number: int = 0) -> None:
    """Make dropout a function of the seed, the data step and the number of the micro-batch in it, so that a resumed run
    draws the same random numbers, and so does a run on another number of ranks."""
    key = [seed, data_step, number] if number else [seed, data_step]  # the key of runs from before meshes
    value = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
    if torch.cuda.is_initialized() or torch.backends.mps.is_available():
        torch.manual_seed(value)
    else:  # torch.manual_seed formats a stack trace for each device that has not started: 0.6 ms
        torch.default_generator.manual_seed(value)
