"""How long a run is: a number of steps, or the number that fits into some minutes.

With minutes, the first steps are timed and the run goes on with the number of steps that fits. The learning rate stays
at its peak until a share of these steps is left (`wsd`): the recipe's, or half. A warm-up is at most a tenth of a run,
or the timed steps.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from bagu.recipes.run import Run
from bagu.recipes.training import Trained
from bagu.runs.progress import TrainProgress
from bagu.train.schedule import ScheduleConfig

TIMED_STEPS = 8  # before the number of steps is chosen
EVALUATIONS = 4  # in a run, at least
FORWARD_SHARE = 1 / 3  # the time of a forward as a fraction of a training step
OVERHEAD = 1.08  # samples and checkpoints, relative to the steps


def with_steps(run: Run, steps: int) -> Run:
    """The run with this many steps; its warm-up, and what happens every so many steps, suit a short run."""
    return _with_steps(run, steps, _with_warmup(run.train.schedule, max(1, steps // 10)))


def train_for(
    minutes: float, run: Run, began: float, train: Callable[[Run, bool, int | None], Trained]
) -> tuple[Run, Trained]:
    """Train `run` for `minutes` since the time `began`. `train` takes a run, whether it resumes one, and after how many
    steps it pauses."""
    schedule = run.train.schedule
    if schedule.kind != "wsd":
        schedule = ScheduleConfig(kind="wsd", warmup_steps=schedule.warmup_steps, decay_share=0.5)
    run = replace(run, train=replace(run.train, schedule=schedule))
    begun = train(run, False, TIMED_STEPS)
    if begun.fit.interrupted:
        return run, begun
    steps = _fitting(run, begun, 60 * minutes - (time.monotonic() - began))
    run = _with_steps(run, steps, _with_warmup(schedule, max(TIMED_STEPS, steps // 10)))
    return run, train(run, True, None)


def progress_of(run: Run, pause_after: int | None) -> TrainProgress:
    """The progress line of a call of `train`: of the timed steps, or of the run."""
    return TrainProgress(
        pause_after or run.train.steps,
        name=run.objective.kind if pause_after is None else "timing",
        formats=run.objective.display().progress,
        quiet=("resume",),
    )


def _with_steps(run: Run, steps: int, schedule: ScheduleConfig) -> Run:
    most = max(1, steps // EVALUATIONS)
    every = {
        name: min(value, most)
        for name in ("eval_every", "sample_every", "save_every")
        if (value := getattr(run.train, name)) is not None
    }
    return replace(run, train=replace(run.train, steps=steps, schedule=schedule, **every))


def _with_warmup(schedule: ScheduleConfig, most: int) -> ScheduleConfig:
    return replace(schedule, warmup_steps=min(schedule.warmup_steps, most))


def _fitting(run: Run, begun: Trained, seconds: float) -> int:
    """How many steps, with those of `begun`, fit into the time. The median leaves out the first, slow ones."""
    rows = begun.folder.metrics()
    step_s = statistics.median(row["tokens"] / row["tokens_per_s"] for row in rows)
    evaluations = EVALUATIONS * run.eval_batches * FORWARD_SHARE
    return max(2 * TIMED_STEPS, TIMED_STEPS + int((seconds / step_s - evaluations) / OVERHEAD))
