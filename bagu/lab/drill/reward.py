"""A drill as a reward: `bagu train --recipe grpo --reward drill:NAME`.

The completion is graded as an answer, in the sandbox: the share of trials that are right, and 1 only if all are. The
answer is the first code block of the completion, or all of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bagu.errors import ArgumentError
from bagu.lab.drill import catalogue
from bagu.lab.drill.answers import Answers
from bagu.lab.drill.grade import check_isolated, grade
from bagu.train.rl.reward_function import Sample, Scored

BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
PREFIX = "drill:"
SHARE = 0.5  # the most that an answer with a wrong trial gets


class DrillReward:
    """The grade of a drill at its first level, between 0 and 1."""

    def __init__(self, name: str) -> None:
        self.drill = catalogue.drill(name)
        self.level = self.drill.levels[0]
        if self.level == "triton":
            raise ArgumentError(f"{name} has no level without Triton", hint="a reward runs on torch's level")
        self._answers = Answers(triton=False)
        check_isolated(self._answers)

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.drill.name}"

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        return [self._score(sample.completion) for sample in samples]

    def _score(self, completion: str) -> Scored:
        found = BLOCK.search(completion)
        source = (found[1] if found else completion).replace("\0", "")
        graded = grade(self.drill, source, self.level, answers=self._answers)
        total = graded.passed + len(graded.failures)
        value = 1.0 if graded.right else SHARE * graded.passed / max(total, 1)
        if any(f.cause in ("forbidden", "state", "changes_input", "stale", "protocol") for f in graded.failures):
            value = 0.0
        return Scored(reward=value, parts={"trials_right": float(graded.passed)})

    def close(self) -> None:
        self._answers.close()
