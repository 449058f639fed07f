"""Chat clients that stream answers: from a server over HTTP, or from an engine in this process."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bagu.errors import ArgumentError, BaguError
from bagu.serve.api_client import ApiClient
from bagu.serve.request import Sampling
from bagu.types import Generate

Message = Mapping[str, str]  # role and content
Settings = Mapping[str, float | int]  # fields of Sampling by name


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The part of an answer from one token or one event of a stream. The last piece has the `finish` reason. An event
    of a server has the text of any number of tokens; the server reports their number at the end."""

    text: str = ""
    tokens: int = 0
    finish: str | None = None


class Chat(Protocol):
    """A chat client. Closing the iterator of `answer` before its end aborts the request."""

    @property
    def name(self) -> str: ...

    def answer(self, messages: Sequence[Message], settings: Settings) -> Generator[Piece, None, None]: ...


class EngineChat:
    """An engine in this process. `encode` turns messages into a prompt (`ChatEncoder.prompt`)."""

    def __init__(
        self,
        engine: Generate[Sampling],
        encode: Callable[[Sequence[Message]], Sequence[int]],
        *,
        name: str,
        max_len: int,
        turn_ends: Sequence[int] = (),
    ) -> None:
        """`turn_ends` are the tokens that end the assistant's turn, in addition to the end-of-text token."""
        self.engine, self.encode, self.name, self.max_len = engine, encode, name, max_len
        self.turn_ends = tuple(turn_ends)

    def answer(self, messages: Sequence[Message], settings: Settings) -> Generator[Piece, None, None]:
        prompt = self.encode(messages)
        room = self.max_len - len(prompt)
        if room < 1:
            hint = "start a new conversation with /new"
            message = f"the conversation has {len(prompt)} tokens, and the model's longest sequence is {self.max_len}"
            raise ArgumentError(message, hint=hint)
        sampling = replace(sampling_of({"max_tokens": room, **settings}), stop_token_ids=self.turn_ends)
        for part in self.engine.stream(prompt, sampling):
            yield Piece(text=part.text or "", tokens=len(part.tokens), finish=part.finish or None)


class HttpChat:
    """The first model of a server with the OpenAI API at `url`, e.g. http://127.0.0.1:8000."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._client = ApiClient(url, api_key=api_key)
        self.name: str = self._client.first_model()["id"]

    def answer(self, messages: Sequence[Message], settings: Settings) -> Generator[Piece, None, None]:
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings,
        }
        counted, thinking = 0, False  # tokens of the pieces so far; the last piece was reasoning
        with self._client.response("/v1/chat/completions", body) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if not line.startswith(b"data:"):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise BaguError(f"the server ended the answer: {chunk['error']['message']}")
                for choice in chunk["choices"]:
                    text, thinking = _text(choice["delta"], thinking)
                    yield Piece(text=text, finish=choice["finish_reason"])
                if usage := chunk.get("usage"):
                    total = usage["completion_tokens"]  # so far; some servers send it in every event
                    yield Piece(tokens=total - counted)
                    counted = total
            raise BaguError("the server closed the connection within the answer", hint="use /retry to ask again")


def _text(delta: Mapping[str, Any], thinking: bool) -> tuple[str, bool]:
    """The text of a delta, and whether it is reasoning. Servers send reasoning in a field of its own; it is shown in
    the tags of the model, as an engine in this process shows it."""
    reasoning, content = delta.get("reasoning_content") or "", delta.get("content") or ""
    if reasoning:
        return ("" if thinking else "<think>\n") + reasoning, True
    if content and thinking:
        return f"\n</think>\n\n{content}", False
    return content, thinking


def sampling_of(settings: Settings) -> Sampling:
    """Validate the settings locally, before a request is sent."""
    return Sampling(**settings)  # type: ignore[arg-type]
