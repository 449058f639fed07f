"""A method begins at its `def`: passages begin after the indentation, and a place before it is in none of them."""

from __future__ import annotations

from bagu.lab.retrieve.chunk_size import stripped

MODULE = 'class A:\n    def f(self):\n        """Doc."""\n        return 1\n\n    def g(self): return 2\n'


def test_functions_begin_where_the_passages_do() -> None:
    text, begins = stripped(MODULE)
    assert "Doc" not in text
    assert {line: text[at : at + 5] for line, at in begins.items()} == {2: "def f", 6: "def g"}
