"""A task from a TOML file, which gives the data file and the prompt template.

    name = "capitals"
    kind = "choice"                          # choice, generation or loss
    data = "capitals.jsonl"                  # JSON lines, .json or Parquet, relative to this file
    prompt = "The capital of {{ country }} is"
    choices = "{{ cities }}"                 # a field with a list; or a list of templates
    answer = "{{ label }}"                   # a number from 0, the text of the choice, or a letter

Templates are Jinja over the fields of a row; a missing field raises an error with file and line. Optional keys:
`limits`, `metric`, `cluster`, `id`, `few_shot`, `delimiter`, `normalization`, `chat`; of a generation task
`max_tokens`, `temperature`, `samples`, `stop`, `k`, `extract` (a regular expression applied to both answers); with a
judge (judge.py) `judge`, its prompt, and `judge_best`, and then `answer` may be left out.
"""

import re
import string
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nativetypes
import jinja2.sandbox

from bagu.data.json_rows import Row, json_rows
from bagu.data.table import parquet_rows
from bagu.errors import UnknownName
from bagu.eval.grades import exact_match
from bagu.eval.judge import Judge, judged_by
from bagu.eval.model import Decoding
from bagu.eval.task import NORMALIZATIONS, Item, Task, TaskError

KINDS = ("choice", "generation", "loss")
TEXT, NUMBER = (str,), (int, float)
KEYS: dict[str, tuple[type, ...]] = {  # and the types of their values; the members of a list are in MEMBERS
    "name": TEXT, "kind": TEXT, "data": TEXT, "prompt": TEXT, "choices": (str, list), "answer": TEXT, "limits": TEXT,
    "metric": TEXT, "cluster": TEXT, "id": TEXT, "few_shot": (int,), "delimiter": TEXT, "normalization": TEXT,
    "chat": (bool,), "max_tokens": (int,), "temperature": NUMBER, "samples": (int,), "stop": (list,), "k": (list,),
    "extract": TEXT, "judge": TEXT, "judge_best": NUMBER,
}  # fmt: skip
OF_KIND = {  # keys that have an effect on one kind of task only
    "choices": "choice",
    "normalization": "choice",
    "max_tokens": "generation",
    "temperature": "generation",
    "samples": "generation",
    "stop": "generation",
    "k": "generation",
    "extract": "generation",
    "judge": "generation",
    "judge_best": "generation",
}
MEMBERS: dict[str, type] = {"choices": str, "stop": str, "k": int}


def _value(values: Iterable[Any]) -> Any:
    """The value of a template that is one expression, else the text of its parts."""
    found = list(values)
    return found[0] if len(found) == 1 else "".join(map(str, found))


def _not_null(value: Any) -> Any:
    """Jinja would write a null of the data as "None"."""
    if value is None:
        raise jinja2.UndefinedError("a value of the template is null")
    return value


class _Native(jinja2.sandbox.SandboxedEnvironment, jinja2.nativetypes.NativeEnvironment):
    """Templates that may give a list or a number. Text stays text; Jinja's own `concat` would read "2" as a number, and
    the answer "2" would be the index 2 instead of the choice "2"."""

    concat = staticmethod(_value)


class _NativeTemplate(jinja2.nativetypes.NativeTemplate):
    environment_class = _Native


_Native.template_class = _NativeTemplate
_TEXT = jinja2.sandbox.SandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_not_null
)
_VALUE = _Native(undefined=jinja2.StrictUndefined)


def read_task(path: Path, judge: Judge | None = None) -> Task:
    """The task that a file describes. A task with a judge's prompt needs `judge`."""
    table = _table(path)
    kind = table["kind"]
    fields: dict[str, Any] = {
        key: table[key] for key in ("metric", "few_shot", "delimiter", "normalization", "chat") if key in table
    }
    if kind == "generation":
        fields["decoding"] = Decoding(
            max_tokens=table.get("max_tokens", 256),
            temperature=table.get("temperature", 0.0),
            samples=table.get("samples", 1),
            stop=tuple(table.get("stop", ())),
        )
        fields |= _judged(path, table, judge) if "judge" in table else _matched(table.get("extract"))
        fields["k"] = tuple(table.get("k", (1,)))
    if kind != "loss":
        fields["example"] = _example(table)
    return Task(
        name=table["name"],
        kind=kind,
        limits=table.get("limits", "The task's author states none."),
        items=lambda: _items(path, table),
        **fields,
    )


def _matched(pattern: str | None) -> dict[str, Any]:
    """The fields of a Task whose answers are compared with the right one."""
    return {"grade": exact_match(pattern=pattern), "judged": pattern or ""}


def _judged(path: Path, table: Mapping[str, Any], judge: Judge | None) -> dict[str, Any]:
    """The fields of a Task whose answers a judge grades."""
    if judge is None:
        raise TaskError(f"{path}: this task's answers are graded by a judge", hint="name one: --judge URL_OR_PATH")
    best = table.get("judge_best", 10)
    if isinstance(best, bool) or not isinstance(best, int | float) or not best > 0:
        raise TaskError(f"{path}: judge_best is {best!r}", hint="the best grade is a number above 0")

    def question(item: Item, response: str) -> str:
        return str(_renderer(item.place, {**item.facts, "response": response})(table["judge"]))

    return {"judge": judged_by(judge, question, best=best), "judged": f"{judge.name}: {table['judge']}"}


