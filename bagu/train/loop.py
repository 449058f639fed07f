"""The training loop: take batches, run updates, evaluate, sample and save when due, and notify the observers.

A run can be killed at any time. If it is resumed from its last checkpoint, it ends with the same bits as an
uninterrupted run, because a step is a function of only the state and `data_step`. On a CPU the last bits depend on the
number of threads too, which is lower while other processes use the cores: a resume then says that it was.
"""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bagu.config import diff, to_dict
from bagu.errors import ArgumentError
from bagu.machine.busy import ThreadCount
from bagu.nn.hollow import Values
from bagu.nn.model import Transformer
from bagu.ops.call.eager import force_eager
from bagu.parallel.collectives import from_rank_0
from bagu.parallel.mesh import Mesh
from bagu.parallel.pipeline import Action
from bagu.runs.observer import Observer
from bagu.train import checkpoint
from bagu.train.checkpoint.saving import Saver
from bagu.train.interrupt import Interrupt
from bagu.train.loss import BatchT_co, Loss, MicroBatch
from bagu.train.meters import Meters
from bagu.train.own_share import prefetch
from bagu.train.prepare import prepared
from bagu.train.served.worker import Served
from bagu.train.stability import TrainingDiverged
from bagu.train.state import TrainConfig, TrainState
from bagu.train.step import StepResult, seed_step, step

Evaluate = Callable[[Any], Mapping[str, float | None]]  # of a model, see `gathers`: metrics like val_loss_nats
Sample = Callable[[Any], Sequence[str]]  # of a model: texts
Begin = Callable[[int], Sequence[Observer]]  # called with the first step of the run; returns further observers


class Batches(Protocol[BatchT_co]):
    """The loader interface of `fit`: the micro-batches of global steps from `start` on, and a step's position as JSON.

    Global step s is a function of s, and if the model generates the batches also of its weights and of what the loader
    keeps between steps, which the cursor contains. A resume calls `restore` with the cursor of its checkpoint, and then
    `prefetch` with the step of that cursor. The iterator is advanced just before each step.
    """

    def prefetch(self, start: int) -> contextlib.AbstractContextManager[Iterator[Sequence[BatchT_co]]]: ...

    def cursor(self, step: int) -> dict[str, Any]: ...

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Bring back the state in `cursor`. A loader whose step s depends on s only has nothing to do."""
        ...


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The result of a run. `interrupted` means Ctrl-C: resume from `checkpoint` to complete the run. `updates` are the
    steps that changed the weights: all but idle ones."""

    step: int
    updates: int
    interrupted: bool
    metrics: Mapping[str, float | int | None]  # of the last step
    checkpoint: Path | None
    ended: Mapping[str, Any] | None = None  # why the run ended before its last step, as facts of an event
    timeline: Sequence[Sequence[Action]] = ()  # the actions of each rank of a pipeline in the last step


