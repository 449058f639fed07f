"""The requests of a benchmark: prompts of random tokens, the length of each output, and the arrival times.

nano-vllm's benchmark has 256 requests, input and output lengths uniform over 100 to 1024, seed 0, temperature 0.6. It
is drawn here with Python's `random` in nano-vllm's order, so that the lengths are identical (142,827 tokens in, 133,966
out).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bagu.errors import ArgumentError

HIGHEST_TOKEN, TEMPERATURE = 10_000, 0.6  # nano-vllm's values


@dataclass(frozen=True)
class Lengths:
    """A uniform distribution from low to high, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ArgumentError(f"lengths from {self.low} to {self.high}", hint="use 1 or more, the lower first")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse `100-1024`, or `64` for exactly 64."""
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        if found is None:
            raise ArgumentError(f"lengths {text!r}", hint="write 100-1024, or 64 for exactly 64")
        return cls(int(found[1]), int(found[2] or found[1]))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Request i is `prompts[i]` and generates exactly `max_tokens[i]` tokens (end-of-text is ignored)."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.prompts or len(self.prompts) != len(self.max_tokens):
            raise ArgumentError(
                f"a workload of {len(self.prompts)} prompts and {len(self.max_tokens)} answers",
                hint="give at least one request, and an output length for each",
            )

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)

    @property
    def longest(self) -> int:
        """Positions that the longest request needs."""
        return max(len(p) + n for p, n in zip(self.prompts, self.max_tokens, strict=True))

    def head(self, count: int) -> Workload:
        return Workload(prompts=self.prompts[:count], max_tokens=self.max_tokens[:count])


def random_workload(
    requests: int,
    inputs: Lengths,
    outputs: Lengths,
    *,
    tokens: Sequence[int] | int,
    shared_prefix: int = 0,
    prefix_groups: int = 1,
    seed: int = 0,
) -> Workload:
    """`tokens` is the vocabulary size, or the ids to draw from. Each prompt starts with the `shared_prefix` tokens of
    its group, which is drawn."""
    if requests < 1 or shared_prefix < 0 or prefix_groups < 1:
        raise ArgumentError(
            f"{requests} requests with {prefix_groups} shared prefixes of {shared_prefix} tokens",
            hint="use 1 request or more, 1 group or more, and a prefix of 0 or more",
        )
    ids = range(tokens) if isinstance(tokens, int) else tokens
    draw = random.Random(seed)

    def text(length: int) -> list[int]:
        # mapped to a small vocabulary after the draw, so that the lengths are the same for every model
        return [ids[draw.randint(0, HIGHEST_TOKEN) % len(ids)] for _ in range(length)]

    prompts = [text(draw.randint(inputs.low, inputs.high)) for _ in range(requests)]
    lengths = tuple(draw.randint(outputs.low, outputs.high) for _ in range(requests))
    prefixes = [text(shared_prefix) for _ in range(prefix_groups)]
    return Workload(prompts=tuple((*draw.choice(prefixes), *p) for p in prompts), max_tokens=lengths)


def streams_workload(streams: int, prompt: int, new: int, *, tokens: int, seed: int = 0) -> Workload:
    """Requests of equal size, for a decode rate: the first token comes from the prefill, `new` from decode steps."""
    return random_workload(streams, Lengths(prompt, prompt), Lengths(new + 1, new + 1), tokens=tokens, seed=seed)


def arrivals(requests: int, rate: float, seed: int = 0) -> list[float]:
    """The arrival time of each request in seconds from the start: a Poisson process of `rate` requests per second, with
    exponential gaps of mean 1 / rate. With an infinite rate all requests arrive at 0."""
    if not rate > 0:
        raise ArgumentError(f"a request rate of {rate} per second", hint="use a rate above 0, or inf for all at once")
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(requests):
        times.append(now)
        now += draw.expovariate(rate)
    return times
