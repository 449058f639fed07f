"""What conformance runs: each small case of an op, in each dtype of a backend, in one memory layout.

Every case meets its inputs packed in one dtype and with gaps in the next, which costs no more than one layout would:
launchers have a way for packed tensors and one for others, and both must be right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch

from bagu.ops.call.node import paired
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case, OpSpec, Streams

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ALL = (torch.float32, torch.float16, torch.bfloat16)
GAPPED = ("gaps", "odd_gaps", "sliced")
# which launchers copy first, or need not see
OTHERS = ("stepped", "transposed", "channels_last", "heads_first", "negated", "half_negated", "repeated")


class Point(NamedTuple):
    case: Case
    dtype: torch.dtype
    layout: str

    def __str__(self) -> str:
        return f"{self.case}-{str(self.dtype)[6:]}-{self.layout}"


def dtypes(backend: str) -> tuple[torch.dtype, ...]:
    """bf16 is garbage in Triton's interpreter (triton-lang/triton#4972)."""
    return ALL if GPU or backend == "torch" else ALL[:2]


def small(spec: OpSpec) -> list[Case]:
    return [c for c in spec.cases if not c.bench]


def supported(spec: OpSpec, backend: str, case: Case) -> bool:
    """Whether a backend runs a case at all."""
    return backend == "torch" or spec.unsupported is None or _runs(spec.name, case)


class Ones(Streams):
    """Floats without random numbers, which take 1 s for all cases: for the shapes and dtypes of inputs."""

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.float64, device=self.device)


@cache
def _runs(op: str, case: Case) -> bool:
    spec = SPECS[op]
    return spec.unsupported is None or spec.unsupported(spec.inputs(case, Ones(op, case.name))) is None


def eight_bits(spec: OpSpec, case: Case) -> bool:
    """Whether a case attends to an 8-bit cache, which has no invariant mode."""
    return spec.name == "paged_attention" and case.get("dtype", None) is not None


def points(spec: OpSpec, backend: str) -> list[Point]:
    cases = [c for c in small(spec) if supported(spec, backend, c)]
    return [
        Point(case, dtype, "packed" if (i + j) % 2 == 0 else GAPPED[(i + j // 2) % len(GAPPED)])
        for i, case in enumerate(cases) for j, dtype in enumerate(dtypes(backend))
    ]  # fmt: skip


def first_points(spec: OpSpec, backend: str) -> list[Point]:
    """One dtype of each case. The dtype changes with every second case, so that each has packed inputs and others."""
    all_points, each = points(spec, backend), len(dtypes(backend))
    return [all_points[i * each + i // 2 % each] for i in range(len(all_points) // each)]


def other_points(spec: OpSpec) -> list[Point]:
    """The remaining layouts, at the smallest case and at one with several leading dims."""
    cases = [small(spec)[0], *(c for c in small(spec) if c.name in ("batched", "many_dims"))]
    return [Point(case, torch.float32, layout) for case in cases for layout in OTHERS]


def tunings(spec: OpSpec, backend: str) -> list[tuple[str, dict[str, Any]]]:
    """Each point of each function's TUNABLE space."""
    space = getattr(spec.module(backend), "TUNABLE", {})
    return [(f, dict(zip(s, p, strict=True))) for f, s in space.items() for p in itertools.product(*s.values())]


class Looked(torch.Tensor):
    """A tensor that something looks through, as a DTensor: torch backends then run the formula that compilers see."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def looked_through(spec: OpSpec, module: ModuleType) -> Callable[..., Any]:
    """A torch backend as compilers and other backends' forwards use it: its formula, and its explicit backward."""

    def through(fn: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fn)
        def run(*record: Any, **args: Any) -> Any:
            looked = lambda v: v.as_subclass(Looked) if isinstance(v, torch.Tensor) else v  # noqa: E731
            shown = [type(r)(*map(looked, r)) for r in record], {k: looked(v) for k, v in args.items()}
            return [None if y is None else y.as_subclass(torch.Tensor) for y in fn(*shown[0], **shown[1])]

        return run

    return paired(spec, through(module.forward), through(module.backward) if spec.grads else None)


def run_as(spec: OpSpec, backend: str, dtype: torch.dtype, module: ModuleType) -> Callable[..., Any]:
    """What is checked of a backend's module in a dtype. The torch backends have two ways to run: fp16 has the other."""
    if backend != "torch":
        return paired(spec, module.forward, getattr(module, "backward", None))
    if dtype == torch.float16:
        return looked_through(spec, module)

    def run(**args: Any) -> Any:
        outputs = tuple(spec.apply(module.forward, args)[: len(spec.sig.outputs)])
        return outputs[0] if len(outputs) == 1 else outputs

    return run
