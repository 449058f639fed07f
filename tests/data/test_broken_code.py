"""Broken versions of a function differ from it in one way, and are the same each time."""

from __future__ import annotations

import ast
import itertools

import pytest

from bagu.data.broken_code import KINDS, SYNTAX_ERRORS, Broken, broken
from bagu.data.stdlib import StdlibSource, documented_functions, parsed

CODE = """\
def scale(values, factor, limit=10):
    # "(" in a comment, and in a string: no bracket of the code
    total = 0
    for value in values:
        if value < limit and value != "(é":
            total += value * factor
    print(total)
    return total + 1"""
OTHER = "def other(self):\n    self.count = 3\n    return self.count"


def all_broken(code: str) -> dict[str, set[str]]:
    """The results of many seeds by kind."""
    found: dict[str, set[str]] = {}
    for seed in range(200):
        result = broken(code, others=[OTHER], seed=seed)
        assert isinstance(result, Broken)
        found.setdefault(result.kind, set()).add(result.code)
    return found


def test_every_kind_of_breakage_occurs_and_changes_the_code() -> None:
    found = all_broken(CODE)
    assert found.keys() == KINDS.keys()
    own = ast.dump(ast.parse(CODE))
    for kind, codes in found.items():
        for code in codes:
            tree = parsed(code)
            assert (tree is None) == (kind in SYNTAX_ERRORS), (kind, code)
            assert tree is None or ast.dump(tree) != own
            assert code.startswith("def scale(values, factor, limit=10):\n"), "the name and arguments stay"
    start = CODE[: CODE.index("    total = 0")]
    assert found["other_body"] == {f"{start}    self.count = 3\n    return self.count"}
    assert CODE.replace("value < limit", "value <= limit") in found["change_operator"]
    assert CODE.replace("    print(total)\n", "") in found["drop_statement"]
    assert CODE.replace("total = 0", "total = 1") in found["change_constant"]
    assert CODE.replace("print(total)", "print(factor)") in found["swap_names"]
    assert CODE.replace("\n    return total + 1", "") in found["cut_end"]
    assert found["drop_bracket"] == {CODE.replace("print(total)", "print(total")}


def test_the_result_is_a_function_of_code_and_seed() -> None:
    first = [broken(CODE, others=[OTHER], seed=seed) for seed in range(5)]
    assert first == [broken(CODE, others=[OTHER], seed=seed) for seed in range(5)]
    assert len(set(first)) > 1


@pytest.mark.parametrize("code", ["def f(self):\n    pass", "x = 1", "def f(:"])
def test_what_cannot_be_broken_gives_none(code: str) -> None:
    assert broken(code) is None


def test_functions_of_the_standard_library_can_be_broken() -> None:
    functions = list(itertools.islice(documented_functions(StdlibSource().documents()), 120))
    codes = [function.answer for function in functions]
    results = [broken(code, others=codes[max(i - 2, 0) : i]) for i, code in enumerate(codes)]
    made = [result for result in results if result is not None]
    assert len(made) > 0.9 * len(codes) and {result.kind for result in made} == KINDS.keys()
