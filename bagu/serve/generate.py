"""`types.Generate` on top of `submit`, `step` and `abort`: whole completions, a stream of tokens, and scores."""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property

from bagu.errors import ArgumentError
from bagu.serve.completion import choices
from bagu.serve.request import Event, PromptLogprobs, Request, Sampling, TokenEvent, TokenLogprob
from bagu.types import Completion, Tokenizer


class GenerationMixin(ABC):
    """The methods of `types.Generate`. The engine that inherits them runs the requests."""

    tokenizer: Tokenizer | None

    @abstractmethod
    def submit(self, request: Request) -> None: ...

    @abstractmethod
    def step(self) -> list[Event]: ...

    @abstractmethod
    def abort(self, request_id: str) -> bool: ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> list[Completion]:
        """All choices of all prompts, in the order of the prompts. `sampling` is one for all, or one per prompt."""
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        requests = [self._request(p, s) for p, s in zip(prompts, each, strict=True)]
        by_request = {r.id: choices(r, i, self.tokenizer) for i, r in enumerate(requests)}
        for event in self._run(requests):
            if isinstance(event, TokenEvent):
                by_request[event.request_id][event.index].add(event)
        return [choice.joined() for r in requests for choice in by_request[r.id]]

    def stream(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[Completion]:
        """Yield the token and text of every event; the last of a choice has its `finish`. Closing the generator aborts
        the request."""
        request = self._request(prompt, sampling)
        grown = choices(request, 0, self.tokenizer)
        try:
            for event in self._run([request]):
                if isinstance(event, TokenEvent):
                    yield grown[event.index].push(event)
        finally:
            self.abort(request.id)

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        """For each sequence the logprobs of ids[start:]. A prefix that several sequences share is computed once, if it
        ends before their starts."""
        return [[token.logprob for token in tokens] for tokens in self.score_tokens(sequences, starts)]

    def score_tokens(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *, top: int = 0
    ) -> list[tuple[TokenLogprob, ...]]:
        """`score`, with the `top` most probable tokens at each position."""
        for ids, start in zip(sequences, starts, strict=True):
            if not 1 <= start < len(ids):
                hint = "start is 1 to length - 1: the first token has no logprob, and at least one token is scored"
                raise ArgumentError(f"score: start = {start} for a sequence of {len(ids)} tokens", hint=hint)
        only_score = Sampling(max_tokens=0, prompt_logprobs=top)
        requests = [self._request(ids, only_score, score_start=s) for ids, s in zip(sequences, starts, strict=True)]
        found = {e.request_id: e.tokens for e in self._run(requests) if isinstance(e, PromptLogprobs)}
        return [found[r.id] for r in requests]

    @cached_property
    def _request_numbers(self) -> Iterator[int]:
        return itertools.count()

    def _request(self, prompt: Sequence[int], sampling: Sampling, *, score_start: int = 0) -> Request:
        if isinstance(prompt, str):
            raise ArgumentError(
                "a prompt is a str, and the engine reads token ids", hint="encode it: tokenizer.encode_prompt(text)"
            )
        return Request(
            id=f"engine-{next(self._request_numbers)}",
            prompt=tuple(prompt),
            sampling=sampling,
            arrival=time.monotonic(),
            score_start=score_start,
        )

    def _run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Submit these requests and yield their events until all have finished. Other requests in the engine also
        advance, and their events are dropped: for several callers use `submit` and `step`."""
        try:
            for request in requests:
                self.submit(request)
            left = sum(r.sampling.n for r in requests)
            own = {r.id for r in requests}
            while left:
                for event in self.step():
                    if event.request_id in own:
                        left -= isinstance(event, TokenEvent) and event.finish is not None
                        yield event
        finally:
            for request in requests:
                self.abort(request.id)
