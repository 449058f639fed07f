"""The stages of a demo after pretraining: each starts from the model of the one before, trains as long as the remaining
time permits, and is evaluated on the same items.

    sft    fine-tuning on demonstrations: a question and its function
    dpo    preferences: the right function over one with a mistake
    grpo   reinforcement: answers that return the right values when they are run, to questions without an answer
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bagu.data.chat_corpus import ChatCorpus
from bagu.data.corpus import TextCorpus
from bagu.data.preferences import PreferenceCorpus
from bagu.data.prompts import PromptCorpus
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.recipes.demo_eval import Evaluation, eval_words, evaluate_stage, learned
from bagu.recipes.demo_pace import in_parts, steps_made, tokens_per_s
from bagu.recipes.demo_plan import Pace, Plan, Steps, dpo_steps, rl_steps, sft_steps
from bagu.recipes.demo_sizes import Demo
from bagu.recipes.run import Run
from bagu.recipes.training import Trained, train
from bagu.runs.progress import TrainProgress
from bagu.runs.stages import Stage, Stages


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The start time of the demo, its time limit in seconds (None: no limit), and whether to use all of that time."""

    began: float
    budget_s: float | None
    fill: bool

    def spent(self) -> float:
        return time.monotonic() - self.began

    def left(self) -> float:
        return float("inf") if self.budget_s is None else self.budget_s - self.spent()


@dataclass(frozen=True, kw_only=True)
class Later:
    """A stage after pretraining: `folder` of its run, `name` in tables, `steps` the field of Demo with its length, and
    `revisions` the shares of it after which the length is fitted again: where its learning rate is at the peak."""

    title: str
    folder: str
    name: str
    steps: str
    run: Callable[[Demo, Path], Run]
    corpus: type[ChatCorpus] | type[PreferenceCorpus] | type[PromptCorpus]
    revisions: tuple[float, ...] = ()


LATER = (
    Later(
        title="Fine-tune it on demonstrations", folder="sft", name="SFT", steps="sft_steps",
        run=Demo.sft, corpus=ChatCorpus, revisions=(1 / 8, 3 / 8),
    ),
    Later(
        title="Prefer right functions to wrong ones (DPO)", folder="dpo", name="DPO", steps="dpo_steps",
        run=Demo.dpo, corpus=PreferenceCorpus,
    ),
    Later(
        title="Reinforce answers that run rightly (GRPO)", folder="grpo", name="GRPO", steps="rl_steps",
        run=Demo.grpo, corpus=PromptCorpus, revisions=(1 / 8, 1 / 2, 7 / 8),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Done:
    """A finished stage of training. `name` is used in tables."""

    name: str
    trained: Trained
    evaluation: Evaluation


class LaterStages:
    """Runs the stages in order; `done` begins with pretraining."""

    def __init__(
        self,
        out: Path,
        stages: Stages,
        clock: Clock,
        size: Demo,
        plan: Plan | None,
        pace: Pace | None,
        text: TextCorpus,
        tokenizer: BpeTokenizer,
    ) -> None:
        """`plan` and `pace` are None if the numbers of steps are given."""
        self.out, self.stages, self.clock, self.size, self.plan, self.pace = out, stages, clock, size, plan, pace
        self.planned, self.text, self.tokenizer = size, text, tokenizer
        self.done: list[Done] = []

    def evaluate(self, name: str, trained: Trained, stage: Stage) -> None:
        """Evaluate the model of a stage and add its scores to the line of the stage."""
        folder = self.out / "eval" / trained.folder.path.name
        found = evaluate_stage(name, trained.model, self.tokenizer, folder, self.size)
        self.done.append(Done(name=name, trained=trained, evaluation=found))
        stage.result = "; ".join(filter(None, (stage.result, eval_words(found))))

    def train(self, later: Later) -> None:
        with self.stages.stage(later.title) as stage:
            planned = getattr(self.size, later.steps)
            self._fit_steps(later, None)
            run = later.run(self.size, self.done[-1].trained.folder.path)
            corpora = {
                name: later.corpus.of(name, source, run.selection).sharing(self.text)
                for name, source in run.sources.items()
            }

            def go(steps: int, *, resume: bool, pause_after: int | None) -> Trained:
                whole = replace(run, train=replace(run.train, steps=steps))
                trained = train(
                    whole,
                    self.out / later.folder,
                    resume=resume,
                    pause_after=pause_after,
                    corpora=corpora,
                    progress=progress_of(stage, whole, quiet=("resume",)),
                )
                go_on(trained)
                return trained

            def revise(done: int, begun: Trained) -> int:
                self._fit_steps(later, steps_made(begun.folder.metrics()))
                return int(getattr(self.size, later.steps))

            revisions = () if self.pace is None else later.revisions
            _, trained = in_parts(run.train.steps, revisions, go, revise)
            if self.pace is not None and later.folder == "sft":  # steps like those of the next stages
                self.pace = replace(self.pace, tokens_per_s=tokens_per_s(trained.folder.metrics()))
            stage.result = f"{trained.fit.step:,} steps{changed_words(planned, trained.fit.step)}"
            self.evaluate(later.name, trained, stage)
            said = [] if trained.idle is None else [trained.idle]
            stage.result += "\n  " + "; ".join([*said, learned(*(d.evaluation for d in self.done[-2:]))])

    def _fit_steps(self, later: Later, made: Steps | None) -> None:
        """Set the number of steps of this stage to what fits the remaining time; `made` are those of it that are done.

        Without `fill` a stage has at most the steps of its size. They are not bounded by the plan: if its first
        seconds were slow, later stages use the time that is left.
        """
        if self.pace is None or self.plan is None:
            return
        last, most = self.done[-1].evaluation, None if self.clock.fill else getattr(self.plan.rate.size, later.steps)
        pace = replace(self.pace, left_s=self.clock.left(), evaluation_s=last.seconds)
        if later.steps == "sft_steps":
            steps = sft_steps(self.planned, most, pace, made)
        elif later.steps == "dpo_steps":
            steps = dpo_steps(self.planned, most, pace)
        else:
            steps = rl_steps(self.planned, most, pace, last.answer_s, made)
        fitted: dict[str, Any] = {later.steps: steps}
        self.size = replace(self.size, **fitted)


def progress_of(stage: Stage, run: Run, *, quiet: tuple[str, ...] = ()) -> TrainProgress:
    return stage.training(run.train.steps, formats=run.objective.display().progress, quiet=quiet)


def changed_words(planned: int, steps: int) -> str:
    """What to say of a number of steps that is not the planned one."""
    return "" if planned == steps else f" (planned {planned:,}; changed to fit the time)"


def go_on(run: Trained) -> None:
    """Raise if Ctrl-C ended the run: this ends the demo."""
    if run.fit.interrupted:
        folder = run.folder.path
        raise BaguError(f"the demo was stopped at step {run.fit.step}", hint=f"bagu train --resume --out {folder}")
