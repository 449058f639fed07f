"""A bug planted in any kernel fails conformance. One of each kind per op here; all of them in `make test-full`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagu.ops.catalogue import SPECS
from bagu.ops.core import OpSpec
from tests.ops.mutants import EQUIVALENT, Mutant, mutants, survives

TRITON = [pytest.param(s, id=s.name) for s in SPECS.values() if "triton" in s.backends]
SOURCES = Path(__file__).parents[2] / "bagu" / "ops"


def planted(spec: OpSpec) -> list[Mutant]:
    return [
        m
        for m in mutants((SOURCES / spec.name / "triton_backend.py").read_text())
        if (spec.name, str(m)) not in EQUIVALENT
    ]


def survivors(spec: OpSpec, chosen: list[Mutant]) -> list[str]:
    return [str(m) for m in chosen if survives(spec, m)]


@pytest.mark.parametrize("spec", TRITON)
def test_planted_bugs_fail_conformance(spec: OpSpec) -> None:
    """The last of each kind: the kernels at a file's end are the backward's. Wide rows are slow to interpret."""
    by_kind = {m.kind: m for m in planted(spec) if "wide" not in m.kernel}
    assert survivors(spec, list(by_kind.values())) == []


@pytest.mark.slow
@pytest.mark.parametrize("spec", TRITON)
def test_every_planted_bug_fails_conformance(spec: OpSpec) -> None:
    assert survivors(spec, planted(spec)) == []


def test_the_unchanged_kernel_survives() -> None:
    spec = SPECS["rms_norm"]
    source = (SOURCES / "rms_norm" / "triton_backend.py").read_text()
    assert survives(spec, Mutant("none", "", "", source))
