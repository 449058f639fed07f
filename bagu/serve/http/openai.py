"""What clients may send: the bodies of OpenAI's API with vLLM's extras, checked, and turned into `Request`s.

A body is strict about types ("0.7" is no temperature), takes null for "the default", and lets unknown fields pass, as
clients of other servers send them. A field that another server has and this one cannot honour is refused (fields.py):
an answer that ignores what was asked is worse than none.
"""

from __future__ import annotations

import json
import re
import reprlib
import time
import uuid
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bagu.errors import ArgumentError
from bagu.serve.http import fields
from bagu.serve.http.fields import refuse_unsupported
from bagu.serve.http.texts import SHORT, check_tokens, each, encode, encode_each, render, room
from bagu.serve.http.tickets import ApiError
from bagu.serve.http.worker import Ready
from bagu.serve.request import BIASES, PENALTIES, REPETITIONS, Request, Sampling

__all__ = ["ChatBody", "CompletionBody", "DetokenizeBody", "EmbeddingBody", "Job", "TokenizeBody", "parse"]

# formats of schemas, in place of which openapi.py writes the limits of the model that is served
TOKEN_ID, NUM_TOKENS, MODEL_NAME = "token-id", "num-tokens", "model-name"
LARGEST = 2**63 - 1
INT64 = Annotated[int, Field(ge=-LARGEST - 1, le=LARGEST)]
AnyId = Annotated[int, Field(ge=0, le=LARGEST)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST, json_schema_extra={"format": TOKEN_ID})]
Count = Annotated[int, Field(ge=0, le=LARGEST, json_schema_extra={"format": NUM_TOKENS})]
ModelName = Annotated[str, Field(json_schema_extra={"format": MODEL_NAME})]
Word = Annotated[str, Field(min_length=1)]
# fail_fast: without it a list of a million wrong values is a million errors, forty seconds and 5 GB of them
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 2048  # of one call, as OpenAI has it for embeddings
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI has it; a chat goes on to the end of the context
Texts = Annotated[
    Word
    | Ids
    | Annotated[list[Word], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)],
    Field(
        description="a text, a list of texts, a list of token ids (0 or more), or a list of such lists, none of them "
        f"empty; up to {MAX_PROMPTS} prompts"
    ),
]
CLOSED: dict[str, Any] = {"additionalProperties": False}  # no key but those of the pattern
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,19}$")]  # a token id, as a key of JSON
Bias = Annotated[float, Field(ge=BIASES[0], le=BIASES[1])]
Penalty = Annotated[float, Field(ge=PENALTIES[0], le=PENALTIES[1])]


class Job(NamedTuple):
    """A call, ready for the engine. Choice i of prompt p has the index p * n + i in the reply."""

    id: str
    requests: tuple[Request, ...]
    echo: tuple[str, ...] | None  # the prompts as text, where the reply is to begin with them
    stream: bool
    include_usage: bool
    skip_special_tokens: bool


class Body(BaseModel):
    """`unsupported` are fields of other servers' bodies that would change the answer (fields.py)."""

    model_config = ConfigDict(strict=True, extra="allow")
    unsupported: ClassVar[fields.Fields] = {}

    def refuse_unsupported(self) -> None:
        refuse_unsupported(self.model_extra or {}, self.unsupported)


B = TypeVar("B", bound=Body)


class StreamOptions(Body):
    include_usage: bool | None = None