def fit(
    config: TrainConfig,
    model: Transformer,
    loader: Batches[MicroBatch],
    *,
    folder: Path | None = None,
    resume: bool = False,
    pause_after: int | None = None,
    observers: Sequence[Observer] = (),
    evaluate: Evaluate | None = None,
    sample: Sample | None = None,
    loss: Loss[Any, Any] | None = None,
    begin: Begin | None = None,
    identity: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
    mesh: Mesh | None = None,
    timeline: bool = False,
    values: Values | None = None,
    gathers: bool = True,
    served: Served | None = None,
) -> FitResult:
    """Train `model` in place until `config.steps` updates are done, the loss has `ended`, or Ctrl-C.

    With a `mesh`, every rank calls it with the same arguments. Rank 0 alone notifies observers and calls `begin`; every
    rank evaluates and samples, because ranks exchange parameters or activations for it. Both get the whole `model`,
    gathered on every rank; without `gathers`, the `DividedModel` of a mesh with tp, cp, pp or ep. After the run each
    rank has the whole model. With `timeline`, the result has the times of the last step of a pipeline; a GPU is then
    synchronized after every action. `values` has the weights of a hollow `model` (nn/hollow.py): each rank takes its
    part of them, and after the run rank 0 alone has the whole model, in files. With `served` this is a worker of a
    parameter server (served/worker.py), and worker 0 does what rank 0 does.

    `loss` takes the batches of `loader`; by default it is cross-entropy. Checkpoints go to `folder`; with `resume` the
    run continues from the last good one there, if there is one. `identity` contains values that must not change between
    the run and its resume (fingerprints of the tokenizer, of the model): a resume raises if one differs. `settings` are
    also compared with those of the checkpoint, and a change is reported. `begin` is called once, after everything is
    checked and restored and before anything is written: a caller that records the run starts recording there.
    `pause_after` stops the run after this many updates, saved and ready to resume. The caller closes the observers.
    """
    _refuse_idle_options(config, folder, evaluate, sample)
    state = TrainState(model, config, loss, mesh, values)
    del values
    if state.divided is not None:
        state.divided.timed = timeline
    run = _Run(state, loader, folder, observers, identity or {}, settings or {}, served)
    meters = Meters(state.device, flops_per_token=flops_per_token, peak_flops=peak_flops)
    row: dict[str, float | int | None] = {}
    idle = 0  # idle steps in a row
    with run, prepared(state.model, config, state.device), Interrupt() as interrupt:
        run.begin(resume=resume, callback=begin)
        stop = config.steps if pause_after is None else min(pause_after, config.steps)
        while state.step < stop and not _stopping(state, interrupt) and state.ended is None:
            run.adjust_threads()
            meters.start()
            state.stop_asked = interrupt.asked
            if served is None:
                batches = run.next_batches()
                meters.data_arrived()
                result = step(state, batches)
            else:
                served.stop = stop
                result = served.step(state, run.next_batches)
            run.report_saves()
            if result.skipped is not None:
                run.skip(result)
                continue
            row = meters.row(result) if served is None else meters.row(result, over=1 + served.delay) | served.row()
            if state.shares is not None:
                row |= state.shares.row(meters.seconds)
                if (change := state.shares.change) is not None:
                    run.notify("on_event", "shares", state.step - 1, **change.facts())
            last = state.step == config.steps or state.loss.ended is not None
            if evaluate is not None and _due(config.eval_every, state.step, last):
                with state.inference(gathers=gathers) as evaluated:
                    row |= evaluate(evaluated)
                state.best.evaluated(row, state.step)
                last = last or state.ended is not None
            run.notify("on_step", state.step - 1, row)
            idle = idle + 1 if result.totals.idle else 0
            if str(idle).rstrip("0") == "1":  # 1, 10, 100: a run without updates says so, and not in every line
                reason = state.loss.idle_reason(result.metrics)
                run.notify("on_event", "no_update", state.step - 1, steps_in_a_row=idle, reason=reason)
            if sample is not None and _due(config.sample_every, state.step, last):
                if state.mesh is not None:  # ranks gather parameters together, so they must draw the same tokens
                    seed_step(config.seed, state.data_step)
                # the shapes change with each token
                with state.inference(gathers=gathers) as sampled, force_eager():
                    run.notify("on_sample", state.step - 1, sample(sampled))
            if folder is not None and _due(config.save_every, state.step, last):
                run.save(row)
        if _stopping(state, interrupt):
            run.interrupted(row)
        elif state.step < config.steps:
            run.save_rest(row)
            if state.ended is not None:
                run.notify("on_event", "ended_early", state.step, **state.ended)
        steps, ended = state.step, state.ended
        if config.best.load_at_end and not _stopping(state, interrupt) and (steps == config.steps or ended):
            run.load_best()
        actions = [] if state.divided is None else state.divided.timeline()
    return FitResult(
        step=steps,
        updates=state.updates,
        ended=ended,
        interrupted=_stopping(state, interrupt),
        metrics=row,
        checkpoint=run.checkpoint,
        timeline=actions,
    )


def _stopping(state: TrainState, interrupt: Interrupt) -> bool:
    """Whether Ctrl-C was pressed. Ranks agree on it in each step, so that all of them stop after the same one."""
    alone = state.mesh is None and state.config.served is None
    return interrupt.asked if alone else state.stop_asked


def _due(every: int | None, step: int, last: bool) -> bool:
    return last or (every is not None and step % every == 0)


