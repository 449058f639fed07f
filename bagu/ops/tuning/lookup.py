"""Options of a call at run time: the exact kind of call in the store, else the nearest shapes, else the defaults.

Host code runs for the first calls of each kind only (replay.py), so a lookup does not cost anything later. A call that
finds nothing on a device that has tunings is written to a list once; `bagu tune missing` prints it.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from bagu.ops.core import OpSpec
from bagu.ops.tuning.source import source_hash
from bagu.ops.tuning.store import (
    Kind,
    Options,
    Shapes,
    Winner,
    add_missing,
    shipped_store,
    user_store,
    winners,
)

__all__ = ["device_name", "kind_of_call", "nearest", "reload", "tuned"]

MAX_RATIO = 2.0  # shapes with a larger ratio in any dim are of another class

_missing: set[Kind] = set()  # kinds of this process that were written to the list


def tuned(spec: OpSpec, step: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, a forward or backward of the Triton backend, with the options of the store added to each call."""
    if step not in getattr(spec.module("triton"), "TUNABLE", {}):
        return fn

    @functools.wraps(fn)
    def run(**args: Any) -> Any:
        return fn(**args, **options_of(spec, step, args))

    return run


def options_of(spec: OpSpec, step: str, args: Mapping[str, Any]) -> Options:
    known = _stored()
    if not known or os.environ.get("BAGU_TUNING") == "off":
        return {}
    kind = kind_of_call(spec, step, args)
    if (found := known.get(kind) or nearest(kind, known)) is not None:
        return found.options
    if kind not in _missing and any(w.kind.device == kind.device for w in known.values()):
        _missing.add(kind)
        with suppress(OSError):  # the list is a convenience: a call works without it
            add_missing(kind)
    return {}


def kind_of_call(spec: OpSpec, step: str, args: Mapping[str, Any]) -> Kind:
    tensors = [v for v in args.values() if isinstance(v, torch.Tensor)]
    return Kind(
        op=spec.name,
        step=step,
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        shapes=tuple(tuple(t.shape) for t in tensors),
        device=device_name(tensors[0].device),
        source=source_hash(spec.module("triton").__name__),
    )


@functools.cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def nearest(kind: Kind, known: Mapping[Kind, Winner]) -> Winner | None:
    """The tuning of the most similar shapes: of the same op, step, dtype, device and source, no dim twice as large."""
    found = [(_distance(kind.shapes, w.kind.shapes), i, w) for i, w in enumerate(known.values()) if _same(kind, w.kind)]
    return min((f for f in found if f[0] < math.inf), default=(0, 0, None))[2]


def _same(a: Kind, b: Kind) -> bool:
    return (a.op, a.step, a.dtype, a.device, a.source) == (b.op, b.step, b.dtype, b.device, b.source)


def _distance(a: Shapes, b: Shapes) -> float:
    if [len(s) for s in a] != [len(s) for s in b]:
        return math.inf
    ratios = [
        abs(math.log2(max(m, 1) / max(n, 1))) for x, y in zip(a, b, strict=True) for m, n in zip(x, y, strict=True)
    ]
    return sum(ratios) if max(ratios, default=0.0) <= math.log2(MAX_RATIO) else math.inf


@functools.cache
def _stored() -> dict[Kind, Winner]:
    return winners([shipped_store(), user_store()])


def reload() -> None:
    """Read the stores again at the next call."""
    _stored.cache_clear()