class Generation(Body):
    """The fields that `/v1/completions` and `/v1/chat/completions` share. None is the default of `Sampling`."""

    model: ModelName | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] | None = Field(
        None, description="a count, or 0 or -1 for all tokens"
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Annotated[
        Word | Annotated[list[Word], Field(max_length=16)] | None,
        Field(description="a text, or a list of up to 16, none of them empty"),
    ] = None
    stop_token_ids: Annotated[list[AnyId], Field(fail_fast=True)] | None = None  # an id outside is never drawn
    seed: INT64 | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024, json_schema_extra=CLOSED)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=REPETITIONS[0], le=REPETITIONS[1])] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    priority: INT64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return self.num_prompts * (self.n or 1)

    def check(self) -> None:
        """Refuse what contradicts itself, and what this server cannot do."""
        self.refuse_unsupported()
        if self.stream_options is not None:
            refuse_unsupported(self.stream_options.model_extra or {}, fields.STREAM_OPTIONS, within="stream_options")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options without stream", param="stream_options", hint='add "stream": true')
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs with stream", param="prompt_logprobs", hint="leave one of them out")

    def sampling(self, ready: Ready, **changes: Any) -> Sampling:
        """These fields as `Sampling`, `changes` on top; what was not sent is the model's default, or `Sampling`'s."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given = {
            "temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p, "n": self.n, "seed": self.seed,
            "top_k": self.top_k,
            "presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty, "min_tokens": self.min_tokens,
            "logit_bias": _logit_bias(self.logit_bias, ready.vocab_size), "stop": stop,
            "stop_token_ids": tuple(self.stop_token_ids or ()), "ignore_eos": self.ignore_eos,
            "include_stop": self.include_stop_str_in_output, "prompt_logprobs": self.prompt_logprobs, **changes,
        }  # fmt: skip
        chosen = {**ready.defaults.sampling, **{name: value for name, value in given.items() if value is not None}}
        if self.top_k in (-1, 0):  # vLLM's "all", whatever the default
            chosen["top_k"] = None
        try:
            return Sampling(**chosen)
        except ArgumentError as error:
            field = re.match(r"sampling: (\w+)", str(error))
            raise ApiError(400, str(error), param=field and field[1], hint=error.hint) from error

    def job(self, kind: str, prompts: list[list[int]], sampling: Sampling, echo: list[str] | None) -> Job:
        id, now = f"{kind}-{uuid.uuid4().hex}", time.monotonic()  # one clock for all processes of a machine
        requests = tuple(
            Request(id=f"{id}-{i}", prompt=tuple(prompt), sampling=sampling, priority=self.priority or 0, arrival=now)
            for i, prompt in enumerate(prompts)
        )
        usage = self.stream_options is not None and bool(self.stream_options.include_usage)
        skip = self.skip_special_tokens is not False
        return Job(id, requests, None if echo is None else tuple(echo), bool(self.stream), usage, skip)


class CompletionBody(Generation):
    unsupported: ClassVar[fields.Fields] = fields.COMPLETION
    prompt: Texts
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None

    def to_job(self, ready: Ready) -> Job:
        self.check()
        if self.echo and self.stream and self.logprobs is not None:
            raise ApiError(400, "echo with logprobs and stream", param="echo", hint="leave one of the three out")
        prompts = encode_each(self.prompt, ready, "prompt")
        left = room(prompts, self.max_tokens, ready.max_model_len, "prompt")
        default = min(DEFAULT_MAX_TOKENS, left, ready.defaults.max_tokens or left)
        max_tokens = default if self.max_tokens is None else self.max_tokens
        changes: dict[str, Any] = {"max_tokens": max_tokens}
        if self.logprobs is not None:
            changes["logprobs"] = self.logprobs
        if self.prompt_logprobs is None and self.echo and (self.logprobs is not None or max_tokens == 0):
            changes["prompt_logprobs"] = self.logprobs or 0
        echo = [ready.tokenizer.decode(p) for p in prompts] if self.echo else None
        return self.job("cmpl", prompts, self.sampling(ready, **changes), echo)

    @property
    def num_prompts(self) -> int:
        return len(each(self.prompt))


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def plain(self) -> dict[str, Any]:
        """As a template reads it: parts joined to one text, unknown fields kept."""
        parts = self.content
        text = "\n".join(part.text for part in parts) if isinstance(parts, list) else parts or ""
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class ChatBody(Generation):
    unsupported: ClassVar[fields.Fields] = fields.CHAT
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        """Tools may be listed where none is to be called; the prompt does not name them then."""
        sent = dict(self.model_extra or {})
        for choice, listed in (("tool_choice", "tools"), ("function_call", "functions")):
            if sent.get(choice) == "none":
                sent.pop(listed, None)
        refuse_unsupported(sent, self.unsupported)

    def to_job(self, ready: Ready) -> Job:
        self.check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs without logprobs", param="top_logprobs", hint='add "logprobs": true')
        prompt = self.prompt_ids(ready)
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        left = room([prompt], asked, ready.max_model_len, "messages")
        stops = {*(self.stop_token_ids or ()), *(() if self.ignore_eos else ready.turn_ends)}
        sampling = self.sampling(
            ready, max_tokens=min(left, ready.defaults.max_tokens or left) if asked is None else asked,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None, stop_token_ids=tuple(sorted(stops)),
        )  # fmt: skip
        return self.job("chatcmpl", [prompt], sampling, None)

    def prompt_ids(self, ready: Ready) -> list[int]:
        return render(ready, [m.plain() for m in self.messages], self.chat_template_kwargs or {})


def _given(one: str, other: str) -> dict[str, Any]:
    """The schema of a body that has one of two fields; null is as good as nothing."""
    return {"required": [one], "properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}}}


class TokenizeBody(Body):
    """Text, or messages as a chat renders them."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_given("prompt", "messages"), _given("messages", "prompt")]})
    unsupported: ClassVar[fields.Fields] = fields.TOKENIZE
    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None  # of a prompt; a chat's are its template's

    def ids(self, ready: Ready) -> list[int]:
        self.refuse_unsupported()
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "one of prompt and messages is to be given", param="prompt")
        if self.prompt is not None:
            return encode(self.prompt, ready, "prompt", add_special_tokens=self.add_special_tokens is not False)
        if self.add_special_tokens:
            hint = "the chat template writes them: leave it out"
            raise ApiError(400, "add_special_tokens with messages", param="add_special_tokens", hint=hint)
        return render(ready, [m.plain() for m in self.messages or ()], {})


