"""`complete`: write the body of a held-out function from its signature and docstring.

A completion is correct if it parses and defines the function, and passes the doctests of the docstring if there are
any. Code runs in the sandbox; without one, only parsing is checked, with a warning. Functions whose real body does not
pass alone are left out: no completion could, if a default or a doctest reads a name of the module.
"""

import ast
import warnings
from collections.abc import Iterator, Sequence

from bagu.data.document import Document
from bagu.eval.grades import code_grade, doctest_program, parses
from bagu.eval.model import Decoding
from bagu.eval.task import Item, Task
from bagu.eval.tasks.library import PUBLIC, Modules, functions_with_docstring, held_out_modules, in_fair_order, room
from bagu.eval.tasks.signature import head_and_body

HEAD, TOKENS, ITEMS = 240, 96, 64


def complete(max_len: int, modules: Modules = held_out_modules) -> Task:
    head, tokens = room(max_len, HEAD, 0.55), min(TOKENS, int(0.4 * max_len))
    stops = ("\ndef ", "\nclass ", "\n@", "\nif __name__")
    grade = code_grade(_program, only_parse=_warn)

    def items() -> list[Item]:
        found = in_fair_order(_items(modules(), head))
        passed = grade(found, [[str(item.answer)] for item in found])
        return [item for item, (score,) in zip(found, passed, strict=True) if score][:ITEMS]

    return Task(
        name="complete",
        kind="generation",
        items=items,
        metric="pass",
        grade=grade,
        decoding=Decoding(max_tokens=tokens, stop=stops),
        limits=f"Without doctests a body that parses counts, whatever it does. {PUBLIC}",
    )


def _items(modules: Sequence[Document], most: int) -> Iterator[Item]:
    for document, function, lines in functions_with_docstring(modules):
        head, body = head_and_body(function, lines)
        if len(head) > most or not parses(f"{head}\n{body}") or [a.arg for a in function.args.args[:1]] == ["self"]:
            continue
        tested = ">>>" in (ast.get_docstring(function) or "")
        yield Item(
            id=f"{document.id}:{function.lineno}:{function.name}",
            prompt=head + "\n",
            answer=body,
            cluster=document.id,
            facts={"name": function.name, "doctest": tested},
        )


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
