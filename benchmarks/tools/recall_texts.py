"""Texts that teach a small model to look something up far behind: held-in source of the standard library, with lines
`river_code = 1234` planted in it, and for each, somewhere after it, three lines `assert river_code == 1234`.

They have the form of the task `recall` (bagu/eval/tasks/recall.py), whose names and modules are not used here. The
value of a name is drawn for each text, so the question can be answered only by reading the line. The distance between
both is log-uniform: near questions are learned first, and far ones by the same means. The values of planted lines are
no targets, because nothing predicts them. Training begins with short texts: in attention that is still even, a line has
eight times the weight among 1,024 tokens that it has among 8,192.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bagu.data import BpeTokenizer, StdlibSource
from bagu.eval.tasks.library import held_out_modules
from bagu.eval.tasks.recall import NAMES
from bagu.types import IGNORE, Batch

# After a character that is not whitespace a newline begins a new word of the tokenizer, so that tokens of lines that
# are cut there, and put between others, are those of the whole text.
BREAK = re.compile(r"(?<=\S)(?=\n)")
WORD = re.compile(r"[a-z]{3,9}")
ASKED = 3  # times that each value is asked for
GROUP = 9 * (1 + ASKED)  # tokens of a planted line and its questions, at most, in most texts
MOST = 64  # tokens of a text for each of them, at the highest density; the lowest is half of it
NEAREST = 8  # tokens of source between a line and its question, at least


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The tokens of the training modules, line by line, and of what is planted."""

    folder: Path
    tokenizer: BpeTokenizer
    tokens: np.ndarray  # [N] of all lines
    starts: np.ndarray  # [lines + 1]: where a line begins
    names: Sequence[tuple[np.ndarray, np.ndarray]]  # "\nriver_code =" and "\nassert river_code =="
    values: Sequence[np.ndarray]  # " 1000" to " 9999"

    @classmethod
    def make(cls, folder: Path, vocab_size: int, *, every: int = 1) -> Texts:
        """Of every n-th module; kept in `folder`, so that several processes need it once."""
        if not (folder / "texts.json").is_file():
            _write(folder, vocab_size, every)
        facts = json.loads((folder / "texts.json").read_text())
        tokenizer = BpeTokenizer.load(folder)
        encode = lambda texts: [np.array(ids, np.int32) for ids in tokenizer.encode_batch(texts)]  # noqa: E731
        planted = encode([f"\n{name}_code =" for name in facts["names"]])
        asked = encode([f"\nassert {name}_code ==" for name in facts["names"]])
        return cls(
            folder=folder, tokenizer=tokenizer,
            tokens=np.load(folder / "tokens.npy"), starts=np.load(folder / "starts.npy"),
            names=list(zip(planted, asked, strict=True)), values=encode([f" {n}" for n in range(1000, 10_000)]),
        )  # fmt: skip

    def text(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """`length` tokens. Those of the values of planted lines are -1 - token: they are no targets."""
        most = max(1, length // MOST)
        count = round(np.exp(rng.uniform(np.log(max(1, most / 2)), np.log(most))))
        room = max(length - GROUP * count // 2, 2 * NEAREST)
        distances = np.exp(rng.uniform(np.log(NEAREST), np.log(room), (ASKED, count))).astype(int)
        planted = (rng.random(count) * (room - distances.max(0))).astype(int)
        begin = int(rng.integers(np.searchsorted(self.starts, len(self.tokens) - length - 1, "right") - 1))
        names = rng.choice(len(self.names), count, replace=False)
        values = rng.integers(len(self.values), size=count)
        kinds = np.repeat((0, *[1] * ASKED), count)
        places = np.concatenate((planted, *(planted + distances)))
        lines = np.searchsorted(self.starts, self.starts[begin] + places)
        parts, line = [], begin
        for i in np.lexsort((kinds, lines)):
            at, which, value = lines[i], i % count, self.values[values[i % count]]
            parts += [self.tokens[self.starts[line] : self.starts[at]], self.names[names[which]][kinds[i]]]
            parts.append(value if kinds[i] else -1 - value)
            line = at
        parts.append(self.tokens[self.starts[line] : self.starts[line] + length])
        return np.concatenate(parts)[:length]

    @cached_property
    def held_out(self) -> np.ndarray:
        """The tokens of the held-out modules, with nothing planted."""
        kept, end = self.folder / "held_out.npy", [self.tokenizer.eos_id]
        if not kept.is_file():
            ids = self.tokenizer.encode_batch([d.text for d in held_out_modules()])
            np.save(kept, np.array([t for own in ids for t in own + end], np.int32))
        return np.load(kept)

    def batch(self, rows: np.ndarray) -> Batch:
        """Rows of length + 1 tokens as one batch."""
        count, length = rows.shape[0], rows.shape[1] - 1
        ids = tokens_of(rows)[:, :-1].reshape(-1).astype(np.int64)
        targets = np.where(rows < 0, IGNORE, rows)[:, 1:].reshape(-1).astype(np.int64)
        return Batch(
            ids=torch.from_numpy(ids), targets=torch.from_numpy(targets),
            positions=torch.arange(length).repeat(count), max_len=length,
            cu_seqlens=torch.arange(0, count * length + 1, length, dtype=torch.int32),
            num_targets=int((targets != IGNORE).sum()),
            target_bytes=int(self.tokenizer.token_bytes[targets[targets != IGNORE]].sum()),
        )  # fmt: skip

    def held_out_batches(self, length: int, texts: int, most: int) -> list[Batch]:
        """At most `most` rows of `length` tokens, evenly over the held-out modules."""
        count = min(most, (len(self.held_out) - 1) // length)
        step = (len(self.held_out) - length - 1) // max(count - 1, 1)
        rows = np.stack([self.held_out[i * step : i * step + length + 1] for i in range(count)])
        return [self.batch(rows[i : i + texts]) for i in range(0, count, texts)]


def tokens_of(rows: np.ndarray) -> np.ndarray:
    """The tokens of rows of `Texts.text`, those that are no targets too."""
    return np.where(rows < 0, -1 - rows, rows)


def _write(folder: Path, vocab_size: int, every: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    held = {d.id for d in held_out_modules()}
    documents = [d.text for d in StdlibSource().documents() if d.id not in held][::every]
    words = sorted({w for text in documents for w in WORD.findall(text)} - set(NAMES))
    # the form of a question is in the vocabulary as well, without digits: a value stays one token a digit
    forms = "\n".join(f"{word}_code =\nassert {word}_code ==" for word in words)
    tokenizer = BpeTokenizer.train([*documents[::4], forms], vocab_size=vocab_size)
    pieces = [piece for text in documents for piece in BREAK.split("\n" + text) if piece]
    ids = tokenizer.encode_batch(pieces)
    np.save(folder / "tokens.npy", np.array([t for own in ids for t in own], np.int32))
    np.save(folder / "starts.npy", np.cumsum([0, *map(len, ids)]))
    tokenizer.save(folder)
    facts = {"names": words, "modules": len(documents), "characters": sum(map(len, documents))}
    (folder / "texts.json").write_text(json.dumps(facts))


@dataclass(frozen=True, kw_only=True)
class Planted:
    """The loader of the trainer: texts of step s are a function of the seed and s."""

    texts: Texts
    length: int
    rows: int  # of a micro-batch
    micro_batches: int
    seed: int
    short: Sequence[tuple[int, int]] = ()  # (step, length): the length before this step, in batches of equal size

    def step(self, number: int) -> list[Batch]:
        rng = np.random.default_rng((self.seed, number))
        length = next((n for until, n in self.short if number < until), self.length)
        count = self.rows * self.length // length
        return [
            self.texts.batch(np.stack([self.texts.text(rng, length + 1) for _ in range(count)]))
            for _ in range(self.micro_batches)
        ]

    @contextmanager
    def prefetch(self, start: int) -> Iterator[Iterator[list[Batch]]]:
        def steps() -> Iterator[list[Batch]]:
            number = start
            while True:
                yield self.step(number)
                number += 1

        yield steps()

    def cursor(self, step: int) -> dict[str, Any]:
        return {"step": step}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """A step depends on its number only."""
