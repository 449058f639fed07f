"""Responses of the OpenAI API, as one body or as server-sent events, from the engine's events.

A streamed chunk is a constant JSON prefix and suffix, built once per choice, around the JSON of the new text: 0.2 µs,
where a dict and `json.dumps` take 5.6 µs. `finish_reason: null` is in every chunk but the last of a choice, because
clients read the key.
"""

import codecs
import json
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from bagu.serve.http.bodies.openai import Job
from bagu.serve.http.errors import ApiError
from bagu.serve.request import NOT_FINITE, Event, PromptLogprobs, Request, TokenEvent, TokenLogprob
from bagu.serve.stream import TextStream
from bagu.serve.wire.messages import Ready

DONE = b"data: [DONE]\n\n"
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
quoted = json.encoder.encode_basestring  # `to_json` of a string, with two calls less
Scored = tuple[int, TokenLogprob | None]  # a token and its logprob; None for the first token of a prompt


class Choice:
    """The state of one choice: its text, token count, and logprobs that are not sent yet."""

    def __init__(self, index: int, request: Request, ready: Ready, silent: frozenset[int], head: str) -> None:
        self.index, self.request, self.head = index, request, head
        self.text: list[str] = []
        self.scored: list[Scored] = []
        self.tokens = self.cached = 0  # generated tokens; prompt tokens from the prefix cache
        self.offset = 0  # characters before `scored`, for text_offset; a character may be several tokens
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self._stream = TextStream(ready.tokenizer, request.sampling)
        self.push_token = self._stream.push_token
        self.silent = silent  # tokens without text

    def push(self, event: TokenEvent) -> str:
        """Add an event; returns the text that can be sent now."""
        token, finish = event.token, event.finish
        self.cached += event.cached
        if token is not None:
            self.tokens += 1
            if event.logprob is not None:
                self.scored.append((token, TokenLogprob(event.logprob, event.top or ())))
            if finish is None and token not in self.silent:
                return self.push_token(token)
        if event.stop_reason == NOT_FINITE:
            raise _not_finite()
        if finish in ("abort", "error"):
            raise ApiError(500, f"the engine ended this request: {event.stop_reason or finish}")
        self.finish, self.stop_reason = finish, event.stop_reason
        return self._stream.read(event, silent=token in self.silent)


class GenerationResponse:
    """The response to one call. For one body: `add` events as they arrive, then `body`. For a stream: `first_chunks`,
    then `chunks` of the events, then `last_chunk`."""

    object_name = chunk_name = ""  # the field "object" of the body and of a chunk
    before, after = "", ""  # the JSON around the text of a chunk

    def __init__(self, job: Job, ready: Ready, model: str) -> None:
        self.job, self.ready = job, ready
        self.created, self.model = int(time.time()), model
        self.prompt_logprobs: dict[str, PromptLogprobs] = {}
        self._usage = ',"usage":null' if job.include_usage else ""
        self._plain = f'{self.after},"logprobs":null,"finish_reason":null}}]{self._usage}}}\n\n'
        markers = {ready.special_tokens.get(name) for name in job.format.markers} if job.format else set()
        silent = ready.special_ids - markers if job.skip_special_tokens else frozenset()
        self.choices = {
            (request.id, i): Choice(index, request, ready, silent, self._head(index))
            for index, (request, i) in enumerate((r, i) for r in job.requests for i in range(r.sampling.n))
        }

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, PromptLogprobs):
                self.prompt_logprobs[event.request_id] = event
            else:
                choice = self.choices[event.request_id, event.index]
                choice.text.append(choice.push(event))

    def body(self) -> dict[str, Any]:
        choices = sorted(self.choices.values(), key=lambda choice: choice.index)
        common = {"id": self.job.id, "object": self.object_name, "created": self.created, "model": self.model}
        return {**common, "choices": [self._choice(choice) for choice in choices], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        choices = self.choices.values()
        prompt, completion = sum(len(r.prompt) for r in self.job.requests), sum(c.tokens for c in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(c.cached for c in choices)},
        }

    def first_chunks(self) -> bytes:
        """The chunks before the first token."""
        raise NotImplementedError

    def chunks(self, events: Iterable[Event]) -> bytes:
        """The chunks of these events; a token whose text is held back has none."""
        out = []
        for event in events:
            if isinstance(event, PromptLogprobs):
                continue  # cannot be requested with a stream
            choice, token = self.choices[event[:2]], event.token
            if token is None or event.finish or event.logprob is not None or event.cached or token in choice.silent:
                text = choice.push(event)
            else:  # the common case of `push`, inlined
                choice.tokens += 1
                text = choice.push_token(token)
            if event.finish is None and not choice.scored:
                if text:
                    out.append(f"{choice.head}{quoted(text)}{self._plain}")
                continue
            logprobs, choice.scored = to_json(self.logprobs(choice)), []
            finish, reason = to_json(choice.finish), to_json(choice.stop_reason)
            out.append(
                f'{choice.head}{to_json(text)}{self.after},"logprobs":{logprobs},"finish_reason":{finish},'
                f'"stop_reason":{reason}}}]{self._usage}}}\n\n'
            )
        return "".join(out).encode()

    def error_event(self, error: ApiError) -> bytes:
        """An error after the status was sent: an event and the end of the stream."""
        return f"data: {to_json(error.body)}\n\n".encode() + DONE

    def last_chunk(self) -> bytes:
        if not self.job.include_usage:
            return DONE
        return f'{self._envelope()}],"usage":{to_json(self.usage())}}}\n\n'.encode() + DONE

    def logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """The logprobs of the tokens in `choice.scored`, in the endpoint's format."""
        raise NotImplementedError

    def token_text(self, token: int) -> str:
        """The text of one token, with U+FFFD for an incomplete character."""
        return self.ready.tokenizer.bytes_of(token).decode(errors="replace")

    def _choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _common_fields(self, choice: Choice) -> dict[str, Any]:
        return {
            "logprobs": self.logprobs(choice),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
            **self._prompt_logprobs(choice.request),
        }

    def _prompt_logprobs(self, request: Request) -> dict[str, Any]:
        """In vLLM's format: one mapping from token ids per position, null where there is no logprob."""
        found = self.prompt_logprobs.get(request.id)
        if found is None or self.job.echo is not None:
            return {}
        rows: list[dict[str, Any] | None] = [None] * found.start
        for token, scored in zip(request.prompt[found.start :], found.tokens, strict=True):
            pairs = {token: scored.logprob, **dict(scored.top)}
            rows.append(
                {str(t): {"logprob": _finite(p), "decoded_token": self.token_text(t)} for t, p in pairs.items()}
            )
        return {"prompt_logprobs": rows}

    def _envelope(self) -> str:
        name, model = self.chunk_name, to_json(self.model)
        return f'data: {{"id":"{self.job.id}","object":"{name}","created":{self.created},"model":{model},"choices":['

    def _head(self, index: int) -> str:
        return f'{self._envelope()}{{"index":{index},{self.before}'


