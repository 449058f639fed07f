"""Grades for generated answers: equal text, text matched by a pattern, code that runs. (judge.py: another model.)"""

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bagu.data.stdlib import parsed
from bagu.eval.model import Model
from bagu.eval.task import Grade, Item, Task, TaskError
from bagu.machine.sandbox import Sandbox, SandboxUnavailable

DOCTESTS = """
import doctest as _doctest
_found = _doctest.DocTestFinder().find({name}, {name!r}, globs=dict(globals()))
_runner = _doctest.DocTestRunner(verbose=False)
for _test in _found:
    _runner.run(_test)
assert _runner.failures == 0
"""


def each(grade: Callable[[Item, str], float]) -> Grade:
    """A grade of all answers from a grade of one."""
    return lambda items, texts: [[grade(item, t) for t in answers] for item, answers in zip(items, texts, strict=True)]


def exact_match(*, pattern: str | None = None, ignore_case: bool = False) -> Grade:
    """1 if the answer equals the item's. With `pattern`, the last matches in both are compared (the first group, if
    there is one). White space at the ends and commas inside numbers are ignored."""
    try:
        expression = None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise TaskError(f"the pattern {pattern!r} is no regular expression: {error}") from error

    def found(text: str) -> str | None:
        if expression is not None:
            group = 1 if expression.groups else 0
            matches = [match[group] for match in expression.finditer(text) if match[group] is not None]
            if not matches:
                return None
            text = matches[-1]
        text = re.sub(r"(?<=\d),(?=\d{3})", "", text.strip())
        return text.casefold() if ignore_case else text

    def grade(item: Item, text: str) -> float:
        wanted = found(str(item.answer))
        return float(wanted is not None and found(text) == wanted)

    return each(grade)


def first_code(text: str) -> str:
    """The code of an answer: the first fenced block if there is one, else the whole answer."""
    block = re.search(r"```(?:python|py)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return block[1] if block else text


def parses(text: str) -> bool:
    """Whether a text is Python with at least one statement."""
    tree = parsed(text)
    return tree is not None and bool(tree.body)


def run_to_end(sandbox: Sandbox, programs: Iterable[str]) -> list[bool]:
    """Whether each program runs to its end without an error. A program that exits before its end has failed: model
    code could otherwise end the tests that follow it with `sys.exit()`."""
    token = secrets.token_hex(8)
    ended = sandbox.run_all(f"{program}\nprint({token!r})" for program in programs)
    return [result.status == "ok" and result.stdout.rstrip().endswith(token) for result in ended]


def doctest_program(code: str, name: str, docstring: str | None = None) -> str:
    """A program that runs the doctests of the function `name` in `code`: of its own docstring, or of the given one."""
    given = "" if docstring is None else f"\n{name}.__doc__ = {docstring!r}"
    return f"{code}{given}{DOCTESTS.format(name=name)}"


def program_grade(program: Callable[[Item, str], str]) -> Grade:
    """1 if `program(item, answer)` runs to its end in the sandbox without an error. Raises SandboxUnavailable if there
    is no sandbox."""

    def grade(items: Sequence[Item], texts: Sequence[Sequence[str]]) -> list[list[float]]:
        programs = [program(item, text) for item, answers in zip(items, texts, strict=True) for text in answers]
        valid = [parses(code) for code in programs]  # code that does not parse needs no process
        with Sandbox() as sandbox:
            ended = iter(run_to_end(sandbox, [code for code, runs in zip(programs, valid, strict=True) if runs]))
        grades = iter([float(runs and next(ended)) for runs in valid])
        return [[next(grades) for _ in answers] for answers in texts]

    return grade


def code_grade(program: Callable[[Item, str], str], *, only_parse: Callable[[], None]) -> Grade:
    """`program_grade`; without a sandbox, calls `only_parse` and grades whether the program parses."""
    run = program_grade(program)

    def grade(items: Sequence[Item], texts: Sequence[Sequence[str]]) -> list[list[float]]:
        try:
            return run(items, texts)
        except SandboxUnavailable:
            only_parse()
            return each(lambda item, text: float(parses(program(item, text))))(items, texts)

    return grade


def generate_answers(model: Model, task: Task, items: Sequence[Item], prefix: str) -> list[dict[str, Any]]:
    """For each item the answers and their grades, 0 to 1, or None where a judge gave none."""
    prompts = []
    for item in items:
        ids = model.encode_chat(item.messages) if task.chat else model.encode(prefix + item.prompt)
        if not ids:
            raise TaskError(f"{task.where(item)}: the prompt is empty", hint="a generation needs a token to start from")
        if len(ids) + task.decoding.max_tokens > model.max_len:
            raise TaskError(
                f"{task.where(item)}: the prompt has {len(ids)} tokens and the answer up to "
                f"{task.decoding.max_tokens}, and the model takes {model.max_len}",
                hint="use fewer examples (--few-shot), or a model with a longer context",
            )
        prompts.append(ids)
    chats = [item.messages for item in items]
    texts = model.generate_chat(chats, task.decoding) if task.chat else model.generate(prompts, task.decoding)
    if task.judge is not None:
        verdicts = task.judge(items, texts)
        return [
            {"answers": list(t), "grades": [v.grade for v in vs], "judgements": [v.text for v in vs]}
            for t, vs in zip(texts, verdicts, strict=True)
        ]
    assert task.grade is not None, "Task refuses a generation task without one"
    rows = [{"answers": list(t), "grades": g} for t, g in zip(texts, task.grade(items, texts), strict=True)]
    for name, measure in task.measures.items():
        for row, values in zip(rows, measure(items, texts), strict=True):
            row[name] = values
    return rows
