"""A bug planted in any kernel fails conformance. One of each kind per op here; all of them in `make test-full`."""

from __future__ import annotations

import pytest
import torch

from bagu.ops.catalogue import SPECS
from bagu.ops.core import OpSpec
from tests.ops.mutants import EQUIVALENT, Mutant, _source, mutants, survives

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="bugs are planted for the interpreter")
TRITON = [pytest.param(s, id=s.name) for s in SPECS.values() if "triton" in s.backends]


def planted(spec: OpSpec) -> list[Mutant]:
    found = [m for m in mutants(spec) if (spec.name, str(m)) not in EQUIVALENT]
    assert found, f"{spec.name} has no kernel to plant a bug in"
    return found


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


def test_the_unchanged_kernels_survive() -> None:
    spec, module = SPECS["swiglu"], "bagu.ops.gated_kernels"
    assert survives(spec, Mutant("none", "", "", module, _source(module)))
