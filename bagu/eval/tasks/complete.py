"""`complete`: write the body of a held-out function from its signature and docstring.

A completion is correct if it parses and defines the function. If the docstring has doctests that the real function
passes on its own, the completion must pass them too. Code runs in the sandbox; without one, only parsing is checked,
with a warning.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

from bagu.eval.grades import code_grade, doctest_program, parses
from bagu.eval.model import Decoding
from bagu.eval.task import Item, Task
from bagu.eval.tasks.library import PUBLIC, functions_with_docstring, held_out_modules, in_fair_order, room
from bagu.eval.tasks.signature import head_and_body

__all__ = ["complete", "cut_to_function"]

HEAD, TOKENS, ITEMS = 240, 96, 64


def complete(max_len: int) -> Task:
    head, tokens = room(max_len, HEAD, 0.55), min(TOKENS, int(0.4 * max_len))
    stops = ("\ndef ", "\nclass ", "\n@", "\nif __name__")
    return Task(
        name="complete", kind="generation", items=lambda: in_fair_order(_items(head))[:ITEMS], metric="pass",
        grade=code_grade(_program, only_parse=_warn), decoding=Decoding(max_tokens=tokens, stop=stops),
        limits=f"Without doctests a body that parses counts, whatever it does. {PUBLIC}",
    )  # fmt: skip


def _items(most: int) -> Iterator[Item]:
    for document, function, lines in functions_with_docstring(held_out_modules()):
        head, body = head_and_body(function, lines)
        if len(head) > most or not parses(f"{head}\n{body}") or [a.arg for a in function.args.args[:1]] == ["self"]:
            continue
        tested = ">>>" in (ast.get_docstring(function) or "")
        yield Item(
            id=f"{document.id}:{function.lineno}:{function.name}", prompt=head + "\n", answer=body, cluster=document.id,
            facts={"name": function.name, "doctest": tested},
        )  # fmt: skip


def cut_to_function(head: str, completion: str) -> str:
    """Head and completion up to the last line that still parses: a model may continue after the function's end."""
    lines = completion.split("\n")
    while lines and not parses(f"{head}\n" + "\n".join(lines)):
        lines.pop()
    return f"{head}\n" + "\n".join(lines)


def _program(item: Item, text: str) -> str:
    """The program that must run without an error. If the body does not parse, neither does the program."""
    indented = any(line.strip() for line in text.split("\n"))
    if not indented:
        return "raise SystemExit('there is no body')"
    code = cut_to_function(item.prompt.rstrip("\n"), text)
    if code.rstrip("\n") == item.prompt.rstrip("\n"):  # nothing of the completion parses
        return "raise SystemExit('the completion does not parse')"
    return doctest_program(code, item.facts["name"]) if item.facts["doctest"] else code


def _warn() -> None:
    warnings.warn(
        "this system permits no isolation of model-written code: `complete` scores parsing alone",
        RuntimeWarning,
        stacklevel=2,
    )
