"""The documents of the task `lookup`, and what to train on: texts and chats with passages as a search shows them.

Both come from bagu/data/facts.py. What is trained on has other names and values than the documents.
"""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from bagu.config import write_atomic
from bagu.data.facts import Entry, Fact, held_out, training
from bagu.retrieve.prompt import with_passages

NOTES, CHATS = 6_000, 3_000
QUESTIONS = 4  # the most after the passages of a note


def write_facts(out: Path, seed: int = 0) -> None:
    """Write docs/*.txt, notes.jsonl and chats.jsonl: the documents of `lookup`, and what to train on."""
    files: dict[str, list[str]] = {}
    for entry in held_out():
        files.setdefault(entry.file, []).append(entry.text)
    (out / "docs").mkdir(parents=True, exist_ok=True)
    for name, texts in files.items():
        write_atomic(out / "docs" / name, "\n\n".join(texts) + "\n")
    rows = iter(training(seed))
    notes = [json.dumps({"text": _note(*row)}) for row in islice(rows, NOTES)]
    write_atomic(out / "notes.jsonl", "\n".join(notes) + "\n")
    chats = [json.dumps({"messages": _chat(*row)}) for row in islice(rows, CHATS)]
    write_atomic(out / "chats.jsonl", "\n".join(chats) + "\n")


def _pairs(asked: Sequence[tuple[int, Fact]]) -> list[tuple[str, str]]:
    """Questions and answers; a passage is cited by its number in the prompt."""
    return [(fact.question, f"{fact.sentence} [{place + 1}].") for place, fact in asked]


def _note(entries: Sequence[Entry], asked: Sequence[tuple[int, Fact]]) -> str:
    (question, answer), *rest = _pairs(asked[:QUESTIONS])
    more = (f"\n\nQuestion: {q}\nAnswer: {a}" for q, a in rest)
    return f"{with_passages(question, entries)}\nAnswer: {answer}{''.join(more)}"


def _chat(entries: Sequence[Entry], asked: Sequence[tuple[int, Fact]]) -> list[dict[str, str]]:
    question, answer = _pairs(asked[:1])[0]
    return [
        {"role": "user", "content": with_passages(question, entries)},
        {"role": "assistant", "content": answer},
    ]
