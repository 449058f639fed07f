"""Which points of conformance run which functions of a Triton backend, so that a planted bug is tried at those alone.

Launchers run with kernels that do nothing, which takes a second for an op: what a launcher calls and which kernels it
launches is recorded, and what these kernels can call follows from their source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch

from bagu.ops.call.node import paired
from bagu.ops.catalogue import SPECS
from bagu.ops.contract import core
from bagu.ops.contract.core import OpSpec, Streams, _placed, _run
from bagu.ops.contract.layouts import lay_out
from bagu.ops.replay.launcher import Launch, noted_launches
from tests.ops import sources
from tests.ops.branches import kernels_switched_off
from tests.ops.points import Point

Names = frozenset[tuple[str, str]]  # (module, function of its top level)


def launch(spec: OpSpec, point: Point, forward: Any, backward: Any) -> None:
    """Run the host code of a call and of its backward."""
    streams = Streams(spec.name, point.case.name)
    place = lambda v, i: lay_out(v, point.layout, i)  # noqa: E731
    args = _placed(spec.cast(point.case, spec.inputs(point.case, streams), point.dtype), place)
    fn = paired(spec, forward, backward)
    with core.interpreted_sms(point.case.sms):
        _run(spec, point.case, fn, args, None, streams=streams, layout=point.layout, place=place)


def launched(spec: OpSpec, point: Point, forward: Any, backward: Any) -> list[Any]:
    """The launches of a call and of its backward, without their options (warps, stages); kernels do nothing."""
    found: list[Launch] = []
    with kernels_switched_off(), noted_launches(found.append):
        launch(spec, point, forward, backward)
    described = lambda v: (v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else repr(v)  # noqa: E731
    return [(x.fn.__name__, x.grid, {k: described(v) for k, v in x.args.items()}) for x in found]


@cache
def reached_at(op: str, point: Point) -> Names:
    """The functions that the Triton backend of an op runs at a point."""
    module = SPECS[op].module("triton")
    with _recorded() as found:
        launch(SPECS[op], point, module.forward, getattr(module, "backward", None))
    return frozenset(found)


@contextmanager
def _recorded() -> Iterator[set[tuple[str, str]]]:
    """Inside, kernels do nothing; the functions of bagu.ops that are called and the kernels that are launched."""
    from triton.runtime.interpreter import InterpretedFunction

    found: set[tuple[str, str]] = set()
    run, profile = InterpretedFunction.run, sys.getprofile()

    def called(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("bagu.ops."):
            found.add((module, frame.f_code.co_qualname.partition(".")[0]))

    def launched(kernel: Any, *args: Any, **options: Any) -> None:
        found.update(sources.closure(kernel.fn.__module__, kernel.fn.__name__))

    InterpretedFunction.run = launched
    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(profile)
        InterpretedFunction.run = run
