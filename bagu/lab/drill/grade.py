"""Grade an answer: run its trials, from the simple to the edges, and say what failed first.

A   every trial is right (a Triton kernel also compiles clean, and on a GPU reaches 0.8 of the ceiling: `time`)
B   every trial is right; a kernel compiles clean, its speed is not known or 0.4 of the ceiling
C   every trial is right; the kernel spills, or is slow
D   only edges are wrong
E   wrong
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bagu.errors import ArgumentError, BaguError
from bagu.lab.drill.answers import Answer, AnswerFault, Answers, Reply, call_ranks
from bagu.lab.drill.core import Drill, Text, in_triton
from bagu.lab.drill.diagnose import CAUSES, guess
from bagu.lab.drill.trial import Trial, Wrong

ALWAYS_FORBIDDEN = ("bagu", "ctypes", "cffi", "torch._inductor", "torch.utils.cpp_extension", "multiprocessing")
VIEWS = (  # what torch may do for a Triton kernel: allocate, view, copy
    "empty", "new_empty", "empty_like", "empty_strided", "zeros", "new_zeros", "zeros_like", "full", "new_full",
    "full_like", "view",
    "_unsafe_view", "reshape", "_reshape_alias", "as_strided", "transpose", "t", "permute", "expand", "slice", "select",
    "squeeze", "unsqueeze", "clone", "contiguous", "copy_", "_to_copy", "detach", "alias", "fill_", "zero_",
    "new_empty_strided", "_local_scalar_dense", "unbind", "split", "lift_fresh", "set_", "resize_", "is_same_size",
    "resolve_neg", "resolve_conj", "arange", "unfold", "flatten", "_neg_view", "item", "is_nonzero",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A trial that failed."""

    trial: str
    why: Text
    message: str
    cause: str
    edge: bool
    raised: bool = False

    def __str__(self) -> str:
        return self.message

    def guess(self, language: str) -> str:
        return CAUSES[self.cause](language) if self.cause in CAUSES else self.cause


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The verdict on an answer. `seed` repeats the trials' random inputs."""

    drill: str
    level: str
    letter: str
    passed: int
    failures: Sequence[Failure]
    seed: int
    seconds: float
    cpu_seconds: float
    isolation: str | None
    notes: Sequence[str] = ()

    @property
    def right(self) -> bool:
        return not self.failures


def read_answer(file: Path) -> str:
    """The source of an answer; raises BaguError in one sentence for what is no such file."""
    if file.is_dir():
        raise ArgumentError(f"{file} is a folder", hint="name the Python file of the answer")
    if not file.is_file():
        raise ArgumentError(f"there is no file {file}", hint="bagu drill start NAME writes one")
    try:
        source = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{file} is not UTF-8: byte {error.start}", hint="save it as UTF-8") from None
    if "\0" in source:
        raise ArgumentError(f"{file} has a null byte at {source.index(chr(0))}", hint="save it as text")
    return source


def trials_of(drill: Drill, level: str, seed: int) -> Iterator[Trial]:
    oracle = importlib.import_module(f"bagu.lab.drill.oracles.{drill.oracle}")
    yield from oracle.trials(drill, level, seed)


def grade(
    drill: Drill,
    source: str,
    level: str,
    *,
    file: str = "answer.py",
    seed: int | None = None,
    answers: Answers | None = None,
    stop: bool = False,
    gate: bool = False,
) -> Grade:
    """Grade an answer's source. With `stop`, only up to the first failure. `gate` also compiles Triton kernels."""
    seed = int.from_bytes(os.urandom(3), "big") if seed is None else seed
    began, cpu = time.monotonic(), _cpu()
    with answers_or_new(answers, drill, level) as host:
        passed, failures, opened = 0, list[Failure](), list[Answer]()
        for trial in trials_of(drill, level, seed):
            failure = failed(drill, level, trial, host, opened, source, file)
            passed += failure is None
            failures += [] if failure is None else [failure]
            if failure is not None and (stop or failure.cause in FATAL or (failure.raised and not passed)):
                break
        for answer in opened:
            answer.close()
        isolation = host.isolation
    letter = "A" if not failures else "D" if all(f.edge for f in failures) else "E"
    made = Grade(
        drill=drill.name,
        level=level,
        letter=letter,
        passed=passed,
        failures=failures,
        seed=seed,
        seconds=time.monotonic() - began,
        cpu_seconds=_cpu() - cpu,
        isolation=isolation,
    )
    return gated(drill, source, file, made) if gate and in_triton(level) and not failures else made


