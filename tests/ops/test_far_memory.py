"""Memory around an op's tensors: strides whose offsets pass 2^31, and pages after the end that must not be read.

The large memory is reserved and never touched but at the tensors' own elements, so it costs a few pages.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagu.ops.call.node import Node
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case, OpSpec
from tests.ops.mutants import Verdict, in_child
from tests.ops.points import GPU, Ones, small, supported
from tests.ops.replaying import drawn, ran

pytestmark = pytest.mark.skipif(GPU, reason="memory that is reserved and not there")
NORESERVE, NONE = 0x4000, 0  # MAP_NORESERVE and PROT_NONE of Linux
COMPOSED = ("encoder_layer", "mlp", "self_attention")  # of kernels of other ops
TRITON = [s for s in SPECS.values() if "triton" in s.backends and s.name not in COMPOSED]


def reserved(count: int, dtype: torch.dtype) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype=torch.uint8).view(dtype)


def far(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy whose last element along a dim is more than 2^31 elements after its first."""
    stride = list(x.contiguous().stride())
    stride[dim] = ((1 << 31) // (x.shape[dim] - 1) + x.numel()) // 16 * 16 + 16
    assert stride[dim] < 1 << 31
    memory = reserved(1 + sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True)), x.dtype)
    return memory.as_strided(x.shape, stride).copy_(x.detach())


def compared(spec: OpSpec, args: dict[str, Any], others: dict[str, Any], backend: str = "triton") -> None:
    module = spec.module(backend)
    node = Node(spec, "far", module.forward, module.backward if spec.grads else None)
    want, got = (
        [*ran(spec, node, a, 0), *(a[name] for name in spec.mutates if a[name] is not None)] for a in (args, others)
    )
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w.double(), rtol=1e-6, atol=1e-6, equal_nan=True)


def points() -> list[Any]:
    """For each op and each dim but the last, the case in which most tensors have three or more of that dim, and the
    smallest of these."""
    found: dict[tuple[str, int], tuple[int, int, Case]] = {}
    for spec in TRITON:
        for case in [c for c in small(spec) if supported(spec, "triton", c)]:
            args = spec.inputs(case, Ones(spec.name, case.name, 0))
            shapes = [v.shape for v in args.values() if isinstance(v, torch.Tensor)]
            size, there = sum(s.numel() for s in shapes), [d for s in shapes for d, n in enumerate(s[:-1]) if n > 2]
            for dim in set(there):
                best = found.get((spec.name, dim))
                if size and (best is None or (-there.count(dim), size) < best[:2]):
                    found[spec.name, dim] = -there.count(dim), size, case
    return [
        pytest.param(SPECS[op], dim, case, id=f"{op}-{dim}", marks=pytest.mark.slow if i % 2 else ())
        for i, ((op, dim), (_, _, case)) in enumerate(found.items())
    ]


def survives(work: Callable[[], None]) -> None:
    """Run `work` in a child process, which a read of other memory ends by a signal."""

    def run() -> Verdict:
        work()
        return Verdict("survived")

    verdict = in_child(run)
    assert verdict.outcome == "survived", verdict.detail


@pytest.mark.parametrize("spec, dim, case", points())
def test_offsets_past_2_31(spec: OpSpec, dim: int, case: Case) -> None:
    args = drawn(spec, case, torch.float16, "packed", 0)
    names = [k for k, v in args.items() if isinstance(v, torch.Tensor) and v.ndim > dim + 1 and v.shape[dim] > 2]
    others = args | {n: far(args[n], dim).requires_grad_(args[n].requires_grad) for n in names}
    survives(lambda: compared(spec, args, others))


def fenced(x: torch.Tensor, end: bool) -> torch.Tensor:
    """A copy that begins right after a page that cannot be read, or ends right before it."""
    page, size = mmap.PAGESIZE, -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = reserved(size + page, torch.uint8)
    fence, first = (size, size - x.nbytes) if end else (0, page)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(memory.data_ptr() + fence), ctypes.c_size_t(page), NONE) == 0
    return memory[first : first + x.nbytes].view(x.dtype).view(x.shape).copy_(x.detach())


COMPILED = (
    "paged_attention",
    "mla_attention",
    "int4_matmul",
    "attention",
    "linear_cross_entropy_loss",
)  # C++ or raw memory
BESIDE = [
    pytest.param(spec, backend, id=f"{spec.name}-{backend}", marks=pytest.mark.slow if i % 2 else ())
    for i, (spec, backend) in enumerate([*((s, "triton") for s in TRITON), *((SPECS[n], "torch") for n in COMPILED)])
]


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect of Linux")
@pytest.mark.parametrize("spec, backend", BESIDE)
def test_nothing_beside_a_tensor_is_read(spec: OpSpec, backend: str) -> None:
    """The last elements of rows and blocks that are not full, at the end of the memory; the first ones at its start."""

    def work() -> None:
        args = drawn(spec, spec.cases[1], torch.float32 if backend == "torch" else torch.float16, "packed", 0)
        tensors = {k: v for k, v in args.items() if isinstance(v, torch.Tensor) and v.numel()}
        for end in (True, False):
            others = {k: fenced(v, end).requires_grad_(v.requires_grad) for k, v in tensors.items()}
            compared(spec, args, args | others, backend)

    survives(work)
