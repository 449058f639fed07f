"""Records what a piece of code computes by running it on meta tensors: every op, and every ATen operator between ops.

>>> with recording.Recorder() as recorder:
...     hidden = model(ids, positions, cu_seqlens, max_len).hidden  # everything on the meta device
>>> [call.name for call in recorder.calls]
['aten.embedding.default', …, 'rms_norm', 'matmul', …]

While a recorder is open in a thread, an op (`dispatch.call`) runs no backend. Its results are empty tensors with
the shapes of its signature. One autograd node makes them and saves the tensors that the spec's backward reads. So a
recording is the same on every machine, and `torch.autograd.graph.saved_tensors_hooks` sees what a backward would keep.

A tensor is identified by its storage (`storage_id`) and by offset, shape and strides, which the meta device has too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bagu.ops.call.link import Link
from bagu.ops.contract.core import OpSpec
from bagu.ops.contract.signature import Dims


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an op, or of an ATen operator."""

    name: str  # "rms_norm", "aten.view.default"
    args: Mapping[str, Any]  # by the names in the signature or schema; a missing ATen argument has its default
    results: tuple[torch.Tensor, ...]  # for an op: outputs and residuals
    spec: OpSpec | None = None  # for an op
    dims: Dims | None = None  # for an op: its sizes and scalars
    operator: torch._ops.OpOverload | None = None  # for an ATen operator


_current: ContextVar[Recorder | None] = ContextVar("bagu.ops.call.recording", default=None)


def active() -> Recorder | None:
    """The open recorder of this thread or asyncio task; None in compiled code."""
    return None if torch.compiler.is_compiling() else _current.get()


def storage_id(x: torch.Tensor) -> int:
    """An id that all views of one storage share, also on the meta device; unique while one of the views is alive."""
    return x.untyped_storage()._cdata


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """If True, torch imports its compiler at the first call, 0.9 s, to exclude this class from compilation."""
        return False

    def __enter__(self) -> Recorder:
        self._token = _current.set(self)
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        _current.reset(self._token)

    def call(self, spec: OpSpec, args: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """Check the arguments of an op; return its outputs and residuals as empty tensors."""
        assert args[spec.sig.tensors[0].name].is_meta, f"{spec.name}: a recording is of meta tensors"
        dims, before = spec.bind(args), len(self.calls)
        values = [args[a.name] for a in spec.sig.inputs]
        results = _Node.apply(spec, *values) if spec.grads else tuple(spec.empty_results(args))
        self.calls[before:] = [Call(spec.name, dict(args), results, spec=spec, dims=dims)]  # replaces its ATen calls
        return results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        results = tuple(t for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        self.calls.append(Call(str(func), given, results, operator=func))
        return out


class _Node(torch.autograd.Function):
    """Returns empty results, and saves the tensors that a backward of the op would receive."""

    @staticmethod
    def forward(ctx: Any, spec: OpSpec, *values: Any) -> tuple[torch.Tensor, ...]:
        results = tuple(spec.empty_results(dict(zip((a.name for a in spec.sig.inputs), values, strict=True))))
        Link.of(spec).keep(ctx, values, results, len(results))
        return results

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> Any:
        raise AssertionError("a recording has no values to take gradients of")
