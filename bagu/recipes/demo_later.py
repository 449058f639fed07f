"""The stages of a demo after pretraining: each starts from the model of the one before, trains as long as the remaining
time permits, and is evaluated on the same items.

    sft    fine-tuning on demonstrations: a question and its function
    dpo    preferences: the right function over one with a mistake
    grpo   reinforcement: answers that return the right values when they are run, to questions without an answer
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bagu.data.chat_corpus import ChatCorpus
from bagu.data.corpus import TextCorpus
from bagu.data.preferences import PreferenceCorpus
from bagu.data.prompts import PromptCorpus
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.recipes.demo_eval import Evaluation, eval_words, evaluate_stage, learned
from bagu.recipes.demo_plan import Pace, dpo_steps, rl_steps, sft_steps
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
    """A stage after pretraining: `folder` of its run, `name` in tables, `steps` the field of Demo with its length."""

    title: str
    folder: str
    name: str
    steps: str
    run: Callable[[Demo, Path], Run]
    corpus: type[ChatCorpus] | type[PreferenceCorpus] | type[PromptCorpus]


LATER = (
    Later(
        title="Fine-tune it on demonstrations", folder="sft", name="SFT", steps="sft_steps",
        run=Demo.sft, corpus=ChatCorpus,
    ),
    Later(
        title="Prefer right functions to wrong ones (DPO)", folder="dpo", name="DPO", steps="dpo_steps",
        run=Demo.dpo, corpus=PreferenceCorpus,
    ),
    Later(
        title="Reinforce answers that run rightly (GRPO)", folder="grpo", name="GRPO", steps="rl_steps",
        run=Demo.grpo, corpus=PromptCorpus,
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
        self, out: Path, stages: Stages, clock: Clock, size: Demo, pace: Pace | None, text: TextCorpus,
        tokenizer: BpeTokenizer,
    ) -> None:  # fmt: skip
        """`pace` is None if the numbers of steps are given."""
        self.out, self.stages, self.clock, self.size, self.pace = out, stages, clock, size, pace
        self.text, self.tokenizer = text, tokenizer
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
            self.size = self._fitted(later)
            run = later.run(self.size, self.done[-1].trained.folder.path)
            corpora = {
                name: later.corpus.of(name, source, run.selection).sharing(self.text)
                for name, source in run.sources.items()
            }
            trained = train(run, self.out / later.folder, progress=progress_of(stage, run), corpora=corpora)
            go_on(trained)
            stage.result = f"{trained.fit.step:,} steps{changed_words(planned, run.train.steps)}"
            self.evaluate(later.name, trained, stage)
            said = [] if trained.idle is None else [trained.idle]
            stage.result += "\n  " + "; ".join([*said, learned(*(d.evaluation for d in self.done[-2:]))])

    def _fitted(self, later: Later) -> Demo:
        """The size with the number of steps of this stage that fits the remaining time."""
        if self.pace is None:
            return self.size
        last = self.done[-1].evaluation
        pace = replace(self.pace, left_s=self.clock.left(), evaluation_s=last.seconds)
        reinforced = partial(rl_steps, answer_s=last.answer_s)
        fits: Mapping[str, Callable[[Demo, Pace], int]] = {
            "sft_steps": sft_steps,
            "dpo_steps": dpo_steps,
            "rl_steps": reinforced,
        }
        fitted: dict[str, Any] = {later.steps: fits[later.steps](self.size, pace)}
        return replace(self.size, **fitted)


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
