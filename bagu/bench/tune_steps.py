"""What `bagu tune ops` searches: the steps of ops, the sizes to measure them at, and the options of each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bagu.bench.sizing import bench_inputs, forward_bytes, parse_size, resize
from bagu.errors import ArgumentError, UnknownName
from bagu.ops.call.link import received, selective
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case, OpSpec
from bagu.ops.contract.signature import Dims, sizes
from bagu.ops.tuning.lookup import kind_of_call
from bagu.ops.tuning.store import Kind

Key = tuple[tuple[str, int | None], ...]  # options as a value that can be hashed; () is the default


@dataclass(frozen=True, kw_only=True)
class Target:
    """A step of an op to tune at one size."""

    spec: OpSpec
    case: Case
    step: str  # "forward" or "backward"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A target with the arguments of a call."""

    spec: OpSpec
    case: Case
    dtype: torch.dtype
    step: str
    args: Mapping[str, Any]
    dims: Mapping[str, int]

    @property
    def fn(self) -> Callable[..., Any]:
        return partial(self.spec.apply, getattr(self.spec.module("triton"), self.step), self.args)

    @property
    def device(self) -> torch.device:
        return next(v.device for v in self.args.values() if isinstance(v, torch.Tensor))


def targets(names: Sequence[str], cases: Sequence[str], shapes: Sequence[str], dtype: torch.dtype) -> list[Target]:
    """The steps with a tuning space of the named ops (default: all), at their benchmark cases or at other shapes.

    Each of `shapes` ("M=4096,N=4096") replaces sizes of the first benchmark case, or of the named cases.
    """
    tunable = {name: s for name, s in SPECS.items() if "triton" in s.backends and _tunable(s)}
    for name in names:
        if name not in SPECS:
            raise UnknownName.among("op", name, SPECS)
        if name not in tunable:
            raise ArgumentError(f"{name} has no tuning space", hint=f"these have one: {', '.join(tunable)}")
    if shapes and not names:
        raise ArgumentError(
            "--sizes was given without an op, and the names of sizes differ between ops",
            hint="name the ops: bagu tune ops rms_norm --sizes M=4096,N=8192",
        )
    specs = [s for name, s in tunable.items() if not names or name in names]
    known = [c.name for s in specs for c in s.cases if c.bench]
    for name in cases:
        if name not in known:
            raise UnknownName.among("benchmark case", name, sorted(set(known)))
    found = []
    for spec in specs:
        bench = [c for c in spec.cases if c.bench and (not cases or c.name in cases)]
        if shapes:
            bench = [_resized(spec, c, text, dtype) for text in shapes for c in (bench if cases else bench[:1])]
        found += [Target(spec=spec, case=c, step=step) for c in bench for step in _tunable(spec)]
    return found


def _tunable(spec: OpSpec) -> Mapping[str, Mapping[str, Sequence[int | None]]]:
    """The tuning space by step."""
    found: Mapping[str, Mapping[str, Sequence[int | None]]] = getattr(spec.module("triton"), "TUNABLE", {})
    return found


def _resized(spec: OpSpec, case: Case, text: str, dtype: torch.dtype) -> Case:
    if not (size := parse_size(text, "--sizes")):
        raise ArgumentError("--sizes is empty; expected NAME=NUMBER", hint="--sizes M=4096,N=4096")
    made = resize(spec, case, size)
    try:
        forward_bytes(spec, made, dtype)
    except RuntimeError as error:  # torch, while the inputs are made
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"{spec.name}: no inputs can be made for --sizes {text}: {reason}") from None
    return made


def steps(spec: OpSpec, case: Case, dtype: torch.dtype, device: torch.device | str) -> Iterator[Step]:
    """The steps of a case that have a tuning space, with the arguments of a call; a forward makes the backward's.

    On "meta" nothing runs, and tensors have only a shape.
    """
    module = spec.module("triton")
    tunable = _tunable(spec)
    args = bench_inputs(spec, case, dtype, device)
    dims = spec.bind(args)
    common: dict[str, Any] = {"spec": spec, "case": case, "dtype": dtype, "dims": _named(spec, dims)}
    if "forward" in tunable:
        yield Step(**common, step="forward", args=args)
    if "backward" in tunable and spec.grads:
        made = spec.empty_results(args) if torch.device(device).type == "meta" else spec.apply(module.forward, args)
        results = dict(zip((r.name for r in spec.sig.results), made, strict=True))
        incoming = {f"d{o}": torch.randn_like(results[o]) for o in spec.differentiable}
        known = args | results | incoming
        given = {a.name: known[a.name] for a in received(spec)}
        if selective(module.backward):
            given["needs"] = dict.fromkeys(spec.made, True)
        yield Step(**common, step="backward", args=given)


def _named(spec: OpSpec, dims: Dims) -> dict[str, int]:
    """The sizes of the input tensors by the names of their dims."""
    names = {name for t in spec.sig.tensors for _, name in t.dims}
    return {name: size for name, size in sizes(dims).items() if name in names}


def kind_of(target: Target, dtype: torch.dtype, device: str) -> Kind:
    """The kind of the calls that a target stands for, on the device with this name; allocates nothing."""
    step = next(s for s in steps(target.spec, target.case, dtype, "meta") if s.step == target.step)
    return replace(kind_of_call(step.spec, step.step, step.args), device=device)


def space(spec: OpSpec, step: str) -> list[Key]:
    """Every combination of the step's options."""
    options = _tunable(spec)[step]
    return [tuple(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
