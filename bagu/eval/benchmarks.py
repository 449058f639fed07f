"""Public benchmarks from the user's files: `bagu eval MODEL mmlu=path/to/files`.

Each reader takes the usual JSON lines or Parquet files of its data set, as on the Hugging Face hub, and uses the usual
prompt: MMLU and C-Eval score the letter, ARC and HellaSwag the text of the choice, and GSM8K and HumanEval grade a
generated answer. The data are not part of bagu.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bagu.errors import UnknownName
from bagu.eval.files import read_rows_of
from bagu.eval.grades import exact_match, first_code, program_grade
from bagu.eval.model import Decoding
from bagu.eval.task import Item, Task, TaskError

Fields = Mapping[str, Any]
LETTERS = "ABCDEFGHIJ"
NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"  # a comma after it ("42, so") is not part of it
SEEN = "A public set: a model may have seen it."


def benchmark(name: str, path: Path) -> Task:
    UnknownName.check("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name](path)


def _items(path: Path, make: Callable[[Fields], dict[str, Any]]) -> Iterator[Item]:
    for row in read_rows_of(path):
        try:
            made = make(row.fields)
        except KeyError as error:
            raise TaskError(f"{row.place}: there is no field {error}", hint=f"found {row.found}") from error
        except (TypeError, ValueError, IndexError) as error:
            raise TaskError(f"{row.place}: {error}") from error
        yield Item(**({"id": row.id} | made), place=row.place)


def _text(row: Fields, name: str) -> str:
    """A field of text. A null in it would be asked as "None"."""
    if not isinstance(row[name], str):
        raise ValueError(f"field {name!r} is a {type(row[name]).__name__}, not text")
    return row[name]


def _cluster(row: Fields, name: str) -> str | None:
    """What the item shares with others, if the file says so."""
    return None if row.get(name) is None else str(row[name])


def _options(values: Iterable[Any]) -> list[str]:
    """The choices of a question; some files have numbers."""
    if isinstance(values, str):  # its characters would be the choices
        raise ValueError("the choices are a text, not a list")
    found = list(values)
    for value in found:
        if not isinstance(value, str | int | float):
            raise ValueError(f"a choice is a {type(value).__name__}, not text")
    return list(map(str, found))


def _index_of(answer: str, letters: str) -> int:
    """The index of the right letter. `letters.index` would find the empty answer of a test split at 0."""
    if answer not in tuple(letters):
        raise ValueError(f"the answer {answer!r} is none of {', '.join(letters)}")
    return letters.index(answer)


def _lettered(question: str, choices: list[str]) -> str:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question.strip(), *lines, "Answer:"])


def _letter_task(name: str, path: Path, make: Callable[[Fields], dict[str, Any]]) -> Task:
    return Task(
        name=name,
        kind="choice",
        items=lambda: _items(path, make),
        limits=f"Chance is 25 %. {SEEN}",
        example=lambda item: f"{item.prompt} {item.choices[int(item.answer or 0)]}",
    )


def _text_task(name: str, path: Path, make: Callable[[Fields], dict[str, Any]]) -> Task:
    return Task(
        name=name,
        kind="choice",
        items=lambda: _items(path, make),
        limits=f"Chance is 25 %. {SEEN}",
        normalization="characters",
        example=lambda item: f"{item.prompt} {item.choices[int(item.answer or 0)]}",
    )


def mmlu(path: Path) -> Task:
    """question, choices[4], answer (0 to 3 or A to D), subject."""

    def make(row: Fields) -> dict[str, Any]:
        choices, answer = _options(row["choices"]), row["answer"]
        letters = LETTERS[: len(choices)]
        named = isinstance(answer, str) and not answer.isdecimal()
        number = _index_of(answer, letters) if named else int(answer)
        return {
            "prompt": _lettered(_text(row, "question"), choices),
            "choices": tuple(letters),
            "answer": number,
            "cluster": _cluster(row, "subject"),
        }

    return _letter_task("mmlu", path, make)


def ceval(path: Path) -> Task:
    """question, A, B, C, D, answer (a letter)."""

    def make(row: Fields) -> dict[str, Any]:
        lines = _lettered(_text(row, "question"), _options(row[c] for c in "ABCD"))
        prompt, answer = lines.removesuffix("Answer:") + "答案：", _index_of(_text(row, "answer"), "ABCD")
        return {"prompt": prompt, "choices": tuple("ABCD"), "answer": answer}

    return _letter_task("ceval", path, make)


def arc(path: Path) -> Task:
    """question, choices {text, label}, answerKey."""

    def make(row: Fields) -> dict[str, Any]:
        texts, labels = _options(row["choices"]["text"]), list(row["choices"]["label"])
        return {
            "prompt": f"Question: {_text(row, 'question')}\nAnswer:",
            "choices": tuple(texts),
            "answer": labels.index(row["answerKey"]),
        }

    return _text_task("arc", path, make)


def hellaswag(path: Path) -> Task:
    """ctx, endings[4], label, activity_label, source_id."""

    def clean(text: str) -> str:
        return re.sub(r"\s+", " ", re.sub(r"\[.*?\]", "", text)).strip()

    def make(row: Fields) -> dict[str, Any]:
        prompt = clean(f"{_text(row, 'activity_label')}: {_text(row, 'ctx')}")
        endings, cluster = map(clean, _options(row["endings"])), _cluster(row, "source_id")
        return {"prompt": prompt, "choices": tuple(endings), "answer": int(row["label"]), "cluster": cluster}

    return _text_task("hellaswag", path, make)


def gsm8k(path: Path) -> Task:
    """question, answer that ends in "#### 42"."""

    def make(row: Fields) -> dict[str, Any]:
        answer = _text(row, "answer")
        if re.search(NUMBER, answer) is None:
            raise ValueError(f"the answer {answer[-40:]!r} has no number")
        return {"prompt": f"Question: {_text(row, 'question')}\nAnswer:", "answer": answer}

    return Task(
        name="gsm8k",
        kind="generation",
        items=lambda: _items(path, make),
        limits=f"The last number counts. {SEEN}",
        example=lambda item: f"{item.prompt} {item.answer}",
        grade=exact_match(pattern=NUMBER),
        decoding=Decoding(max_tokens=256, stop=("\nQuestion:",)),
    )


def humaneval(path: Path) -> Task:
    """task_id, prompt, test, entry_point."""

    def make(row: Fields) -> dict[str, Any]:
        return {
            "id": str(row["task_id"]),
            "prompt": _text(row, "prompt"),
            "facts": {"test": _text(row, "test"), "name": _text(row, "entry_point")},
        }

    def program(item: Item, text: str) -> str:
        code = first_code(text)
        whole = code if f"def {item.facts['name']}" in code else item.prompt + code
        return f"{whole}\n{item.facts['test']}\ncheck({item.facts['name']})\n"

    return Task(
        name="humaneval",
        kind="generation",
        items=lambda: _items(path, make),
        grade=program_grade(program),
        metric="pass",
        limits=f"Runs the data set's own tests in the sandbox. {SEEN}",
        decoding=Decoding(max_tokens=384, stop=("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(")),
    )


BENCHMARKS: dict[str, Callable[[Path], Task]] = {
    "mmlu": mmlu,
    "ceval": ceval,
    "arc": arc,
    "hellaswag": hellaswag,
    "gsm8k": gsm8k,
    "humaneval": humaneval,
}
