"""A user's reward function, called in a process of its own so that a hang or a crash costs one sample, not the run.

The function is any Python, so only another process can stop it: the worker is killed after `timeout_s` and started
again for the next sample. It is not a sandbox: a reward file is code that the user chose to run.
"""

import math
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from bagu.errors import BaguError
from bagu.train.rl.reward_function import Sample, Scored

PACKAGE = Path(__file__).parents[2]
START = (
    "import sys; sys.path.append(sys.argv[1]); from bagu.recipes.reward_worker import main; "
    "main(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))"
)
START_S = 300.0  # the file may import torch, or load a model


class UserReward:
    """The function `name` of a Python file. `default` is the reward of a sample that it cannot score.

    score(prompt, completion, facts) is called for each sample. score(prompts, completions, facts), with lists, is
    called once for a batch; if that call fails, all its samples have the default. `timeout_s` limits each call.
    """

    def __init__(self, file: Path, function: str = "score", *, default: float = 0.0, timeout_s: float = 10.0) -> None:
        if file.suffix != ".py" or not file.is_file():
            raise BaguError(f"there is no Python file {file}", hint="give a reward as my_file.py:function")
        self.file, self.function, self.default, self.timeout_s = file, function, default, timeout_s
        self._warned = False
        self._worker = _Worker(file, function)

    @property
    def name(self) -> str:
        return f"{self.file.name}:{self.function}"

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        if self._worker.takes_lists:
            return self._ask(samples)
        return [scored for sample in samples for scored in self._ask([sample])]

    def close(self) -> None:
        self._worker.close()

    def _ask(self, samples: Sequence[Sample]) -> list[Scored]:
        """One call of the function."""
        if not samples:
            return []
        if not self._worker.running:
            self._worker = _Worker(self.file, self.function)
        answers = self._worker.ask([(s.prompt, s.completion, dict(s.facts)) for s in samples], self.timeout_s)
        return [self._scored(value, fault) for value, fault in answers]

    def _scored(self, value: float | None, fault: str | None) -> Scored:
        if value is not None and math.isfinite(value):
            return Scored(reward=value)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name} {fault}; that sample has the reward {self.default:g}; further faults are only counted",
                RuntimeWarning,
                stacklevel=2,
            )
        return Scored(reward=self.default, fault=fault)


class _Worker:
    """The parent's side of the process. It raises BaguError if the file or the function cannot be used."""

    def __init__(self, file: Path, function: str) -> None:
        inbox, calls = os.pipe()
        answers, outbox = os.pipe()
        life, self._life = os.pipe()  # never written; its closing tells the worker that this process has ended
        theirs = (inbox, outbox, life)
        command = [sys.executable, "-c", START, str(PACKAGE), str(file), function, *map(str, theirs)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=theirs)
        for fd in theirs:
            os.close(fd)
        self._calls, self._answers = Connection(calls, readable=False), Connection(answers, writable=False)
        try:
            state, said = self._answers.recv() if self._answers.poll(START_S) else ("refused", "its import hangs")
        except EOFError:
            state, said = "refused", f"importing it ended the process with status {self._process.wait()}"
        if state == "refused":
            self.close()
            raise BaguError(f"the reward {file}:{function} cannot be used: {said}", hint="correct the file")
        self.takes_lists = bool(said)

    @property
    def running(self) -> bool:
        return not self._calls.closed

    def ask(self, asked: list[tuple[str, str, dict]], timeout_s: float) -> list[tuple[float | None, str | None]]:
        """A value or a fault for each sample. After a timeout or a crash, the process is gone."""
        try:
            self._calls.send(asked)
            if self._answers.poll(timeout_s):
                return self._answers.recv()
            fault = f"took longer than {timeout_s:g} s"
        except (EOFError, BrokenPipeError):
            fault = f"ended its process with status {self._process.wait()}"
        self.close()
        return [(None, fault)] * len(asked)

    def close(self) -> None:
        if self.running:
            self._calls.close()
            self._answers.close()
            os.close(self._life)
            self._process.kill()
            self._process.wait()