class DetokenizeBody(Body):
    unsupported: ClassVar[fields.Fields] = fields.DETOKENIZE
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

    def text(self, ready: Ready) -> str:
        self.refuse_unsupported()
        most = max(SHORT, ready.max_model_len)
        if len(self.tokens) > most:
            hint = f"at most {most}; this model's longest sequence is {ready.max_model_len}"
            raise ApiError(400, f"{len(self.tokens)} tokens", param="tokens", code="context_length_exceeded", hint=hint)
        check_tokens(self.tokens, ready, "tokens")
        return ready.tokenizer.decode(self.tokens)


class EmbeddingBody(Body):
    unsupported: ClassVar[fields.Fields] = fields.EMBEDDING
    model: ModelName | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] | None = None

    def texts(self, ready: Ready) -> list[list[int]]:
        self.refuse_unsupported()
        if ready.generates:
            raise ApiError(400, "this model generates text and has no embeddings", hint="serve an encoder, as BERT is")
        texts = encode_each(self.input, ready, "input")
        room(texts, 0, ready.max_model_len, "input")
        return texts


def parse(kind: type[B], raw: bytes) -> B:
    """A body from its bytes; 400 with what is wrong and where."""
    try:
        data = json.loads(raw, parse_constant=_no_constant, parse_float=_number)
        if b"\\u" in raw:
            json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair is no text, and no reply can say it
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply to be read") from error
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ApiError(400, f"the body is not UTF-8 text: {error.reason} at {error.start}") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        loc = first["loc"]
        known = kind.model_fields.get(str(loc[0])) if loc else None
        if first["type"] != "missing" and known is not None and known.description:  # of several kinds: none fits
            message = f"{loc[0]} is {known.description}, and {_short(data[loc[0]])} was sent"
            raise ApiError(400, message, param=str(loc[0])) from error
        where = ".".join(str(part) for part in loc[:2]) or None
        found = "" if first["type"] == "missing" else f", and {_short(first['input'])} was sent"
        raise ApiError(400, f"{where or 'the body'}: {first['msg']}{found}", param=where) from error


def _logit_bias(given: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if given is None:
        return None
    if bad := [key for key in given if int(key) >= vocab_size]:
        raise ApiError(400, f"logit_bias: {bad[0]} is no token id below {vocab_size}", param="logit_bias")
    return {int(key): value for key, value in given.items()}


def _number(text: str) -> float | int:
    """JSON has one kind of number: 16.0 is an integer, as schemas and other servers have it."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _short(value: Any) -> str:
    """In at most 80 characters; what is left out is not written first, which for a body of 6 MB took 0.2 s."""
    brief = reprlib.Repr()
    brief.maxstring = 80
    text = brief.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
