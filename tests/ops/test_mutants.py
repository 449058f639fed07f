"""A bug planted in any backend fails conformance. Some of each kind here; all of them in `make test-full`."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.ops import sources
from tests.ops.equivalent import EQUIVALENT
from tests.ops.mutants import Mutant, mutants, verdict

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="bugs are planted for the interpreter")
# what runs on a GPU alone, or not on every CPU
ELSEWHERE = (
    "attention.cuda", "paged_attention.cuda", "paged_attention.compiled", "linear_cross_entropy.cpu_gemm",
    "mla_attention.hopper_kernel", "conv2d.hopper_kernel", "int8_attention.hopper_kernel",
)  # fmt: skip


@cache
def modules() -> list[tuple[str, str]]:
    """(backend, module) of what bugs are planted in. Finding them takes 1.8 s."""
    return [
        (backend, module) for backend in ("triton", "torch") for module in sources.modules(backend)
        if not module.endswith(ELSEWHERE) and any(True for _ in mutants(backend, module))
    ]  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The modules, unless the slow test that needs them is left out: every worker collects this file."""
    if metafunc.function is test_every_planted_bug_fails_a_comparison:
        wanted = "not slow" not in metafunc.config.option.markexpr
        metafunc.parametrize("backend, module", [
            pytest.param(backend, module, id=f"{module.removeprefix('bagu.ops.')}-{backend}")
            for backend, module in (modules() if wanted else [])
        ])  # fmt: skip


QUICK = [  # (backend, module, kind): of these the last one, since the kernels at a file's end are the backward's
    pytest.param(backend, f"bagu.ops.{module}", kind, id=f"{module}-{backend}-{kind}")
    for backend, module, kind in (
        ("triton", "attention.backward_kernels", "one trip"),
        ("triton", "batch_norm.tiling", "packed"),
        ("triton", "dequantize_int8.triton_backend", "short"),
        ("triton", "int4_matmul.int4_kernels", "one trip"),
        ("triton", "int8_attention.key_kernels", "one trip"),
        ("triton", "kernels.gemm", "one trip"),
        ("triton", "rope.triton_backend", "default"),
        ("triton", "rope.triton_backend", "zero"),
        ("triton", "transpose.triton_backend", "short"),
        ("torch", "cross_entropy.torch_backend", "default"),
    )
]  # fmt: skip


def planted(backend: str, module: str) -> list[Mutant]:
    return [m for m in mutants(backend, module) if str(m) not in EQUIVALENT]


def not_caught(chosen: list[Mutant]) -> list[str]:
    """The mutants that no comparison caught: those that survived, and those that ended in another error."""
    verdicts = [(m, verdict(m)) for m in chosen]
    return [f"{v.outcome}: {m} {v.detail}" for m, v in verdicts if v.outcome != "caught"]


@pytest.mark.parametrize("backend, module, kind", QUICK)
def test_a_planted_bug_fails_a_comparison(backend: str, module: str, kind: str) -> None:
    assert not_caught([[m for m in planted(backend, module) if m.kind == kind][-1]]) == []


@pytest.mark.slow
def test_every_planted_bug_fails_a_comparison(backend: str, module: str) -> None:
    assert not_caught(planted(backend, module)) == []


def test_what_is_listed_as_equivalent_is_still_there() -> None:
    there = {str(m) for at in modules() for m in mutants(*at)}
    assert sorted(set(EQUIVALENT) - there) == []
