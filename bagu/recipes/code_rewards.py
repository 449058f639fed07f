"""The built-in rewards for Python functions. Model text is parsed here, and runs only in the sandbox.

    python         the share of the checks of `function_checks.py` that the answer passes, each by itself, and of the
                   doctests of the prompt, if the real function passes them on its own: they are run if all checks pass.
                   A name that begins like the asked one has a part of that check. `def f(): pass` has 0.4. If the body
                   counted only under the asked name, a weak model would learn this answer and no body at all (docs/
                   journal/007)
                   A prompt with `calls` (pairs of an argument and the result) has 1 if the answer returns every result,
                   else 0
    python-loose   half for text that parses, half for a function of any name: `def f(): pass` wins it. It is there to
                   show what a policy does with such a reward

Where the system has no sandbox, doctests are left out, and the name of the reward says so.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bagu.data.stdlib import parsed
from bagu.errors import BaguError
from bagu.eval.function_checks import check_parts
from bagu.eval.grades import doctest_program, first_code, parses, run_to_end
from bagu.eval.tasks.compose import calls_program, same_code
from bagu.machine.sandbox import Limits, Sandbox, SandboxUnavailable
from bagu.train.rl.reward_function import RewardFunction, Sample, Scored

DOCTEST = "doctest"
CALLS = "calls"
LIMITS = Limits(seconds=2.0)


class PythonReward:
    """The facts of a prompt are `name`, and optionally `args`, `docstring`, `doctests` and `answer`, as the prompts of
    the standard library have them."""

    def __init__(self) -> None:
        self._sandbox: Sandbox | None = None  # started for the first sample with doctests
        self._unavailable = False
        self._testable: dict[str, bool] = {}  # by program: whether the real function passes its doctests

    @property
    def name(self) -> str:
        return "python (without doctests: no sandbox)" if self._unavailable else "python"

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        called = [s for s in samples if CALLS in s.facts]
        right = iter(self._called(called))
        checked = iter(self._checked([s for s in samples if CALLS not in s.facts]))
        return [next(right) if CALLS in s.facts else next(checked) for s in samples]

    def _called(self, samples: Sequence[Sample]) -> list[Scored]:
        """Without a sandbox, the answer must be the expected code."""
        valid = [s for s in samples if parses(first_code(s.completion))]  # other code needs no process
        ended = dict(zip(map(id, valid), self._run([calls_program(s.completion, s.facts) for s in valid]), strict=True))
        if self._unavailable:
            ended = {id(s): same_code(s.completion, s.facts["answer"]) for s in valid}
        return [Scored(reward=float(ended.get(id(s), False))) for s in samples]

    def _checked(self, samples: Sequence[Sample]) -> list[Scored]:
        checked = [check_parts(s.completion, _named(s.facts)) for s in samples]
        testable = [self._has_doctests(s.facts) for s in samples]
        tested = [has and all(v == 1 for v in parts.values()) for has, parts in zip(testable, checked, strict=True)]
        programs = [_program(s.completion, s.facts) for s, runs in zip(samples, tested, strict=True) if runs]
        ended = iter(self._run(programs) if programs else ())
        passed = [runs and next(ended) for runs in tested]
        return [_scored(*each) for each in zip(checked, testable, passed, strict=True)]

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def _has_doctests(self, facts: Mapping[str, Any]) -> bool:
        """Whether the doctests of a prompt can be asked of an answer: the real function passes them without the rest of
        its module. Unknown, and therefore not, if the facts have no real function."""
        if self._unavailable or not facts.get("doctests") or not {"answer", "docstring"} <= facts.keys():
            return False
        program = _program(facts["answer"], facts)
        if program not in self._testable:
            (self._testable[program],) = self._run([program])
        return self._testable[program] and not self._unavailable

    def _run(self, programs: Sequence[str]) -> list[bool]:
        if programs and self._sandbox is None and not self._unavailable:
            try:
                self._sandbox = Sandbox(limits=LIMITS)
            except SandboxUnavailable as error:
                self._unavailable = True
                warnings.warn(f"the reward `python` leaves out doctests: {error}", RuntimeWarning, stacklevel=2)
        if self._sandbox is None:
            return [False] * len(programs)
        return run_to_end(self._sandbox, programs)


class LoosePythonReward:
    """Won by any function definition that parses."""

    name = "python-loose"

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        return [self._one(sample.completion) for sample in samples]

    def close(self) -> None:
        """Nothing is open."""

    def _one(self, text: str) -> Scored:
        tree = parsed(first_code(text))
        parts = {
            "parses": float(tree is not None and bool(tree.body)),
            "defines": float(tree is not None and any(isinstance(node, ast.FunctionDef) for node in tree.body)),
        }
        return Scored(reward=sum(parts.values()) / len(parts), parts=parts)


BUILT_IN: dict[str, Callable[[], RewardFunction]] = {"python": PythonReward, "python-loose": LoosePythonReward}


def _named(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(facts.get("name"), str):
        raise BaguError(
            "the reward `python` asks for a function, and a prompt has no fact `name`",
            hint="add a column `name` to the prompts, or use prompts of the standard library",
        )
    return facts


def _program(text: str, facts: Mapping[str, Any]) -> str:
    return doctest_program(first_code(text), facts["name"], facts["docstring"])


def _scored(parts: dict[str, float], testable: bool, passed: bool) -> Scored:
    """`testable`: the prompt has doctests, which the answer `passed` or not."""
    if testable:
        parts = {**parts, DOCTEST: float(passed)}
    return Scored(reward=sum(parts.values()) / len(parts), parts=parts)