class ChatResponse(GenerationResponse):
    object_name, chunk_name = "chat.completion", "chat.completion.chunk"
    before, after = '"delta":{"content":', "}"

    def first_chunks(self) -> bytes:
        role = '"delta":{"role":"assistant","content":'
        heads = (choice.head.removesuffix(self.before) + role for choice in self.choices.values())
        return "".join(f'{head}""{self._plain}' for head in heads).encode()

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text)}
        return {"index": choice.index, "message": message, **self._common_fields(choice)}

    def logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if choice.request.sampling.logprobs is None:
            return None
        rows = []
        for token, scored in choice.scored:
            assert scored is not None, "a generated token has a logprob"
            top = [self._entry(t, p) for t, p in scored.top]
            rows.append({**self._entry(token, scored.logprob), "top_logprobs": top})
        return {"content": rows}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """With `bytes` a client can join characters that span several tokens."""
        data = self.ready.tokenizer.bytes_of(token)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


class CompletionResponse(GenerationResponse):
    object_name = chunk_name = "text_completion"
    before = '"text":'

    def first_chunks(self) -> bytes:
        if self.job.echo is None:
            return b""
        n = len(self.choices) // len(self.job.requests)
        texts = (to_json(self.job.echo[choice.index // n]) for choice in self.choices.values())
        heads = (choice.head for choice in self.choices.values())
        return "".join(f"{head}{text}{self._plain}" for head, text in zip(heads, texts, strict=True)).encode()

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        if self.job.echo is not None:
            text = self.job.echo[self.job.requests.index(choice.request)] + text
            choice.scored = self._scored_prompt(choice.request) + choice.scored
        return {"index": choice.index, "text": text, **self._common_fields(choice)}

    def _scored_prompt(self, request: Request) -> list[Scored]:
        found = self.prompt_logprobs.get(request.id)
        if found is None:
            return []
        scored: Sequence[TokenLogprob | None] = (*(None,) * found.start, *found.tokens)
        return list(zip(request.prompt, scored, strict=True))

    def logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if choice.request.sampling.logprobs is None:
            return None
        texts = [self.token_text(token) for token, _ in choice.scored]
        offsets = []
        for token, _ in choice.scored:
            offsets.append(choice.offset)
            if token not in choice.silent:
                choice.offset += len(choice.decoder.decode(self.ready.tokenizer.bytes_of(token)))
        return {
            "tokens": texts,
            "token_logprobs": [None if scored is None else _finite(scored.logprob) for _, scored in choice.scored],
            "top_logprobs": [
                None if scored is None else {self.token_text(t): _finite(p) for t, p in scored.top}
                for _, scored in choice.scored
            ],
            "text_offset": offsets,
        }


def _finite(logprob: float) -> float:
    """JSON has no -inf; OpenAI's API writes -9999 for a token of probability 0."""
    if math.isnan(logprob) or logprob == math.inf:
        raise _not_finite()
    return max(logprob, -9999.0)


def _not_finite() -> ApiError:
    hint = "its weights are broken, or overflow in this dtype; use another model or adapter"
    return ApiError(400, NOT_FINITE, param="model", code="not_finite", hint=hint)
