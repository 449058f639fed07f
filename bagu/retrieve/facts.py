"""The documents of the task `lookup`, and chats to train on, with passages as a search shows them.

Both come from bagu/data/facts.py. What is trained on has other names and values than the documents.
"""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from bagu.config import write_atomic
from bagu.data.facts import Entry, Fact, held_out, training
from bagu.retrieve.prompt import with_passages

CHATS = 24_000
QUESTIONS = 4  # the most of a chat, after the passages of the first: more to learn from each token that is read


def write_facts(out: Path, seed: int = 0) -> None:
    """Write docs/*.txt and chats.jsonl: the documents of `lookup`, and what to train on."""
    files: dict[str, list[str]] = {}
    for entry in held_out():
        files.setdefault(entry.file, []).append(entry.text)
    (out / "docs").mkdir(parents=True, exist_ok=True)
    for name, texts in files.items():
        write_atomic(out / "docs" / name, "\n\n".join(texts) + "\n")
    chats = [json.dumps({"messages": _chat(*row)}) for row in islice(training(seed), CHATS)]
    write_atomic(out / "chats.jsonl", "\n".join(chats) + "\n")


def _chat(entries: Sequence[Entry], asked: Sequence[tuple[int, Fact]]) -> list[dict[str, str]]:
    """Questions and answers; a passage is cited by its number in the prompt."""
    messages = []
    for number, (place, fact) in enumerate(asked[:QUESTIONS]):
        question = fact.question if number else with_passages(fact.question, entries)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": f"{fact.sentence} [{place + 1}]."})
    return messages
