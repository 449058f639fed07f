"""`bagu tune ops`: search the tuning space of Triton kernels on this GPU and store what is faster than the defaults.

For each step (forward, backward) of each benchmark case, or of the shapes that were given: compile all candidates in
other processes (tune_compile.py); time them in turn and select (selection.py); check the winner against the fp64
reference; store it. Every measurement is stored as soon as it is made. A cost model once ordered the candidates; it
ranked them no better than chance finds the best (docs/tuning.md), so there is none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch

from bagu.bench.selection import select
from bagu.bench.sizing import dtype_named, input_bytes, shrink
from bagu.bench.tune_compile import Build, Compiler
from bagu.bench.tune_steps import Key, Step, Target, kind_of, space, steps, targets
from bagu.errors import BackendError, BaguError
from bagu.machine.device import driver_version, gpu
from bagu.machine.environment import triton_version
from bagu.machine.terminal import Terminal
from bagu.machine.timing import Timing, flush_buffer, repeated_measure
from bagu.ops.call.node import paired
from bagu.ops.contract.core import Case, check
from bagu.ops.tuning.lookup import device_name, kind_of_call, reload
from bagu.ops.tuning.store import Kind, Measurement, Store, Winner, shipped_store, user_store, winners

CHECK_BYTES = 1 << 22  # of the inputs of a check: the reference runs nine times, in fp64 and fp32
DRAWS = 3  # of the inputs of a check, where the default options fail it too
SAMPLE_S = 0.005  # of measuring a candidate in one round
AHEAD = 24  # steps whose candidates are queued for compilation before they are measured

Timer = Callable[[Key], Timing]


def main(
    names: Sequence[str] = (),
    *,
    cases: Sequence[str] = (),
    shapes: Sequence[str] = (),
    dtype: str | None = None,
    budget: float = 300.0,
    again: bool = False,
    store: Store | None = None,
) -> int:
    """Tune the named ops, all with a tuning space by default, within `budget` seconds.

    Steps that have a result are skipped, unless `again`.
    """
    console, store, kept = Terminal(highlight=False), store or user_store(), dtype_named(dtype or "bf16")
    todo = targets(names, cases, shapes, kept)
    if not torch.cuda.is_available():
        raise BackendError(
            "bagu tune ops measures Triton kernels, and there is no CUDA device here",
            hint="`bagu ops show NAME --kernel --diff A B` compares two tunings by compiling, without a GPU",
        )
    store.check_writable()
    began, device = time.monotonic(), torch.device("cuda")
    contents = [s.read("winner") for s in (shipped_store(), store)]
    for problem in (c.problem for c in contents if c.problem is not None):
        console.print(problem)
    known = {} if again else winners(r for c in contents for r in c.records)
    by_kind = {kind_of(t, kept, device_name(device)): t for t in todo}
    todo = [target for kind, target in by_kind.items() if kind not in known]
    if len(todo) < len(by_kind):
        console.print(f"{len(by_kind) - len(todo)} steps have a result already and are skipped (--again: search them)")
    timer_of, searched = gpu_timer(flush_buffer(device)), 0
    with Compiler(kept, arch_of(device)) as compiler:
        queue = [compiler.begin(t, [(), *space(t.spec, t.step)]) for t in todo[:AHEAD]]
        for i, target in enumerate(todo):
            left = budget - (time.monotonic() - began)
            if left <= 0:
                break
            if i + AHEAD < len(todo):
                later = todo[i + AHEAD]
                queue.append(compiler.begin(later, [(), *space(later.spec, later.step)]))
            searched += 1
            try:
                step = next(s for s in steps(target.spec, target.case, kept, device) if s.step == target.step)
                winner = tune(step, store, seconds=left / (len(todo) - i), timer=timer_of(step), builds=queue[i])
                console.print(_line(target, winner))
            except (BaguError, torch.OutOfMemoryError) as error:  # a case may be too large for this GPU
                console.print(f"{target.spec.name} {target.case.name} {target.step}: {_first_line(error)}")
    spent = time.monotonic() - began
    rest = f"; the budget is spent, and {len(todo) - searched} are left: run it again" if searched < len(todo) else ""
    console.print(f"{searched} steps searched in {spent:.0f} s{rest}. Results: {store.path}")
    reload()
    return 0


def _line(target: Target, winner: Winner) -> str:
    words = ", ".join(f"{k}={v}" for k, v in winner.options.items()) or f"the default ({winner.verdict})"
    return (
        f"{target.spec.name} {target.case.name} {target.step}: {words}, {winner.speedup:.3f}x, "
        f"{winner.searched} of {winner.space} measured, {winner.seconds:.1f} s"
    )


def arch_of(device: torch.device) -> str:
    """ "sm_90" of an H200."""
    return "sm_{}{}".format(*gpu(device).capability)


def gpu_timer(scrub: torch.Tensor) -> Callable[[Step], Timer]:
    """Measures a step with a set of options on the GPU; `scrub` flushes the cache before each sample."""

    def of(step: Step) -> Timer:
        known: dict[Key, Callable[[], Timing]] = {}

        def timed(key: Key) -> Timing:
            if key not in known:
                call = lambda: step.fn(**dict(key))  # noqa: E731
                known[key] = repeated_measure(call, step.device, seconds=SAMPLE_S, buffer=scrub)
            return known[key]()

        return timed

    return of


@dataclass(frozen=True, kw_only=True)
class _Book:
    """Measures candidates of a step and appends each measurement to the store at once."""

    step: Step
    kind: Kind
    store: Store
    timer: Timer
    compile_s: dict[Key, float]  # of candidates without a record yet

    def add(self, key: Key, status: str, reason: str = "", timing: Timing | None = None, seconds: float = 0.0) -> None:
        times: dict[str, Any] = {} if timing is None else asdict(timing)
        record = Measurement(
            kind=self.kind,
            options=dict(key),
            status=status,
            reason=reason,
            **times,
            dims=self.step.dims,
            seconds=seconds + self.compile_s.pop(key, 0.0),
            environment=environment(),
        )
        self.store.append(record)

    def measure(self, key: Key) -> float:
        """The median time, or infinity if the call raises."""
        from triton.errors import TritonError

        began = time.monotonic()
        try:
            timing = self.timer(key)
        except (TritonError, RuntimeError) as error:
            self.add(key, "failed", _first_line(error), seconds=time.monotonic() - began)
            return math.inf
        self.add(key, "ok", timing=timing, seconds=time.monotonic() - began)
        return timing.median_s


def tune(
    step: Step, store: Store, *, seconds: float, timer: Timer, builds: Callable[[Key], Build] = lambda key: Build()
) -> Winner:
    """Search one step, and store the measurements and the result. `builds` waits until a candidate is compiled; by
    default nothing is compiled before it is measured."""
    points = space(step.spec, step.step)
    made = {key: builds(key) for key in ((), *points)}
    began = time.monotonic()  # compilation runs beside the search of other steps
    kind = kind_of_call(step.spec, step.step, step.args)
    compile_s = {key: build.seconds for key, build in made.items()}
    book = _Book(step=step, kind=kind, store=store, timer=timer, compile_s=compile_s)
    running = [key for key in points if not made[key].error]
    for key in (key for key in points if made[key].error):
        book.add(key, "compile", made[key].error)
    if book.measure(()) == math.inf:
        raise BaguError(f"{step.spec.name} {step.case.name} {step.step} fails with its default options")
    found = select((), running, book.measure, deadline=began + seconds)
    chosen: Key = ()
    verdict = "wrong" if found.faster else "no significant winner"
    for key in found.faster:
        if (fault := wrong(step, key)) is None:
            chosen, verdict = key, "faster"
            break
        book.add(key, "wrong", fault)
    winner = Winner(
        kind=kind,
        options=dict(chosen),
        verdict=verdict,
        speedup=found.faster.get(chosen, 1.0),
        searched=len(running),
        space=len(points),
        seconds=time.monotonic() - began,
        dims=step.dims,
        environment=environment(),
    )
    store.append(winner)
    return winner


@cache
def environment() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton_version(), "driver": driver_version()}
    if torch.cuda.is_available():
        found["memory_bytes"] = gpu(torch.cuda.current_device()).memory_bytes
    return found


def wrong(step: Step, key: Key) -> str | None:
    """Why the results with these options are wrong, on fresh inputs and NaN-filled memory; None if they are right.

    A fault counts only where the default options are right: at some inputs a reference in fp32 is lucky, and every
    result of the op is beyond its tolerance. Then other inputs are drawn.
    """
    fault = None
    for draw in range(DRAWS):
        fault = _fault(step, key, draw)
        if fault is None or _fault(step, (), draw) is None:
            break
    return fault


def _fault(step: Step, key: Key, draw: int) -> str | None:
    from triton.errors import TritonError

    module, options = step.spec.module("triton"), {step.step: dict(key)}
    forward = partial(module.forward, **options.get("forward", {}))
    backward = partial(module.backward, **options.get("backward", {})) if step.spec.grads else None
    case = shrink(step.spec, step.case, step.dtype, CHECK_BYTES, input_bytes)
    kept: dict[str, Any] = {"mixed": case.mixed, "frozen": case.frozen, "sms": case.sms}
    case = Case(f"{case.name}, tuned {draw}", case.why, **kept, **case.params)  # inputs are drawn by the case's name
    try:
        run = paired(step.spec, forward, backward)
        check(step.spec, case, step.dtype, run, backend="triton", device=step.device)
    except (BaguError, AssertionError, TritonError, RuntimeError) as error:
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
