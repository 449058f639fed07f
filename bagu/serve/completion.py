"""Turn the engine's events into `Completion`s: one per event for streaming, or one per choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bagu.serve.request import Request, TokenEvent
from bagu.serve.stream import TextStream
from bagu.types import Completion, Tokenizer

__all__ = ["Choice", "choices", "join"]


@dataclass(kw_only=True)
class Choice:
    """One choice of a request, filled event by event."""

    prompt: int
    index: int
    text: TextStream | None  # None without a tokenizer
    events: list[TokenEvent] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # one per event, if there is a tokenizer

    def add(self, event: TokenEvent) -> None:
        """Add an event. A rollout adds 512 in each step, so nothing else is created here."""
        self.events.append(event)
        if self.text is not None:
            self.texts.append(self.text.read(event))

    def push(self, event: TokenEvent) -> Completion:
        """Add an event and return its tokens and text. `finish` is empty except in the last piece."""
        self.add(event)
        return self._completion([event], self.texts[-1:])

    def joined(self) -> Completion:
        """All events so far as one completion."""
        return self._completion(self.events, self.texts)

    def _completion(self, events: Sequence[TokenEvent], texts: Sequence[str]) -> Completion:
        first, last = events[0], events[-1]
        return Completion(
            prompt=self.prompt,
            choice=self.index,
            tokens=tuple(e.token for e in events if e.token is not None),
            text=None if self.text is None else "".join(texts),
            finish=last.finish or "",
            stop_reason=last.stop_reason,
            logprobs=None if first.logprob is None else tuple(e.logprob for e in events if e.logprob is not None),
            top=None if first.top is None else tuple(e.top for e in events if e.top is not None),
        )


def join(pieces: Sequence[Completion], prompt: int) -> Completion:
    """Join the pieces of one choice into one completion of prompt number `prompt`."""
    first, last = pieces[0], pieces[-1]
    return Completion(
        prompt=prompt,
        choice=first.choice,
        tokens=tuple(t for p in pieces for t in p.tokens),
        text=None if first.text is None else "".join(p.text or "" for p in pieces),
        finish=last.finish,
        stop_reason=last.stop_reason,
        logprobs=None if first.logprobs is None else tuple(x for p in pieces for x in p.logprobs or ()),
        top=None if first.top is None else tuple(x for p in pieces for x in p.top or ()),
    )


def choices(request: Request, prompt: int, tokenizer: Tokenizer | None) -> list[Choice]:
    """The choices of a new request."""
    sampling = request.sampling
    return [
        Choice(prompt=prompt, index=i, text=None if tokenizer is None else TextStream(tokenizer, sampling))
        for i in range(sampling.n)
    ]
