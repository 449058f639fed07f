"""Requests to the engine and the events it returns.

A `Request` is a tokenized prompt and its sampling parameters; it has `sampling.n` choices, numbered from 0. The engine
returns one `TokenEvent` per generated token of a choice, and `PromptLogprobs` if the request asks for them. The last
event of a choice carries the finish reason.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bagu.errors import ArgumentError, BaguError
from bagu.serve.grammar import Grammar
from bagu.serve.images.prompt import PromptImage

Finish = Literal["stop", "length", "abort", "error"]
NOT_FINITE = "the probabilities are not finite"  # `TokenEvent.stop_reason` of a choice whose adapter overflows
PENALTIES, REPETITIONS, BIASES = (-2.0, 2.0), (0.01, 100.0), (-100.0, 100.0)  # (minimum, maximum)


class Unservable(BaguError, ValueError):
    """A request that this engine can never run, refused before it takes any resource. `param` is the field of
    `Sampling` to change, if there is one. `temporary`: the same request may run later."""

    def __init__(self, message: str, *, hint: str = "", param: str | None = None, temporary: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.param, self.temporary = param, temporary


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters and stop conditions. Names and defaults follow vLLM and OpenAI."""

    max_tokens: int = 16  # 0: compute only prompt logprobs
    temperature: float = 1.0  # 0 is greedy
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0  # drop tokens whose probability is below this fraction of the largest one
    repetition_penalty: float = 1.0  # for tokens in the prompt or the output
    presence_penalty: float = 0.0  # for tokens in the output
    frequency_penalty: float = 0.0  # for tokens in the output, per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # the random number for token t of choice i depends only on (seed, i, t)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the stop string in the text
    min_tokens: int = 0  # no stop condition applies before this many tokens
    n: int = 1
    logprobs: int | None = None  # number of top tokens to report in addition to the sampled one
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # the output is a text of this grammar, unless max_tokens or a stop ends it earlier

    def __post_init__(self) -> None:
        for name, value, valid, rule in self._rules():
            if not valid:
                raise ArgumentError(f"sampling: {name} = {value!r}", hint=f"{name} is {rule}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # a copy: the caller may change its mapping

    def _rules(self) -> list[tuple[str, Any, bool, str]]:
        """(name, value, whether it is valid, what is allowed) for every field that is checked."""
        bias = all(_count(token, 0) and _within(b, *BIASES) for token, b in self.logit_bias.items())
        scores_only = self.max_tokens == 0 and self.prompt_logprobs is not None and self.n == 1
        return [
            ("max_tokens", self.max_tokens, _count(self.max_tokens, 1) or scores_only,
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
             "an integer, or None for a seed chosen by the engine"),
            ("stop", self.stop, isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
             "a tuple of non-empty strings"),
            ("stop_token_ids", self.stop_token_ids, all(_count(t, 0) for t in self.stop_token_ids), "token ids"),
            ("min_tokens", self.min_tokens, _count(self.min_tokens, 0) and self.min_tokens <= self.max_tokens,
             "0 or more, and at most max_tokens"),
            ("n", self.n, _count(self.n, 1), "1 or more"),
            ("logprobs", self.logprobs, _optional(self.logprobs, 0), "0 or more, or None for no logprobs"),
            ("prompt_logprobs", self.prompt_logprobs, _optional(self.prompt_logprobs, 0),
             "0 or more, or None for no logprobs"),
            ("grammar", self.grammar, self.grammar is None or isinstance(self.grammar, Grammar), "a Grammar, or None"),
        ]  # fmt: skip


def _count(value: Any, least: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _optional(value: Any, least: int) -> bool:
    return value is None or _count(value, least)


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and low <= value <= high


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt to continue. The caller chooses `id`, which must be unique among unfinished requests."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0  # lower values run first
    arrival: float = 0.0  # seconds, on any clock that is the same for all requests
    score_start: int = 0  # prompt logprobs are computed from this position on
    adapter: str | None = None  # the name of a LoRA adapter; None: the base model
    images: tuple[PromptImage, ...] = ()  # in the order of their places in the prompt

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ArgumentError(f"request {self.id!r} has an empty prompt", hint="a prompt needs at least one token")
        if not 0 <= self.score_start < len(self.prompt):
            raise ArgumentError(
                f"request {self.id!r}: score_start = {self.score_start} in a prompt of {len(self.prompt)} tokens",
                hint="score_start is a position of the prompt",
            )


class TokenLogprob(NamedTuple):
    """The logprob of a token, and the (token, logprob) pairs of the top tokens at its position, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenEvent(NamedTuple):
    """One token of one choice. A NamedTuple because one is created per token: 0.5 µs, a frozen dataclass takes 1.2 µs.

    `token` is None if a choice ends without one: it was aborted, it failed, or max_tokens is 0. If `finish` is "stop",
    `stop_reason` is the stop string or the stop token's id, and None for the end-of-text token. `cached` and `started`
    are set once per request, in the first event of choice 0: the number of prompt tokens found in the prefix cache, and
    the `time.perf_counter` value at which its first step was planned.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # the choice, 0 to n - 1; hides tuple.index, which is not used
    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
    finish: Finish | None = None
    stop_reason: str | int | None = None
    cached: int = 0
    started: float | None = None


class PromptLogprobs(NamedTuple):
    """Logprobs of the prompt tokens from position `start` on, each conditioned on the tokens before it."""

    request_id: str
    start: int
    tokens: tuple[TokenLogprob, ...]


Event = TokenEvent | PromptLogprobs
