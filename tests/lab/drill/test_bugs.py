"""`bagu drill bug`: bagu's own kernels as one file, with one edit that the grader sees."""

from __future__ import annotations

import ast
from itertools import islice

import pytest

from bagu.errors import ArgumentError
from bagu.lab.drill import bugs
from bagu.lab.drill.answers import Answers
from bagu.lab.drill.catalogue import drill, written
from bagu.lab.drill.grade import failed, grade, trials_of
from bagu.lab.drill.one_file import own_kernel

KERNELS = [name for name, d in written().items() if d.op and "triton" in d.levels]
WHOLE = [name for name in KERNELS if name not in bugs.SHORT]


@pytest.mark.parametrize("name", WHOLE)
def test_own_kernel_is_one_file(answers: Answers, name: str) -> None:
    source = own_kernel(drill(name))
    modules = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not any("bagu" in ast.unparse(n) for n in modules)
    opened: list[object] = []
    for trial in islice(trials_of(drill(name), "triton", 5), 1):
        assert failed(drill(name), "triton", trial, answers, opened, source, "own.py") is None  # type: ignore[arg-type]
    opened[0].close()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_own_kernel_gets_the_best_grade(answers: Answers, name: str) -> None:
    found = drill(name)
    graded = grade(found, own_kernel(found), "triton", seed=5, answers=answers)
    assert graded.letter == "A", [str(f) for f in graded.failures]


def test_a_file_with_a_bug_is_wrong(answers: Answers) -> None:
    given(answers, "swiglu", 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", KERNELS)
def test_every_file_with_a_bug_is_wrong(answers: Answers, name: str, seed: int) -> None:
    given(answers, name, seed)


def given(answers: Answers, name: str, seed: int) -> None:
    """The bug is wrong with another seed of the trials too, and its file without the bug differs in at most 3 lines."""
    found = drill(name)
    source = bugs.wrong(found, "triton", seed, answers)
    assert not grade(found, source, "triton", seed=100 + seed, answers=answers, stop=True).right
    assert bugs.changed_lines(found, source) == 0
    mended = f"{source.splitlines()[0]}\n{bugs.unplanted(found, 'triton')}"
    assert 1 <= (bugs.changed_lines(found, mended) or 0) <= bugs.MOST_LINES


def test_a_short_answer_is_named_as_one() -> None:
    assert bugs.default_level(drill("softmax")) == "triton" and bugs.default_level(drill("gae")) == "torch"
    assert "short answer" in bugs.described(drill("transpose"), "triton")
    assert "own kernel in one file" in bugs.described(drill("softmax"), "triton")
    assert bugs.unplanted(drill("transpose"), "triton") == drill("transpose").solutions["triton"]
    with pytest.raises(ArgumentError, match="no answer of bagu's in Python at level cuda"):
        bugs.unplanted(drill("softmax"), "cuda")


def test_two_definitions_of_one_name_get_two_names() -> None:
    """Both matmul's backend and its kernel for a few rows define `product`."""
    source = own_kernel(drill("matmul"))
    names = [n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    assert len(set(names)) == len(names) and {"product", "matmul_product", "matmul_forward", "forward"} <= set(names)
