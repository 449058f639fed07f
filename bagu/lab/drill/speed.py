"""`bagu drill time` on a GPU: the share of the ceiling over several shapes, beside bagu and torch.

The clock is in this process, the answer in another, which makes n calls over rotating inputs on request. The time of a
call is the slope between a short and a long run of them, so that the messages cancel. The inputs together are larger
than the cache. After the clock stops, the result of one call is compared here with bagu's own. A time that the ceiling
does not allow is a fault of the measurement, and no grade.
"""

from __future__ import annotations

import math
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from bagu.bench.roofline import floor, is_fault
from bagu.errors import BaguError
from bagu.lab.drill import catalogue, wire
from bagu.lab.drill.core import Drill
from bagu.lab.drill.oracles.ops import reduced
from bagu.lab.drill.places import load
from bagu.machine.ceilings import Ceilings, measure_ceilings
from bagu.ops.contract.core import Case, OpSpec, Streams
from bagu.ops.contract.signature import sizes

PACKAGE = Path(__file__).parents[3]
START = "import sys; sys.path.append(sys.argv[1]); from bagu.lab.drill.speed import main; main(*sys.argv[2:])"
ROUNDS, SHORT, LONG = 7, 4, 24
CACHE = 128 << 20  # bytes that the rotating inputs exceed: more than twice the L2 of an H200
A_SHARE, B_SHARE = 0.8, 0.4


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One shape: seconds per call of the answer, of bagu and of the reference in torch."""

    case: str
    answer_s: float
    bagu_s: float
    torch_s: float
    floor_s: float
    fault: bool

    @property
    def share(self) -> float:
        return self.floor_s / self.answer_s

    def __str__(self) -> str:
        fault = "  FAULT: faster than the ceiling allows" if self.fault else ""
        return (
            f"{self.case:16} {1e6 * self.answer_s:9.1f} us  {self.share:6.1%} of the ceiling"
            f"  bagu {1e6 * self.bagu_s:9.1f} us  torch {1e6 * self.torch_s:9.1f} us{fault}"
        )


def letter(rows: list[Timed]) -> str:
    """A, B or C by the geometric mean of the shares; a fault is no grade."""
    if any(row.fault for row in rows):
        return "?"
    share = math.exp(statistics.fmean(math.log(row.share) for row in rows))
    beside = math.exp(statistics.fmean(math.log(row.bagu_s / row.answer_s) for row in rows))
    return "A" if share >= A_SHARE or beside >= 0.9 else "B" if share >= B_SHARE else "C"


def inputs(spec: OpSpec, case: Case, dtype: torch.dtype, device: str) -> list[dict[str, Any]]:
    """Sets of arguments with different values, together larger than the cache."""

    def one(i: int) -> dict[str, Any]:
        args = spec.cast(case, spec.inputs(case, Streams(spec.name, case.name, i, device=device)), dtype)
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}

    first = one(0)
    size = sum(v.nbytes for v in first.values() if isinstance(v, torch.Tensor))
    return [first, *(one(i) for i in range(1, max(2, min(8, 1 + CACHE // max(size, 1)))))]


def slope(run: Callable[[int], None]) -> float:
    """Seconds per call: the median slope between SHORT and LONG calls."""
    run(LONG)
    found = []
    for _ in range(ROUNDS):
        times = []
        for count in (SHORT, LONG):
            began = time.perf_counter()
            run(count)
            times.append(time.perf_counter() - began)
        found.append((times[1] - times[0]) / (LONG - SHORT))
    return statistics.median(found)


def calls(fn: Callable[..., Any], sets: list[dict[str, Any]], device: str) -> Callable[[int], Any]:
    """A function that makes n calls over the sets in turn, waits for the device, and returns the last result."""

    def run(count: int) -> Any:
        out = None
        for i in range(count):
            out = fn(**sets[i % len(sets)])
        if device == "cuda":
            torch.cuda.synchronize()
        return out

    return run


def time_answer(
    drill: Drill,
    file: Path,
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    ceilings: Ceilings | None = None,
    cases: list[Case] | None = None,
) -> Iterator[Timed]:
    """Time an answer at the bench cases of its op."""
    spec = reduced(drill)
    known = ceilings or measure_ceilings(device, quick=True)
    for case in cases or [c for c in spec.cases if c.bench]:
        sets = inputs(spec, case, dtype, device)
        own = calls(_own(spec, device), sets, device)
        plain = calls(spec.by_name(spec.reference), sets, device)
        with Remote(drill, file, case.name, dtype, device) as remote:
            answer_s = slope(remote.run)
            which = Random(time.time_ns()).randrange(len(sets))
            got = remote.result(which)
        compare(got, own_result(spec, sets[which], device), file, case)
        dims = sizes(spec.bind(sets[0]))
        cost = spec.cost(dims, sets[0][spec.sig.tensors[0].name].itemsize)
        written = sum(t.nbytes for t in got)
        yield Timed(
            case=case.name,
            answer_s=answer_s,
            bagu_s=slope(own),
            torch_s=slope(plain),
            floor_s=floor(cost, known).seconds,
            fault=is_fault(cost, written=written, seconds=answer_s, ceilings=known),
        )


def _own(spec: OpSpec, device: str) -> Callable[..., Any]:
    from bagu.ops.call.dispatch import call

    return lambda **args: call(spec, "triton" if device == "cuda" else "torch", **args)


def own_result(spec: OpSpec, args: Mapping[str, Any], device: str) -> list[Any]:
    out = _own(spec, device)(**args)
    return list(out) if isinstance(out, tuple) else [out]


def compare(got: list[torch.Tensor], want: list[torch.Tensor], file: Path, case: Case) -> None:
    """Raise if the result of a timed call is not bagu's: a kept result, or work that was not done."""
    for a, b in zip(got, want, strict=True):
        a, b = a.float(), b.float().cpu()
        if a.shape != b.shape or not torch.allclose(a, b, rtol=0.03, atol=0.03 * float(b.abs().mean()), equal_nan=True):
            raise BaguError(
                f"{file}: a timed call of case {case.name} gave a wrong result", hint="bagu drill check FILE"
            )


