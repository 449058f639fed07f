"""Compile candidates in other processes, while this one measures. Nothing runs there, and no GPU is used.

Triton keeps what it compiles in its cache folder, so a candidate that is measured later is loaded from there. All that
comes back is whether the compiler made it: candidates are chosen by their measured times alone.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType

import torch

from bagu.bench.tune_steps import Key, Target
from bagu.machine.device import this_machine
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case
from bagu.ops.inspect.offline import compile_launch, launches

START = "spawn"  # not fork: the parent has a CUDA context and threads


@dataclass(frozen=True, kw_only=True)
class Build:
    """The seconds of a compilation, or the error of the compiler."""

    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A candidate as it travels to another process: a spec is found there by its name."""

    op: str
    case: Case
    dtype: torch.dtype
    step: str
    options: Key
    arch: str


class Compiler:
    """Processes that compile. `begin` queues the candidates of a step; what it returns waits for one of them."""

    def __init__(self, dtype: torch.dtype, arch: str, workers: int | None = None) -> None:
        self.dtype, self.arch = dtype, arch
        self.workers = workers or max(1, this_machine().cores - 1)  # one core measures
        self.pool = self._pool()

    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.workers, mp_context=multiprocessing.get_context(START))

    def begin(self, target: Target, options: Sequence[Key]) -> Callable[[Key], Build]:
        jobs = {
            key: Job(
                op=target.spec.name, case=target.case, dtype=self.dtype, step=target.step, options=key, arch=self.arch
            )
            for key in options
        }
        queued = {key: self.pool.submit(build, job) for key, job in jobs.items()}
        return lambda key: self._result(jobs[key], queued[key])

    def _result(self, job: Job, queued: Future[Build]) -> Build:
        try:
            return queued.result()
        except BrokenProcessPool:  # the compiler crashed, at this candidate or at another: try it alone
            self.pool = self._pool()
        try:
            return self.pool.submit(build, job).result()
        except BrokenProcessPool:
            self.pool = self._pool()
            return Build(error="the compiler crashed")

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def build(job: Job) -> Build:
    """Compile the kernels that a step launches with these options."""
    began = time.monotonic()
    try:
        found = launches(SPECS[job.op], job.case, job.dtype, tuning={job.step: dict(job.options)}, only=job.step)
        for launch in found:
            compile_launch(launch, job.arch)
    except Exception as error:  # Triton, MLIR, ptxas: the errors of a compiler have no common base
        return Build(error=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return Build(seconds=time.monotonic() - began)
