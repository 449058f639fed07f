"""`bagu tune ops`: search the tuning space of Triton kernels on this GPU and store what is faster than the defaults.

For each step (forward, backward) of each benchmark case: compile all candidates for this GPU without running them and
drop those that fail or spill registers where the default does not; measure the rest in turn (selection.py); check the
winner against the fp64 reference; store it. Every measurement is stored as soon as it is made.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from bagu.bench.selection import select
from bagu.bench.sizing import bench_inputs, dtype_named, shrink
from bagu.errors import ArgumentError, BackendError, BaguError, UnknownName
from bagu.machine.timing import flush_buffer, measure
from bagu.ops.catalogue import SPECS
from bagu.ops.core import Case, OpSpec, check
from bagu.ops.link import received, selective
from bagu.ops.node import paired
from bagu.ops.offline import compile_launch, launches
from bagu.ops.tuning.lookup import kind_of_call, reload
from bagu.ops.tuning.store import Measurement, Options, Store, Winner, user_store

__all__ = ["Step", "main", "space", "steps"]

CHECK_BYTES = 1 << 22  # of the inputs of a check: the reference runs nine times, in fp64 and fp32
SAMPLE_S = 0.02  # of measuring a candidate in one round

Key = tuple[tuple[str, int | None], ...]  # options as a value that can be hashed; () is the default


@dataclass(frozen=True, kw_only=True)
class Step:
    """A forward or backward to tune, at one case: `args` are those of a call."""

    spec: OpSpec
    case: Case
    dtype: torch.dtype
    step: str
    args: Mapping[str, Any]

    @property
    def fn(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self.spec.module("triton"), self.step)
        return found


def main(
    names: Sequence[str] = (), *, cases: Sequence[str] = (), dtype: str | None = None, budget: float = 300.0,
    store: Store | None = None,
) -> int:  # fmt: skip
    """Tune the named ops, all with a tuning space by default, within `budget` seconds."""
    console, store = Console(), store or user_store()
    tunable = [s for s in SPECS.values() if "triton" in s.backends]
    for name in names:
        if name not in SPECS:
            raise UnknownName.among("op", name, SPECS)
    if not torch.cuda.is_available():
        raise BackendError(
            "bagu tune ops measures Triton kernels, and there is no CUDA device here",
            hint="`bagu ops show NAME --kernel --diff A B` compares two tunings by compiling, without a GPU",
        )
    device, chosen = torch.device("cuda"), dtype_named(dtype or "bf16")
    todo = [
        step
        for spec in tunable if not names or spec.name in names
        for case in spec.cases if case.bench and (not cases or case.name in cases)
        for step in space_steps(spec, case)
    ]  # fmt: skip
    if not todo:
        raise ArgumentError("nothing to tune: these ops have no tuning space", hint="`bagu ops show NAME` lists it")
    began, scrub = time.monotonic(), flush_buffer(device)
    for i, (spec, case, name) in enumerate(todo):
        left = budget - (time.monotonic() - began)
        if left <= 0:
            console.print(f"the budget of {budget:.0f} s is spent; {len(todo) - i} steps are left")
            break
        step = next(s for s in steps(spec, case, chosen, device) if s.step == name)
        winner = tune(step, store, seconds=left / (len(todo) - i), scrub=scrub)
        words = ", ".join(f"{k}={v}" for k, v in winner.options.items()) or "the default"
        console.print(
            f"{spec.name} {case.name} {name}: {words} ({winner.speedup:.3f}x, {winner.searched} of {winner.space})"
        )
    reload()
    return 0


def space_steps(spec: OpSpec, case: Case) -> list[tuple[OpSpec, Case, str]]:
    return [(spec, case, name) for name in getattr(spec.module("triton"), "TUNABLE", {})]


def steps(spec: OpSpec, case: Case, dtype: torch.dtype, device: torch.device | str) -> Iterator[Step]:
    """The steps of a case that have a tuning space, with the arguments of a call; a forward makes the backward's."""
    module = spec.module("triton")
    tunable = getattr(module, "TUNABLE", {})
    args = bench_inputs(spec, case, dtype, device)
    if "forward" in tunable:
        yield Step(spec=spec, case=case, dtype=dtype, step="forward", args=args)
    if "backward" in tunable and spec.grads:
        results = dict(zip((r.name for r in spec.sig.results), module.forward(**args), strict=True))
        known = args | results | {f"d{o}": torch.randn_like(results[o]) for o in spec.differentiable}
        given = {a.name: known[a.name] for a in received(spec)}
        if selective(module.backward):
            given["needs"] = dict.fromkeys(spec.made, True)
        yield Step(spec=spec, case=case, dtype=dtype, step="backward", args=given)


