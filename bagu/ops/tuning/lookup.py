"""Options of a call at run time: the exact kind of call in the store, else the nearest shapes, else the defaults.

The answer is kept, so that host code which runs for every call (custom ops, calls that cannot be replayed) pays for a
search once. A call that finds nothing on a device that has tunings is a miss (missing.py).
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from bagu.ops.contract.core import OpSpec
from bagu.ops.replay.replay import remember
from bagu.ops.tuning.missing import Missing
from bagu.ops.tuning.source import source_hash
from bagu.ops.tuning.store import Kind, Options, Shapes, Winner, shipped_store, user_store, winners

MAX_RATIO = 2.0  # shapes with a larger ratio in any dim are of another class
ALIGNED = 16  # Triton compiles another kernel for sizes that are not a multiple of this


def tuned(spec: OpSpec, step: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, a forward or backward of the Triton backend, with the options of the store added to each call."""
    if step not in getattr(spec.module("triton"), "TUNABLE", {}):
        return fn

    @functools.wraps(fn)
    def run(*record: Any, **rest: Any) -> Any:
        args = {**record[0]._asdict(), **rest} if record else rest
        if os.environ.get("BAGU_TUNING") == "off" or _device(args) not in (known := table()).devices:
            return fn(*record, **rest)
        key = (spec.name, step, *map(_facts, args.values()))
        kind, options = known.calls.get(key) or remember(known.calls, key, known.look_up(spec, step, args))
        if not options or kind in known.results:
            return fn(*record, **rest, **options)
        return _with_fallback(functools.partial(fn, *record, **rest), known, kind, options)

    return run


def _with_fallback(fn: Callable[..., Any], known: Table, kind: Kind, options: Options) -> Any:
    """Run with options that were tuned at other shapes; a kernel may need too much shared memory at these."""
    from triton.errors import TritonError

    try:
        return fn(**options)
    except TritonError as error:
        known.found[kind] = {}
        known.calls.clear()
        warnings.warn(
            f"{kind.op}: the options {dict(options)}, tuned at similar shapes, cannot run here and the defaults are "
            f"used ({str(error).splitlines()[0]})",
            RuntimeWarning,
            stacklevel=2,
        )
        return fn()


class Table:
    """The results that this process uses, and the kinds of calls it has looked for."""

    def __init__(self, results: Mapping[Kind, Winner]) -> None:
        self.results = results
        self.devices = {kind.device for kind in results}
        self.found: dict[Kind, Options] = {}
        # by the facts of a call: a kind takes 50 us to make, and host code may run for every call
        self.calls: dict[tuple[Any, ...], tuple[Kind, Options]] = {}
        self.missing = Missing()

    def look_up(self, spec: OpSpec, step: str, args: Mapping[str, Any]) -> tuple[Kind, Options]:
        kind = kind_of_call(spec, step, args)
        return kind, self.options(kind)

    def options(self, kind: Kind) -> Options:
        if (options := self.found.get(kind)) is None:
            result = find(kind, self.results)
            if result is None:
                self.missing.add(kind)
            options = self.found[kind] = {} if result is None else result.options
        return options


def find(kind: Kind, known: Mapping[Kind, Winner]) -> Winner | None:
    """The result for this kind, else for the nearest shapes, else None."""
    return known.get(kind) or nearest(kind, known.values())


def kind_of_call(spec: OpSpec, step: str, args: Mapping[str, Any]) -> Kind:
    tensors = [(name, args[name]) for name in sorted(args) if isinstance(args[name], torch.Tensor)]
    return Kind(
        op=spec.name,
        step=step,
        dtype=", ".join(dict.fromkeys(_dtype(t.dtype) for _, t in tensors)),
        shapes=tuple((name, tuple(t.shape)) for name, t in tensors),
        modes=tuple((name, _mode(args[name])) for name in sorted(args) if isinstance(args[name], _MODES)),
        device=_device(args),
        source=source_hash(spec.module("triton").__name__),
    )


_MODES = (str, bool, torch.dtype)


def _facts(value: Any) -> Any:
    """What the kind of a call depends on in one argument."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    return value if isinstance(value, _MODES) else None


def _mode(value: str | bool | torch.dtype) -> str:
    return _dtype(value) if isinstance(value, torch.dtype) else str(value)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device(args: Mapping[str, Any]) -> str:
    return next(device_name(v.device) for v in args.values() if isinstance(v, torch.Tensor))


@functools.cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def nearest(kind: Kind, known: Iterable[Winner]) -> Winner | None:
    """The result for the most similar shapes of the same class: of the same op, step, dtype, modes, device and source,
    no dim off by more than a factor of two, and rows that are aligned in both or in neither."""
    found = [(_distance(kind.shapes, w.kind.shapes), i, w) for i, w in enumerate(known) if _same(kind, w.kind)]
    return min((f for f in found if f[0] < math.inf), default=(0, 0, None))[2]


def _same(a: Kind, b: Kind) -> bool:
    return (a.op, a.step, a.dtype, a.modes, a.device, a.source) == (b.op, b.step, b.dtype, b.modes, b.device, b.source)


def _distance(a: Shapes, b: Shapes) -> float:
    """The sum of |log2| of the ratios of the dims; infinite for shapes of different classes."""
    if [(name, len(shape)) for name, shape in a] != [(name, len(shape)) for name, shape in b]:
        return math.inf
    total = 0.0
    for (_, x), (_, y) in zip(a, b, strict=True):
        ratios = [abs(math.log2(max(m, 1) / max(n, 1))) for m, n in zip(x, y, strict=True)]
        aligned = [not shape or shape[-1] % ALIGNED == 0 for shape in (x, y)]
        if aligned[0] != aligned[1] or max(ratios, default=0.0) > math.log2(MAX_RATIO):
            return math.inf
        total += sum(ratios)
    return total


@functools.cache
def table() -> Table:
    """The results of the stores, read once; the user's win over those that come with the package."""
    contents = [store.read("winner") for store in (shipped_store(), user_store())]
    for problem in (c.problem for c in contents if c.problem is not None):
        warnings.warn(problem, RuntimeWarning, stacklevel=2)
    return Table(winners(record for c in contents for record in c.records))


def reload() -> None:
    """Read the stores again at the next call."""
    table.cache_clear()