def read_rows_of(path: Path) -> Iterator[Row]:
    """The rows of a data file (JSON lines, .json, Parquet) or of all such files of a folder and its sub-folders."""
    found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if not found:
        raise TaskError(f"there is no data at {path}", hint="name a file or a folder of JSON lines or Parquet")
    for file in found:
        name = file.name if file == path else file.relative_to(path).as_posix()
        if file.suffix == ".parquet":
            yield from parquet_rows([(name, file)])
        elif file.name.removesuffix(".gz").endswith((".jsonl", ".json", ".ndjson")):
            yield from json_rows([(name, file)])
        elif file == path:
            raise TaskError(f"{path} is neither JSON lines, .json nor Parquet")


def _table(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"the task file {path} cannot be read: {error.strerror}", hint="check the path") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"{path}: not TOML: {error}", hint="docs/eval.md shows a task file") from error
    for key in table:
        if key not in KEYS:
            raise UnknownName.among("task key", key, KEYS, within=f"{path}: ")
        _check_type(path, key, table[key])
    needed = ["name", "kind", "data", "prompt", *(["choices", "answer"] if table.get("kind") == "choice" else [])]
    needed += ["answer"] if table.get("kind") == "generation" and "judge" not in table else []
    for key in needed:
        if key not in table:
            raise TaskError(f"{path}: the key {key!r} is missing", hint=f"a task has {', '.join(needed)}")
    UnknownName.check("kind of task", table["kind"], KINDS)
    _refuse_idle_keys(path, table)
    if not re.fullmatch(r"\w[\w.-]*", table["name"]):  # the name of a folder of results
        raise TaskError(f"{path}: name is {table['name']!r}", hint="use letters, digits, `-`, `_` and `.`")
    if table.get("normalization", "raw") not in NORMALIZATIONS:
        raise UnknownName.among("normalization", table["normalization"], NORMALIZATIONS)
    return table


def _refuse_idle_keys(path: Path, table: Mapping[str, Any]) -> None:
    """Raise for a key that would have no effect."""
    kind, judged = table["kind"], "judge" in table
    idle = [(key, f"on a task of kind {kind!r}") for key in table if OF_KIND.get(key, kind) != kind]
    idle += [("judge_best", "without judge")] if "judge_best" in table and not judged else []
    idle += [("extract", "with judge")] if "extract" in table and judged else []
    if idle:
        raise TaskError(f"{path}: {idle[0][0]} has no effect {idle[0][1]}", hint="leave it out")


def _check_type(path: Path, key: str, value: Any) -> None:
    def fits(found: Any, types: tuple[type, ...]) -> bool:
        return isinstance(found, types) and (bool in types or not isinstance(found, bool))

    types, of = KEYS[key], MEMBERS.get(key, object)
    if not fits(value, types) or (isinstance(value, list) and not all(fits(member, (of,)) for member in value)):
        names = " or ".join(f"list of {of.__name__}" if t is list else t.__name__ for t in types)
        raise TaskError(f"{path}: {key} is {value!r}", hint=f"it must be {names}")


def _items(path: Path, table: Mapping[str, Any]) -> Iterator[Item]:
    for row in read_rows_of(path.parent / table["data"]):
        place, fields = row.place, row.fields
        render = _renderer(place, fields)
        choices: tuple[str, ...] = ()
        answer: int | str | None = None
        if table["kind"] == "choice":
            choices = _choices(table["choices"], render, place)
            answer = _number(render(table["answer"], native=True), choices)
        elif "answer" in table:
            answer = str(render(table["answer"]))
        prompt = render(table["prompt"])
        yield Item(
            id=str(render(table["id"])) if "id" in table else row.id,
            prompt="" if table.get("chat") else prompt,
            messages=({"role": "user", "content": prompt},) if table.get("chat") else (),
            choices=choices,
            answer=answer,
            place=place,
            facts=fields if "judge" in table else {},
            cluster=str(render(table["cluster"])) if "cluster" in table else None,
        )


def _renderer(place: str, fields: Mapping[str, Any]) -> Callable[..., Any]:
    def render(template: str, *, native: bool = False) -> Any:
        try:
            return (_VALUE if native else _TEXT).from_string(template).render(**fields)
        except jinja2.UndefinedError as error:
            raise TaskError(f"{place}: {error.message}", hint=f"found {', '.join(fields)}") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TaskError(f"{place}: the template {template!r} fails: {error}") from error

    return render


def _choices(wanted: str | list[str], render: Callable[..., Any], place: str) -> tuple[str, ...]:
    if isinstance(wanted, list):
        return tuple(render(template) for template in wanted)
    found = render(wanted, native=True)
    if not isinstance(found, list | tuple):
        raise TaskError(f"{place}: the choices are a {type(found).__name__}, expected a list")
    if None in found:
        raise TaskError(f"{place}: a choice is null")
    return tuple(str(choice) for choice in found)


def _number(answer: Any, choices: tuple[str, ...]) -> int | str | None:
    """The index of the choice that an answer names by number from 0, letter or text; else the (invalid) answer."""
    if isinstance(answer, bool) or answer is None:
        return str(answer)
    if isinstance(answer, int):
        return answer
    text = str(answer).strip()
    if text in choices:
        return choices.index(text)
    if text.isdecimal():
        return int(text)
    return (
        string.ascii_uppercase.index(text.upper())
        if len(text) == 1 and text.upper().isascii() and text.isalpha()
        else text
    )


def _example(table: Mapping[str, Any]) -> Callable[[Item], str]:
    delimiter = table.get("delimiter", " ")

    def example(item: Item) -> str:
        answer = item.choices[item.answer] if isinstance(item.answer, int) and item.choices else str(item.answer)
        return item.prompt + delimiter + answer

    return example
