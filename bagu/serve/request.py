"""What is asked of the engine, and what it answers: the values that cross every border of `serve`.

A `Request` is a prompt of tokens and how to sample from it; it has `sampling.n` choices, numbered from 0. The engine
answers with one `TokenEvent` per token of a choice, the last of which says why the choice ended, and with
`PromptLogprobs` where they were asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bagu.errors import ArgumentError, BaguError

__all__ = [
    "BIASES", "PENALTIES", "REPETITIONS", "Event", "Finish", "PromptLogprobs", "Request", "Sampling", "TokenEvent",
    "TokenLogprob", "Unservable",
]  # fmt: skip

Finish = Literal["stop", "length", "abort", "error"]
PENALTIES, REPETITIONS, BIASES = (-2.0, 2.0), (0.01, 100.0), (-100.0, 100.0)  # least and most


class Unservable(BaguError, ValueError):
    """A request that this engine can never serve: refused when it is added, before it holds anything. `param` is the
    field of `Sampling` to change, where it is one."""

    def __init__(self, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the tokens of a choice are drawn, and where it ends. Names and defaults are those of vLLM and OpenAI."""

    max_tokens: int = 16  # 0 asks for prompt logprobs alone
    temperature: float = 1.0  # 0 is greedy
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0  # tokens less likely than this share of the likeliest one are out
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output, per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # the draw for token t of choice i is a function of (seed, i, t) alone
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # whether the text keeps the stop string that ended it
    min_tokens: int = 0  # no stop of any kind before this many tokens
    n: int = 1
    logprobs: int | None = None  # how many likeliest tokens to report beside the drawn one
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, value, good, rule in self._rules():
            if not good:
                raise ArgumentError(f"sampling: {name} = {value!r}", hint=f"{name} is {rule}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller's mapping may change; ours not

    def _rules(self) -> list[tuple[str, Any, bool, str]]:
        """(name, value, whether it is good, what is good), for every field that can be wrong."""
        bias = all(_count(token, 0) and _within(b, *BIASES) for token, b in self.logit_bias.items())
        asks_only_for_prompt = self.max_tokens == 0 and self.prompt_logprobs is not None and self.n == 1
        return [
            ("max_tokens", self.max_tokens, _count(self.max_tokens, 1) or asks_only_for_prompt,
             "1 or more (0 only with prompt_logprobs and n = 1)"),
            ("temperature", self.temperature, _within(self.temperature, 0, math.inf), "0 or more, and finite"),
            ("top_k", self.top_k, _optional(self.top_k, 1), "1 or more, or None for all tokens"),
            ("top_p", self.top_p, _within(self.top_p, math.ulp(0.0), 1), "above 0 and at most 1"),
            ("min_p", self.min_p, _within(self.min_p, 0, 1), "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty,
             _within(self.repetition_penalty, *REPETITIONS), "between 0.01 and 100; 1 changes nothing"),
            ("presence_penalty", self.presence_penalty, _within(self.presence_penalty, *PENALTIES), "between -2 and 2"),
            ("frequency_penalty", self.frequency_penalty,
             _within(self.frequency_penalty, *PENALTIES), "between -2 and 2"),
            ("logit_bias", self.logit_bias, bias, "a mapping from token ids to numbers between -100 and 100"),
            ("seed", self.seed, self.seed is None or _count(self.seed, -math.inf),
             "an integer, or None for a fresh one"),
            ("stop", self.stop, isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
             "a tuple of strings, none of them empty"),
            ("stop_token_ids", self.stop_token_ids, all(_count(t, 0) for t in self.stop_token_ids), "token ids"),
            ("min_tokens", self.min_tokens, _count(self.min_tokens, 0) and self.min_tokens <= self.max_tokens,
             "0 or more, and at most max_tokens"),
            ("n", self.n, _count(self.n, 1), "1 or more"),
            ("logprobs", self.logprobs, _optional(self.logprobs, 0), "0 or more, or None for no logprobs"),
            ("prompt_logprobs", self.prompt_logprobs, _optional(self.prompt_logprobs, 0),
             "0 or more, or None for no logprobs"),
        ]  # fmt: skip


def _count(value: Any, least: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _optional(value: Any, least: int) -> bool:
    return value is None or _count(value, least)


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and low <= value <= high


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt to go on from. `id` is the caller's name for it and is unique among the requests alive."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0  # lower is sooner
    arrival: float = 0.0  # seconds, on any clock that all requests share
    score_start: int = 0  # prompt logprobs are wanted of the tokens from here on

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ArgumentError(f"request {self.id!r} has an empty prompt", hint="a prompt has at least one token")
        if not 0 <= self.score_start < len(self.prompt):
            raise ArgumentError(
                f"request {self.id!r}: score_start = {self.score_start} in a prompt of {len(self.prompt)} tokens",
                hint="score_start is a position of the prompt",
            )


class TokenLogprob(NamedTuple):
    """The logprob of a token, and the likeliest tokens at its place with theirs, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenEvent(NamedTuple):
    """One token of one choice. A tuple because there is one per token: 0.5 µs, against 1.2 µs as a frozen dataclass.

    `token` is None where a choice ends without one: it was aborted, failed, or max_tokens is 0. `stop_reason` is the
    stop string or the stop token's id where `finish` is "stop", and None for the end-of-text token. `cached` and
    `started` are said once a request, in the first event of its choice 0: how many tokens of the prompt came from the
    prefix cache, and when the first step with it was planned, by `time.perf_counter`.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # of the choice, 0 to n - 1; hides tuple.index, which nobody calls
    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
    finish: Finish | None = None
    stop_reason: str | int | None = None
    cached: int = 0
    started: float | None = None


class PromptLogprobs(NamedTuple):
    """Logprobs of the prompt's tokens from position `start` on, each given the tokens before it."""

    request_id: str
    start: int
    tokens: tuple[TokenLogprob, ...]


Event = TokenEvent | PromptLogprobs