def space(spec: OpSpec, step: str) -> list[Key]:
    """Every combination of the step's options."""
    options = spec.module("triton").TUNABLE[step]
    return [tuple(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def tune(
    step: Step, store: Store, *, seconds: float, scrub: torch.Tensor | None = None,
    timer: Callable[[Key], float] | None = None,
) -> Winner:  # fmt: skip
    """Search one step and store the measurements and the winner. `timer` replaces the measurement on the GPU."""
    began, kind = time.monotonic(), kind_of_call(step.spec, step.step, step.args)
    device = next(v.device for v in step.args.values() if isinstance(v, torch.Tensor))

    def timed(key: Key) -> float:
        return measure(
            lambda: step.fn(**step.args, **dict(key)), device, seconds=SAMPLE_S, min_samples=3, buffer=scrub
        ).median_s

    points = space(step.spec, step.step)
    dropped = {key: why for key in points if (why := refused(step, key)) is not None}
    for key, (status, reason) in dropped.items():
        store.append(_measurement(kind, key, status, reason=reason))
    running = [key for key in points if key not in dropped]
    found = select((), running, timer or timed, deadline=began + seconds)
    for key, samples in found.samples.items():
        store.append(_measurement(kind, key, "ok", samples))
    chosen, speedup = found.winner, found.speedup
    if chosen is not None and (fault := wrong(step, chosen, device)) is not None:
        store.append(_measurement(kind, chosen, "wrong", reason=fault))
        chosen, speedup = None, 1.0
    winner = Winner(
        kind=kind, options=dict(chosen or ()), speedup=speedup, searched=len(running), space=len(points),
        seconds=time.monotonic() - began,
    )  # fmt: skip
    store.append(winner)
    return winner


def _measurement(kind: Any, key: Key, status: str, samples: Sequence[float] = (), reason: str = "") -> Measurement:
    ordered = sorted(samples)
    return Measurement(
        kind=kind, options=dict(key), status=status, reason=reason, samples=len(ordered), seconds=sum(ordered),
        median_s=statistics.median(ordered) if ordered else None,
        low_s=ordered[len(ordered) // 10] if ordered else None,
        high_s=ordered[-1 - len(ordered) // 10] if ordered else None,
        environment=environment(),
    )  # fmt: skip


def environment() -> dict[str, Any]:
    from importlib.metadata import version

    found: dict[str, Any] = {"torch": torch.__version__, "triton": version("triton")}
    if torch.cuda.is_available():
        found["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    return found


def refused(step: Step, key: Key, arch: str = "sm_90") -> tuple[str, str] | None:
    """(status, reason) if compiling these options fails, or spills registers where the defaults do not."""
    if not torch.cuda.is_available():
        return None  # the timer is a test's
    try:
        spills = {k: _spills(step, options, arch) for k, options in (("default", {}), ("these", dict(key)))}
    except (BaguError, RuntimeError) as error:
        return "compile", str(error).splitlines()[0]
    if spills["these"] > spills["default"]:
        return "spills", f"{spills['these']} bytes of spilled registers"
    return None


def _spills(step: Step, options: Options, arch: str) -> int:
    found = launches(step.spec, step.case, step.dtype, tuning={step.step: options})
    return sum(compile_launch(one, arch).metadata.n_spills for one in found if one.step == step.step)


def wrong(step: Step, key: Key, device: torch.device) -> str | None:
    """Why the results with these options are wrong, on fresh inputs and NaN-filled memory; None if they are right."""
    module, options = step.spec.module("triton"), {step.step: dict(key)}
    forward = lambda **args: module.forward(**args, **options.get("forward", {}))  # noqa: E731
    case = shrink(step.spec, step.case, step.dtype, CHECK_BYTES)
    case = Case(f"{case.name}, tuned", case.why, mixed=case.mixed, frozen=case.frozen, **case.params)  # fresh inputs
    backward = None
    if step.spec.grads:
        backward = lambda **args: module.backward(**args, **options.get("backward", {}))  # noqa: E731
    try:
        check(step.spec, case, step.dtype, paired(step.spec, forward, backward), device=device)
    except (BaguError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None