class Remote:
    """The answer in another process, which has the same inputs."""

    def __init__(self, drill: Drill, file: Path, case: str, dtype: torch.dtype, device: str) -> None:
        mine, its = socket.socketpair()
        command = [sys.executable, "-c", START, str(PACKAGE), str(its.fileno()), drill.name, str(file.absolute()), case,
                   str(dtype)[6:], device]  # fmt: skip
        self.process = subprocess.Popen(command, pass_fds=[its.fileno()])
        its.close()
        self.channel = mine
        self._ask({"ready": True})

    def _ask(self, asked: Mapping[str, Any]) -> Any:
        try:
            wire.send(self.channel, dict(asked))
            return wire.receive(self.channel)
        except (wire.Closed, OSError):
            raise BaguError("the answer's process ended while it was timed", hint="bagu drill check FILE") from None

    def run(self, count: int) -> None:
        self._ask({"run": count})

    def result(self, which: int) -> list[torch.Tensor]:
        return list(self._ask({"result": which}))

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.process.wait()


def main(fd: str, name: str, file: str, case_name: str, dtype: str, device: str) -> None:
    """In that process: make calls on request."""
    channel = socket.socket(fileno=int(fd))
    drill = catalogue.drill(name)
    spec = reduced(drill)
    case = next(c for c in spec.cases if c.name == case_name)
    sets = [
        {k: v for k, v in s.items() if k not in drill.fixed} for s in inputs(spec, case, getattr(torch, dtype), device)
    ]
    forward = load(file).forward
    run = calls(forward, sets, device)
    while True:
        try:
            asked = wire.receive(channel)
        except wire.Closed:
            return
        if "result" in asked:
            out = forward(**sets[asked["result"]])
            wire.send(channel, [t.cpu() for t in (out if isinstance(out, tuple) else (out,))])
        else:
            run(asked.get("run", 1))
            wire.send(channel, True)
