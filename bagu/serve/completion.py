"""Turn the engine's events into `Completion`s: one per event for streaming, joined when a choice has finished."""

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
    pieces: list[Completion] = field(default_factory=list)

    def push(self, event: TokenEvent) -> Completion:
        """Add an event and return its tokens and text. `finish` is empty except in the last piece."""
        token, logprob = event.token, event.logprob
        piece = Completion(
            prompt=self.prompt,
            choice=self.index,
            tokens=() if token is None else (token,),
            text=None if self.text is None else self.text.read(event),
            finish=event.finish or "",
            stop_reason=event.stop_reason,
            logprobs=None if logprob is None else (logprob,),
            top=None if event.top is None else (event.top,),
        )
        self.pieces.append(piece)
        return piece

    def joined(self) -> Completion:
        """All pieces so far as one completion."""
        return join(self.pieces, self.prompt)


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
