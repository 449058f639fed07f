"""Bits per byte of documents, long ones in overlapping windows.

A window has as many tokens as the model accepts. Each token is scored once, in the first window that contains it, so
all tokens except those of the first window have at least `(1 - stride) * max_len` tokens before them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from bagu.eval.model import Model
from bagu.eval.task import Item, Task


def windows(length: int, longest: int, step: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first scored) of each window over `length` tokens; every token but the first is scored once."""
    scored = 1
    begin = 0
    while scored < length:
        end = min(begin + longest, length)
        yield begin, end, scored
        scored = end
        begin = min(begin + step, max(length - longest, 0)) if end < length else begin


def score_documents(model: Model, task: Task, items: Sequence[Item]) -> list[dict[str, Any]]:
    """For each document its negative log-likelihood in nats, its tokens and its bytes."""
    step = max(1, int(model.max_len * task.stride))
    sequences: list[list[int]] = []
    starts: list[int] = []
    owners: list[int] = []
    for number, item in enumerate(items):
        ids = model.encode(item.prompt)
        for begin, end, first in windows(len(ids), model.max_len, step):
            sequences.append(ids[begin:end])
            starts.append(first - begin)
            owners.append(number)
    totals = [{"nats": 0.0, "tokens": 0, "bytes": len(item.prompt.encode())} for item in items]
    for owner, logprobs in zip(owners, model.score(sequences, starts), strict=True):
        totals[owner]["nats"] -= math.fsum(logprobs)
        totals[owner]["tokens"] += len(logprobs)
    return totals
