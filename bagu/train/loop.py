"""The loop: batches in, updates made, everything of note told to the observers.

`fit` is the trainer. A run can be killed at any moment: it goes on from its last checkpoint and ends with the bits it
would have ended with, since a step is a function of the state and of `data_step` alone.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from bagu.config import diff, to_dict
from bagu.errors import ArgumentError
from bagu.nn.model import Transformer
from bagu.runs.observer import Observer
from bagu.train import checkpoint
from bagu.train.meters import Meters
from bagu.train.objective import Objective
from bagu.train.prepare import Interrupt, prepared
from bagu.train.saving import Saver
from bagu.train.stability import TrainingDiverged
from bagu.train.state import TrainConfig, TrainState
from bagu.train.step import StepResult, step
from bagu.types import Batch

__all__ = ["Batches", "Begin", "Evaluate", "FitResult", "Sample", "fit"]

Evaluate = Callable[[Transformer], Mapping[str, float]]  # metrics, by names like val_loss_nats
Sample = Callable[[Transformer], Sequence[str]]  # texts
Begin = Callable[[int], Sequence[Observer]]  # the step it begins at -> further observers


class Batches(Protocol):
    """What `fit` needs of a loader: global steps from any place on, and a JSON description of that place."""

    def prefetch(self, start: int) -> contextlib.AbstractContextManager[Iterator[tuple[Batch, ...]]]: ...

    def cursor(self, step: int) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """How a run ended. `interrupted` is a Ctrl-C: what is left can be done by resuming from `checkpoint`."""

    step: int
    interrupted: bool
    metrics: Mapping[str, float | int | None]  # of the last step made here
    checkpoint: Path | None


def fit(
    config: TrainConfig,
    model: Transformer,
    loader: Batches,
    *,
    folder: Path | None = None,
    resume: bool = False,
    pause_after: int | None = None,
    observers: Sequence[Observer] = (),
    evaluate: Evaluate | None = None,
    sample: Sample | None = None,
    objective: Objective | None = None,
    begin: Begin | None = None,
    identity: Mapping[str, str] | None = None,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
) -> FitResult:
    """Train `model` in place until `config.steps` updates are made, or Ctrl-C.

    Checkpoints go to `folder`; with `resume` the run goes on from the last good one there, if there is one. `identity`
    names what must not change in between (fingerprints of the tokenizer, of the model): a resume where one differs is
    refused. `begin` is called once, when everything has been checked and restored and nothing has been written: a
    caller that records the run starts to do so there. `pause_after` stops the run after so many
    updates, saved and ready to be resumed. Observers are the caller's to close.
    """
    _refuse_idle_options(config, folder, evaluate, sample)
    state = TrainState(model, config, objective)
    run = _Run(state, loader, folder, observers, identity or {})
    meters = Meters(state.device, flops_per_token=flops_per_token, peak_flops=peak_flops)
    row: dict[str, float | int | None] = {}
    with run, prepared(model, config, state.device), Interrupt() as interrupt:
        run.begin(resume=resume, called=begin)
        stop = config.steps if pause_after is None else min(pause_after, config.steps)
        while state.step < stop and not interrupt.asked:
            meters.start()
            batches = run.next_batches()
            meters.data_arrived()
            result = step(state, batches)
            run.tell_saves()
            if result.skipped is not None:
                run.skip(result)
                continue
            row = meters.row(result)
            last = state.step == config.steps
            if evaluate is not None and _due(config.eval_every, state.step, last):
                with _inference(model):
                    row |= evaluate(model)
            run.tell("on_step", state.step - 1, row)
            if sample is not None and _due(config.sample_every, state.step, last):
                with _inference(model), torch.compiler.set_stance("force_eager"):  # its shapes change at each token
                    run.tell("on_sample", state.step - 1, sample(model))
            if folder is not None and _due(config.save_every, state.step, last):
                run.save(row)
        if interrupt.asked:
            run.interrupted(row)
        elif state.step < config.steps:
            run.save_rest(row)
    return FitResult(step=state.step, interrupted=interrupt.asked, metrics=row, checkpoint=run.checkpoint)


def _due(every: int | None, step: int, last: bool) -> bool:
    return last or (every is not None and step % every == 0)


@contextlib.contextmanager
def _inference(model: Transformer) -> Iterator[None]:
    """Evaluation mode, no gradients; dropout draws of the next step do not depend on what happens inside."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def _refuse_idle_options(
    config: TrainConfig, folder: Path | None, evaluate: Evaluate | None, sample: Sample | None
) -> None:
    """An option that would do nothing is a mistake of whoever set it."""
    for option, needs, given in (
        ("eval_every", "evaluate", evaluate),
        ("sample_every", "sample", sample),
        ("save_every", "folder", folder),
    ):
        if getattr(config, option) is not None and given is None:
            raise ArgumentError(
                f"{option} is {getattr(config, option)}, and fit was given no {needs}", hint=f"pass {needs}=…"
            )


