"""Arrival traces: when each request of a recorded workload arrived, and how many tokens it read and generated.

A trace is a CSV file with a header, or JSON lines. The names of its columns tell which form it has:

    columns                                      unit of time       published as
    timestamp, input_length, output_length       milliseconds       Mooncake; `hash_ids` are blocks of 512 prompt tokens
    TIMESTAMP, ContextTokens, GeneratedTokens    date and time      Azure LLM inference trace 2023 and 2024
    Timestamp, Request tokens, Response tokens   seconds            BurstGPT
    time_s, input_tokens, output_tokens          seconds            bagu's own

The texts are not in a trace, so prompts are random tokens. Requests with a common prefix of `hash_ids` get prompts with
the same prefix, so a prefix cache finds as much as it would have found in the original texts.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bagu.bench.workload import Workload
from bagu.errors import ArgumentError

BLOCK = 512  # prompt tokens per id in Mooncake's `hash_ids`


@dataclass(frozen=True, kw_only=True)
class TracedRequest:
    arrival: float  # seconds after the first request of the trace
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # ids of its prompt's blocks of 512 tokens; empty if the trace has none


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The requests of a file in order of arrival. `left_out` has a sentence for each kind of request not in it."""

    name: str
    requests: tuple[TracedRequest, ...]
    left_out: tuple[str, ...] = ()

    def fitting(self, longest: int | None) -> Trace:
        """Without the requests that are longer than the model's maximum length."""
        kept = [r for r in self.requests if longest is None or r.input_tokens + r.output_tokens <= longest]
        if len(kept) == len(self.requests):
            return self
        why = f"{len(self.requests) - len(kept)} longer than the model's maximum length of {longest} tokens"
        if not kept:
            raise ArgumentError(
                f"{self.name}: no request can be sent: {why}",
                hint="use a model with a longer context, or another trace",
            )
        return Trace(name=self.name, requests=tuple(kept), left_out=(*self.left_out, why))

    def arrivals(self, speed: float) -> list[float]:
        """Arrival times in seconds from the first request that is sent; `speed` 2 replays twice as fast."""
        zero = self.requests[0].arrival
        return [(r.arrival - zero) / speed for r in self.requests]


def _date(value: Any) -> float:
    """Seconds of `2023-11-16 18:17:03.9799600`; without a time zone it is UTC."""
    when = datetime.fromisoformat(str(value).strip())
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _milliseconds(value: Any) -> float:
    return float(value) / 1e3


Form = tuple[str, str, str, Callable[[Any], float]]  # the columns of time, input and output, and the reader of a time
FORMS: tuple[Form, ...] = (
    ("timestamp", "input_length", "output_length", _milliseconds),
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens", _date),
    ("Timestamp", "Request tokens", "Response tokens", float),
    ("time_s", "input_tokens", "output_tokens", float),
)


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """The requests of the file, the first `limit` of them if it is given. Requests that read or generate nothing
    (failed ones in BurstGPT) are left out."""
    found: list[TracedRequest] = []
    empty, zero, last = 0, 0.0, -math.inf
    form: Form | None = None
    for number, row in _rows(path):
        form = form or _form_of(path, row)
        one = _request(f"{path}:{number}", row, form)
        if one.arrival < last:
            raise ArgumentError(
                f"{path}:{number}: the request arrives before the one above it", hint="sort the file by time"
            )
        zero, last = (one.arrival if last == -math.inf else zero), one.arrival
        if one.input_tokens == 0 or one.output_tokens == 0:
            empty += 1
            continue
        found.append(replace(one, arrival=one.arrival - zero))
        if len(found) == limit:
            break
    if not found:
        raise ArgumentError(f"{path} has no request that reads and generates tokens", hint="check the file")
    left_out = (f"{empty} that read or generate no token",) if empty else ()
    return Trace(name=path.name, requests=tuple(found), left_out=left_out)


def trace_workload(trace: Trace, *, tokens: Sequence[int], seed: int) -> Workload:
    """Prompts of random `tokens`, with the lengths and the common prefixes of the trace."""
    prompts = []
    for i, one in enumerate(trace.requests):
        text: list[int] = []
        for block in one.blocks[: one.input_tokens // BLOCK]:  # whole blocks; the rest is the request's own
            text += random.Random(f"{seed} block {block}").choices(tokens, k=BLOCK)
        text += random.Random(f"{seed} request {i}").choices(tokens, k=one.input_tokens - len(text))
        prompts.append(tuple(text))
    return Workload(prompts=tuple(prompts), max_tokens=tuple(r.output_tokens for r in trace.requests))


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Every row with the number of its line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            if first.lstrip().startswith("{"):
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield number, _json(path, number, line)
            else:
                reader = csv.DictReader(file, skipinitialspace=True)
                for row in reader:
                    yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(f"cannot read the trace {path}: {reason}", hint="give a CSV or JSON lines file") from error


def _json(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ArgumentError(f"{path}:{number}: not JSON: {error}", hint="each line is one JSON object") from error
    if not isinstance(row, dict):
        raise ArgumentError(f"{path}:{number}: not a JSON object", hint="each line is one JSON object")
    return row


def _form_of(path: Path, row: Mapping[str, Any]) -> Form:
    for form in FORMS:
        if all(name in row for name in form[:3]):
            return form
    known = "; ".join(", ".join(form[:3]) for form in FORMS)
    columns = ", ".join(str(name) for name in row) or "none"
    raise ArgumentError(f"{path} has the columns {columns}", hint=f"a trace has the columns {known}")


def _request(where: str, row: Mapping[str, Any], form: Form) -> TracedRequest:
    at, read, made, time_of = form
    try:
        arrival, lengths = time_of(row[at]), [int(row[read]), int(row[made])]
        blocks = tuple(int(b) for b in row.get("hash_ids") or ())
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"{where}: cannot read {at}, {read} and {made}: {error}", hint="correct or delete that line"
        ) from error
    if not math.isfinite(arrival) or min(lengths) < 0:
        raise ArgumentError(
            f"{where}: {at} {row[at]}, {read} {row[read]}, {made} {row[made]}",
            hint="times are finite and lengths are 0 or more",
        )
    return TracedRequest(arrival=arrival, input_tokens=lengths[0], output_tokens=lengths[1], blocks=blocks)
