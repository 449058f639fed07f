"""The workers of a run or the replicas of a server, as text: "2x cpu:2,1x cpu:1", and the cores that each gets.

2x cpu:2    two workers of two cores each       cpu     one worker; such workers have equal parts of the machine
cpu:1       one worker of one core              cuda    one worker with a GPU of its own
3           short for 3x cpu
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bagu.errors import ArgumentError, UnknownName

KINDS = ("cpu", "cuda")
MOST = 1024  # workers of one text: more is a mistyped number


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A process that computes: its kind, and of the kind cpu how many cores it has (None: an equal part)."""

    kind: str = "cpu"
    cores: int | None = None

    def __str__(self) -> str:
        return self.kind if self.cores is None else f"{self.kind}:{self.cores}"


def parse_workers(text: str, *, kinds: Iterable[str] = KINDS) -> tuple[Worker, ...]:
    """The workers of a text such as "2x cpu:2,1x cpu:1", in its order. `kinds` are the ones that the caller can use."""
    known, found = tuple(kinds), list[Worker]()
    for part in (p.strip() for p in text.split(",")):
        match = re.fullmatch(r"(?:(\d+)\s*x\s*)?([A-Za-z][\w-]*)(?::(\d+))?|(\d+)", part, re.ASCII)
        if match is None:
            raise ArgumentError(
                f"--workers {text!r}: {part!r} names no workers",
                hint='write "2x cpu:2,1x cpu:1": a number, x, a kind, its cores',
            )
        times, kind, cores, plain = match[1], match[2] or "cpu", match[3], match[4]
        UnknownName.check("kind of worker", kind, known)
        if cores is not None and kind != "cpu":
            raise ArgumentError(
                f"--workers {text!r}: {part!r} has cores", hint=f"a {kind} worker has one device: {kind}"
            )
        number = int(times or plain or 1)
        if not 1 <= number <= MOST or (cores is not None and int(cores) < 1):
            raise ArgumentError(
                f"--workers {text!r}: {part!r} is no possible number", hint=f"give 1 to {MOST} workers, 1 core or more"
            )
        found += [Worker(kind=kind, cores=None if cores is None else int(cores))] * number
    if len(found) > MOST:
        raise ArgumentError(f"--workers {text!r} are {len(found)} workers", hint=f"give at most {MOST}")
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The cores of one worker: `pinned` to them, or (None) free to use any; `threads` is how many it computes with."""

    threads: int
    pinned: tuple[int, ...] | None = None

    def environ(self) -> dict[str, str]:
        """The environment that a process starts with. One that has not named its cores keeps the user's threads."""
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        return {**threads, **os.environ} if self.pinned is None else {**os.environ, **threads}

    def pin(self, process: int) -> None:
        """Keep a process on these cores. Call it right after the start: threads that exist already are not moved."""
        if self.pinned is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process, self.pinned)


@dataclass(frozen=True, kw_only=True)
class Division:
    """The cores of each worker. `shared` says that workers which name their cores want more than there are."""

    of: tuple[Cores, ...]
    shared: bool


def divide_cores(workers: Sequence[Worker], cores: Sequence[int]) -> Division:
    """Give `cores` (numbers of the operating system) to workers. Those that name how many get a set of their own, in
    turn, from the first core again when all are given; the others have equal parts of what is left."""
    asked = sum(worker.cores or 0 for worker in workers)
    free = sum(worker.kind == "cpu" and worker.cores is None for worker in workers)
    rest, at, found = max(1, (len(cores) - asked) // max(1, free)), 0, list[Cores]()
    for worker in workers:
        if worker.cores is None:
            found.append(Cores(threads=rest if worker.kind == "cpu" else 1))
            continue
        if worker.cores > len(cores):
            raise ArgumentError(
                f"a worker {worker} has {worker.cores} cores, and this process may use {len(cores)}",
                hint=f"give at most cpu:{len(cores)}",
            )
        mine = tuple(sorted(cores[(at + i) % len(cores)] for i in range(worker.cores)))
        at += worker.cores
        found.append(Cores(threads=worker.cores, pinned=mine))
    return Division(of=tuple(found), shared=asked + free > len(cores))