FATAL = ("hangs", "dies", "deadlock", "name", "protocol", "forbidden")  # the trials after it would say the same


def gated(drill: Drill, source: str, file: str, grade: Grade) -> Grade:
    """The grade with what the compiler says about the kernels."""
    from bagu.lab.drill.static import compile_answer

    faults, notes = compile_answer(drill, grade.level, source, file)
    return replace(grade, letter="C" if faults else "B", notes=[*notes, *faults])


def failed(
    drill: Drill, level: str, trial: Trial, host: Answers, opened: list[Answer], source: str, file: str
) -> Failure | None:
    """What is wrong with one trial of an answer. `opened` are its processes; after a fault new ones are started."""

    def failure(message: str, cause: str, *, raised: bool = False) -> Failure:
        return Failure(trial=trial.name, why=trial.why, message=message, cause=cause, edge=trial.edge, raised=raised)

    try:
        while len(opened) < max(1, trial.ranks):
            opened.append(host.open(source, file))
        reply = call_ranks(opened[: trial.ranks], *trial.each, seconds=20.0) if trial.ranks else trial.ask(opened[0])
        for rule in (refused_calls, refused_effects):
            if said := rule(drill, level, trial, reply):
                return failure(f"{file}: {said[1]}", said[0])
        trial.judge(reply)
    except AnswerFault as fault:
        for answer in opened:
            answer.close()
        opened.clear()
        cause = trial.cause if fault.cause == "raises" and trial.cause else fault.cause
        return failure(str(fault), cause, raised=True)
    except Wrong as wrong:
        cause = wrong.cause or trial.cause or guess(wrong.got, wrong.want, trial.suspects, usual=trial.usual)
        return failure(f"{file}: {wrong.message}", cause)
    return None


def refused_calls(drill: Drill, level: str, trial: Trial, reply: Reply) -> tuple[str, str] | None:
    """The rule that an executed call breaks."""
    names = {e.removeprefix("import ") for e in reply.imports if e.startswith("import ")}
    for module in (*ALWAYS_FORBIDDEN, *drill.modules):
        if found := [n for n in names if n == module or n.startswith(module + ".")]:
            return "forbidden", f"it imports {min(found)}, and the drill is to write that part by hand"
    if events := [e for e in reply.imports if not e.startswith("import ")]:
        return "forbidden", f"it started a process, a library or a connection ({', '.join(events)})"
    called = {*(a.removeprefix("aten::") for a in reply.aten), *reply.functions}
    if found := sorted(f for f in drill.forbidden if f in called):
        return "forbidden", f"it calls {found[0]}, which is the part to write by hand"
    if in_triton(level):
        computing = sorted(a for a in (x.removeprefix("aten::") for x in reply.aten) if a not in VIEWS)
        if computing:
            return "forbidden", f"torch computes {', '.join(computing)}; at this level the kernel does"
    return None


def refused_effects(drill: Drill, level: str, trial: Trial, reply: Reply) -> tuple[str, str] | None:
    """The rule that a side effect breaks."""
    if reply.changed and not trial.mutable:
        return "changes_input", "the call changed its input"
    state = [s for s in reply.state if not (trial.draws and "random" in s)]
    if state:
        return "state", f"the call left {' and '.join(state)} changed"
    return None


def answers_or_new(answers: Answers | None, drill: Drill, level: str) -> Any:
    if answers is not None:
        return nullcontext(answers)
    if level == "cuda":
        from bagu.lab.drill.cuda import CudaAnswers

        return CudaAnswers(drill)
    return Answers(triton=in_triton(level))


def _cpu() -> float:
    import resource

    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def check_isolated(host: Answers) -> None:
    if host.isolation is None:
        raise BaguError(
            f"this system permits no isolation of answers ({'; '.join(host.problems)})",
            hint="allow user namespaces, or use a kernel with Landlock",
        )