class _Run:
    """What stands around the steps: the data's place, the checkpoints, what observers are told, going back."""

    def __init__(
        self,
        state: TrainState,
        loader: Batches,
        folder: Path | None,
        observers: Sequence[Observer],
        identity: Mapping[str, str],
    ) -> None:
        self.state, self.loader, self.folder = state, loader, folder
        self.observers, self.identity = tuple(observers), dict(identity)
        self.checkpoint: Path | None = None  # the last one known to be whole
        self.failure: checkpoint.CheckpointError | None = None  # of the last save
        self.saved_at: int | None = None  # the data_step of the last save
        config = state.config
        self.saver = None if folder is None else Saver(folder, keep_last=config.keep_last, keep_best=config.keep_best)
        self._feed = contextlib.ExitStack()
        self._batches: Iterator[tuple[Batch, ...]] | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self._feed.close()
        if self.saver is not None:
            self.saver.close()
            self.tell_saves()
        self.state.close()
        if error is None and self.failure is not None:  # the last save of the run: nothing will try again
            raise self.failure

    def tell(self, what: str, *args: Any, **facts: Any) -> None:
        for observer in self.observers:
            getattr(observer, what)(*args, **facts)

    # --- data ---------------------------------------------------------------------------------------------------------

    def next_batches(self) -> tuple[Batch, ...]:
        """The micro-batches at `data_step`; the loader makes the ones after it meanwhile."""
        if self._batches is None:
            self._batches = self._feed.enter_context(self.loader.prefetch(self.state.data_step))
        return next(self._batches)

    def _seek(self) -> None:
        """The data goes on at another place."""
        self._feed.close()
        self._batches = None

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, row: Mapping[str, float | int | None]) -> None:
        """Begin to save the run as it is now."""
        assert self.saver is not None
        facts = {
            "cursor": self.loader.cursor(self.state.data_step),
            "config": to_dict(self.state.config),
            "identity": self.identity,
            "val_loss_nats": row.get("val_loss_nats"),
        }
        self.saver.save(lambda: checkpoint.snapshot(self.state, facts))
        self.saved_at = self.state.data_step

    def interrupted(self, row: Mapping[str, float | int | None]) -> None:
        """Ctrl-C came, at whatever point of the last step: what is not saved yet is saved now."""
        self.tell("on_event", "interrupt", self.state.step, data_step=self.state.data_step)
        self.save_rest(row)

    def save_rest(self, row: Mapping[str, float | int | None]) -> None:
        """Save the run as it is now, unless the last save has it all."""
        if self.saver is not None and self.saved_at != self.state.data_step:
            self.save(row)

    def tell_saves(self) -> None:
        """Report the saves that have ended. A failed one is told, and the run goes on."""
        for saved in self.saver.finished() if self.saver is not None else ():
            self.failure = saved.error
            if saved.path is not None:
                self.checkpoint = saved.path
                self.tell("on_event", "save", saved.step, path=saved.path.name, seconds=round(saved.seconds, 3))
            if saved.error is not None:
                warnings.warn(str(saved.error), RuntimeWarning, stacklevel=2)
                self.tell("on_event", "save_failed", saved.step, reason=str(saved.error))

    def begin(self, *, resume: bool, called: Begin | None) -> None:
        """At the beginning, or with `resume` at the last good checkpoint, if there is one."""
        path, bad = self._restored() if resume else (None, [])
        if not resume and self.folder is not None and (found := checkpoint.checkpoints(self.folder)):
            raise ArgumentError(
                f"{self.folder} has {len(found)} checkpoints of another run", hint="resume it, or give another folder"
            )
        if called is not None:
            self.observers += tuple(called(self.state.step))
        if self.saver is not None:
            self.saver.clear_partial()
        self._set_aside(bad)
        if resume:
            self.tell("rewind", self.state.step)
        if path is not None:
            now = to_dict(self.state.config)
            changed = diff(checkpoint.state_of(path)["config"], now)
            self.tell("on_event", "resume", self.state.step, checkpoint=path.name, changed=changed)

    def _restored(self) -> tuple[Path | None, list[checkpoint.BadCheckpoint]]:
        """Put the last good checkpoint into the state; it, and the later ones that are bad. Nothing is written."""
        if self.folder is None:
            raise ArgumentError("a run is to be resumed, and fit was given no folder", hint="pass folder=…")
        path, bad = checkpoint.newest_good(self.folder)
        if path is None:
            return None, bad
        saved = checkpoint.state_of(path)["identity"]
        for name in sorted(saved.keys() | self.identity.keys()):
            if saved.get(name) != self.identity.get(name):
                raise checkpoint.CheckpointError(
                    f"the {name} of this run is {self.identity.get(name)}, and {path} was made with {saved.get(name)}",
                    hint=f"resume with the same {name}, or begin a new run in another folder",
                )
        checkpoint.restore(path, self.state)
        self.checkpoint = path
        return path, bad

    def _set_aside(self, bad: Sequence[checkpoint.BadCheckpoint]) -> None:
        """Name the checkpoints that cannot be used, and move them where they are not counted among the good ones."""
        for error in bad:
            warnings.warn(f"{error}; the checkpoint before it is used", RuntimeWarning, stacklevel=2)
            self.tell("on_event", "bad_checkpoint", self.state.step, path=error.path.name, reason=str(error))
            checkpoint.set_aside(error.path)

    # --- refused steps ------------------------------------------------------------------------------------------------

    def skip(self, result: StepResult) -> None:
        """A step was refused; the next batch is tried, unless that was tried often enough."""
        state = self.state
        self.tell("on_event", "skip", state.step, data_step=state.data_step - 1, reason=result.skipped)
        if state.guard.exhausted:
            self._roll_back(result)

    def _roll_back(self, result: StepResult) -> None:
        state = self.state
        behind, at, rollbacks = state.data_step, state.step, state.guard.rollbacks + 1
        told = f"{state.guard.skips_in_a_row} batches in a row were refused at step {at} (the last: {result.skipped})"
        hint = "lower optimizer.lr or add warm-up; a healthy run that is refused needs a higher spike_threshold"
        if rollbacks > state.config.stability.max_rollbacks:
            raise TrainingDiverged(f"{told}, after {rollbacks - 1} rollbacks", hint=hint)
        if self.saver is not None:
            self.saver.wait()
            self.tell_saves()
        path, bad = self._restored() if self.saver is not None else (None, [])
        if path is None:
            raise TrainingDiverged(f"{told}, and there is no checkpoint to go back to", hint=hint)
        self._set_aside(bad)
        state.data_step = behind  # past the bad stretch, which a resume from the same checkpoint finds again by itself
        state.guard.rollbacks, state.guard.skips_in_a_row = rollbacks, 0
        self._seek()
        self.tell("rewind", state.step)
        self.tell("on_event", "rollback", state.step, from_step=at, data_step=behind, reason=told)