def _refuse_idle_options(
    config: TrainConfig, folder: Path | None, evaluate: Evaluate | None, sample: Sample | None
) -> None:
    """Raise for an option that would have no effect."""
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
    """The state of a run besides the steps: position in the data, checkpoints, observers, rollbacks."""

    def __init__(
        self,
        state: TrainState,
        loader: Batches[MicroBatch],
        folder: Path | None,
        observers: Sequence[Observer],
        identity: Mapping[str, str],
        settings: Mapping[str, Any],
        served: Served | None,
    ) -> None:
        self.state, self.loader, self.folder, self.served = state, loader, folder, served
        # the rank or worker that reports and decides about files
        self.first = (state.mesh is None or state.mesh.rank == 0) and (served is None or served.first)
        replica = 0 if state.mesh is None else state.mesh.coordinate("dp") + state.mesh.coordinate("cp")
        self.writes = self.first or (state.mesh is not None and replica == 0)  # of equal states, the first
        self.observers, self.identity = tuple(observers) if self.first else (), dict(identity)
        self.settings = {**to_dict(state.config), **settings}  # recorded in checkpoints; a resume may change them
        self.checkpoint: Path | None = None  # the last one written
        self.failure: checkpoint.CheckpointError | None = None  # of the last save
        self.saved_at: int | None = None  # the data_step of the last save
        self.saves = 0
        # ranks that compute the same values need the same number of threads, so only a run of one process changes it
        alone = state.mesh is None and served is None and state.device.type == "cpu"
        self.threads = ThreadCount() if alone and not state.config.deterministic else None
        self.fewer_steps = 0  # computed with fewer threads than at the start, in the whole run
        config = state.config
        self.saver = None if folder is None else Saver(folder, keep_last=config.keep_last, keep_best=config.keep_best)
        self._loading = contextlib.ExitStack()
        self._batches: Iterator[Sequence[MicroBatch]] | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self._loading.close()
        if self.threads is not None:
            self.threads.close()
        if self.served is not None:
            self.served.close()
        if self.saver is not None:
            self.saver.close()
            self.report_saves()
        if error is None and self.state.hollow:
            self.state.export(Path(tempfile.gettempdir()) if self.folder is None else self.folder)
        self.state.close(gather=error is None)
        if error is None and self.failure is not None:  # the last save of the run failed
            raise self.failure

    def notify(self, what: str, *args: Any, **facts: Any) -> None:
        for observer in self.observers:
            getattr(observer, what)(*args, **facts)

    def adjust_threads(self) -> None:
        """Go on with fewer threads while other processes use the cores, and with all of them again."""
        if self.threads is None:
            return
        if (threads := self.threads.adjust()) is not None:
            kind = "threads" if self.fewer_steps else "busy_machine"  # the progress line says it once
            self.notify("on_event", kind, self.state.step, threads=threads, of=self.threads.most)
        self.fewer_steps += self.threads.fewer

    # --- data ---------------------------------------------------------------------------------------------------------

    def next_batches(self) -> Sequence[MicroBatch]:
        """The micro-batches at `data_step`; a loader that prefetches prepares the next ones in the meantime."""
        if self._batches is None:
            self._batches = self._loading.enter_context(prefetch(self.loader, self.state))
        return next(self._batches)

    def _seek(self) -> None:
        """Continue the data at another step."""
        self._loading.close()
        self._batches = None

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, row: Mapping[str, float | int | None]) -> None:
        """Start to save the current state; a thread writes it."""
        assert self.saver is not None
        facts = {
            "cursor": self.loader.cursor(self.state.data_step),
            "config": self.settings,
            "identity": self.identity,
            "validation_loss": self.state.best.score_of(row),
            "steps_on_fewer_threads": self.fewer_steps,
        }
        self.saves += 1
        if self.writes:
            if self.served is not None:
                self.saver.wait()
                self.served.fetch(self.state)
            self.saver.save(lambda: checkpoint.snapshot(self.state, facts, serial=self.saves, folder=self.folder))
        self.saved_at = self.state.data_step

    def interrupted(self, row: Mapping[str, float | int | None]) -> None:
        """Handle Ctrl-C after the interrupted step is complete: save if the state is not saved yet."""
        self.notify("on_event", "interrupt", self.state.step, data_step=self.state.data_step)
        self.save_rest(row)

    def save_rest(self, row: Mapping[str, float | int | None]) -> None:
        """Save the current state, unless the last save already contains it."""
        if self.saver is not None and self.saved_at != self.state.data_step:
            self.save(row)

    def load_best(self) -> None:
        """Bring back the weights of the best checkpoint. The run is over: its state is not saved again."""
        assert self.saver is not None and self.folder is not None
        self.saver.wait()
        self.report_saves()
        path = checkpoint.best(self.folder) if self.first else None
        step = from_rank_0(self.state.mesh, -1 if path is None else checkpoint.state_of(path)["step"])
        if step >= 0:
            best, updates = self.state.best.state(), self.state.updates
            checkpoint.restore(checkpoint.path_of(self.folder, step), self.state)
            self.state.best.load(best)
            self.state.updates = updates
            self.notify("on_event", "best_loaded", step, metric=self.state.best.metric)

    def report_saves(self) -> None:
        """Notify observers of finished saves. A failed save does not stop the run."""
        for saved in self.saver.finished() if self.saver is not None else ():
            self.failure = saved.error
            if saved.path is not None:
                self.checkpoint = saved.path
                self.notify("on_event", "save", saved.step, path=saved.path.name, seconds=round(saved.seconds, 3))
            if saved.error is not None:
                warnings.warn(str(saved.error), RuntimeWarning, stacklevel=2)
                self.notify("on_event", "save_failed", saved.step, reason=str(saved.error))

    def begin(self, *, resume: bool, callback: Begin | None) -> None:
        """Start at step 0, or with `resume` at the last good checkpoint, if there is one."""
        path, bad = self._restored() if resume else (None, [])
        joined = self.served is not None and self.served.begin(self.state)
        if path is not None:  # not after a rollback, which continues with the data after the refused batches
            self.loader.restore(checkpoint.state_of(path)["cursor"])
        if (
            self.first
            and not resume
            and not joined
            and self.folder is not None
            and (found := checkpoint.checkpoints(self.folder))
        ):
            raise ArgumentError(
                f"{self.folder} has {len(found)} checkpoints of another run", hint="resume it, or give another folder"
            )
        if self.first:
            if callback is not None:
                self.observers += tuple(callback(self.state.step))
            if self.saver is not None:
                self.saver.clear_partial()
            self._set_aside(bad)
        from_rank_0(self.state.mesh, 0)  # no rank starts before the folder is ready
        if resume or joined:
            self.notify("rewind", self.state.step)
        if joined:
            self.notify("on_event", "worker_joined", self.state.step)
        elif path is not None:
            changed = diff(checkpoint.state_of(path)["config"], self.settings)
            facts = {"checkpoint": path.name, "changed": changed}
            if self.fewer_steps:  # torch's sums over rows depend on how many threads divide them
                facts["steps_on_fewer_threads"] = f"{self.fewer_steps}: not the bits of an idle machine"
            self.notify("on_event", "resume", self.state.step, **facts)

    def _restored(self) -> tuple[Path | None, list[checkpoint.BadCheckpoint]]:
        """Load the last good checkpoint into the state. Return it and the later, bad ones. Writes nothing."""
        if self.folder is None:
            raise ArgumentError("resume=True, and fit was given no folder", hint="pass folder=…")
        path, bad = checkpoint.newest_good(self.folder) if self.first else (None, [])
        if self.state.mesh is not None:  # the one that rank 0 has verified
            step = from_rank_0(self.state.mesh, -1 if path is None else checkpoint.state_of(path)["step"])
            path = None if step < 0 else checkpoint.path_of(self.folder, step)
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
        self.fewer_steps = checkpoint.state_of(path).get("steps_on_fewer_threads", 0)  # earlier versions: none
        return path, bad

    def _set_aside(self, bad: Sequence[checkpoint.BadCheckpoint]) -> None:
        """Warn about unusable checkpoints, and rename them so that they are not tried again."""
        for error in bad:
            warnings.warn(f"{error}; the checkpoint before it is used", RuntimeWarning, stacklevel=2)
            self.notify("on_event", "bad_checkpoint", self.state.step, path=error.path.name, reason=str(error))
            checkpoint.set_aside(error.path)

    # --- refused steps ------------------------------------------------------------------------------------------------

    def skip(self, result: StepResult) -> None:
        """Continue with the next batch after a refused step; roll back after several in a row."""
        state = self.state
        self.notify("on_event", "skip", state.step, data_step=state.data_step - 1, reason=result.skipped)
        if state.guard.exhausted:
            self._roll_back(result)

    def _roll_back(self, result: StepResult) -> None:
        state = self.state
        data_step, at, rollbacks = state.data_step, state.step, state.guard.rollbacks + 1
        reason = f"{state.guard.skips_in_a_row} batches in a row were refused at step {at} (the last: {result.skipped})"
        hint = "lower optimizer.lr or add warm-up; a healthy run that is refused needs a higher spike_threshold"
        if rollbacks > state.config.stability.max_rollbacks:
            raise TrainingDiverged(f"{reason}, after {rollbacks - 1} rollbacks", hint=hint)
        if self.saver is not None:
            self.saver.wait()
            self.report_saves()
        path, bad = self._restored() if self.saver is not None else (None, [])
        if path is None and self.first:
            raise TrainingDiverged(f"{reason}, and there is no checkpoint to go back to", hint=hint)
        self._set_aside(bad)
        state.data_step = data_step  # after the bad batches; a resume from the same checkpoint skips them again
        state.guard.rollbacks, state.guard.skips_in_a_row = rollbacks, 0
        if self.served is not None:
            self.served.restored(state)
        self._seek()
        self.notify("rewind", state.step)
        self.notify("on_event", "rollback", state.step, from_step=at, data_step=data_step, reason=reason)
