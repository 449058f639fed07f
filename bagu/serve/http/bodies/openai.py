"""Request bodies of the OpenAI API with vLLM's extra parameters: validation, and conversion to `Request`s.

Types are strict ("0.7" is not a temperature), null means the default, and unknown fields are ignored, since clients of
other servers send them. A field that other servers support and this one does not is refused (fields.py), because a
response that ignores it would be wrong.
"""

import re
import time
import uuid
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from bagu.errors import ArgumentError
from bagu.serve.http.bodies import fields
from bagu.serve.http.bodies.fields import refuse_unsupported
from bagu.serve.http.bodies.structured import ResponseFormat, StructuredOutputs, grammar_of
from bagu.serve.http.bodies.texts import as_list, encode_all, tokens_left
from bagu.serve.http.errors import ApiError
from bagu.serve.message.format import MessageFormat
from bagu.serve.request import BIASES, PENALTIES, REPETITIONS, Request, Sampling
from bagu.serve.wire.messages import Ready

# schema formats that openapi/document.py replaces with the limits of the loaded model
TOKEN_ID, NUM_TOKENS, MODEL_NAME = "token-id", "num-tokens", "model-name"
LARGEST = 2**63 - 1
INT64 = Annotated[int, Field(ge=-LARGEST - 1, le=LARGEST)]
AnyId = Annotated[int, Field(ge=0, le=LARGEST)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST, json_schema_extra={"format": TOKEN_ID})]
Count = Annotated[int, Field(ge=0, le=LARGEST, json_schema_extra={"format": NUM_TOKENS})]
ModelName = Annotated[str, Field(json_schema_extra={"format": MODEL_NAME})]
Word = Annotated[str, Field(min_length=1)]
# fail_fast: without it, a list of a million wrong values makes a million errors, which take 40 s and 5 GB
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 2048  # per call, OpenAI's limit for embeddings
DEFAULT_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may use the rest of the context
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
SAME_NAME = (  # fields of `Sampling`
    "temperature", "top_p", "top_k", "min_p", "n", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "ignore_eos", "prompt_logprobs",
)  # fmt: skip
CLOSED: dict[str, Any] = {"additionalProperties": False}  # only keys that match the pattern
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,19}$")]  # a token id as a JSON key
Bias = Annotated[float, Field(ge=BIASES[0], le=BIASES[1])]
Penalty = Annotated[float, Field(ge=PENALTIES[0], le=PENALTIES[1])]
Repetition = Annotated[float, Field(ge=REPETITIONS[0], le=REPETITIONS[1])]


class Job(NamedTuple):
    """The engine requests of a call and its response options. Choice i of prompt p has index p * n + i in the
    response."""

    id: str
    requests: tuple[Request, ...]
    echo: tuple[str, ...] | None  # the prompts as text, if the response begins with them
    stream: bool
    include_usage: bool
    skip_special_tokens: bool
    format: MessageFormat | None = None  # how the text is parsed; None: it is the content


class Body(BaseModel):
    """A request body. `unsupported` are fields of other servers that would change the response (fields.py)."""

    model_config = ConfigDict(strict=True, extra="allow")
    unsupported: ClassVar[fields.Fields] = {}

    def refuse_unsupported(self) -> None:
        refuse_unsupported(self.model_extra or {}, self.unsupported)


class StreamOptions(Body):
    include_usage: bool | None = None


class Sampled(Body):
    """The fields that all APIs which generate text share. None means the model's default."""

    model: ModelName | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] | None = Field(
        None, description="a number of tokens, or 0 or -1 for all tokens"
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: Annotated[
        Word | Annotated[list[Word], Field(fail_fast=True, max_length=16)] | None,
        Field(description="a non-empty string, or a list of up to 16 of them"),
    ] = None
    seed: INT64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    ignore_eos: bool | None = None
    priority: INT64 | None = None
    stream: bool | None = None
    structured_outputs: StructuredOutputs | None = None


class Generation(Sampled):
    """The fields that `/v1/completions` and `/v1/chat/completions` share."""

    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop_token_ids: Annotated[list[AnyId], Field(fail_fast=True)] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024, json_schema_extra=CLOSED)] | None = None
    min_tokens: Count | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_choices(self) -> int:
        """The choices of all prompts together."""
        return self.num_prompts * (self.n or 1)

    @property
    def grammar_field(self) -> str:
        """The field that a refused grammar came from."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def check(self) -> None:
        """Raise 400 for contradictory and unsupported fields."""
        self.refuse_unsupported()
        if self.stream_options is not None:
            refuse_unsupported(self.stream_options.model_extra or {}, fields.STREAM_OPTIONS, within="stream_options")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream", param="stream_options", hint='add "stream": true')
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(
                400, "prompt_logprobs cannot be streamed", param="prompt_logprobs", hint="leave one of them out"
            )

    def sampling(self, ready: Ready, **changes: Any) -> Sampling:
        """`Sampling` from these fields, overridden by `changes`. A missing field has the model's default, or that of
        `Sampling`."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given = {name: getattr(self, name) for name in SAME_NAME} | {
            "logit_bias": _logit_bias(self.logit_bias, ready.vocab_size),
            "stop": stop,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "include_stop": self.include_stop_str_in_output,
            "grammar": grammar_of(self.response_format, self.structured_outputs),
            **changes,
        }
        chosen = {**ready.defaults.sampling, **{name: value for name, value in given.items() if value is not None}}
        if self.top_k in (-1, 0):  # all tokens, as in vLLM, also if the model has another default
            chosen["top_k"] = None
        # Ids outside the vocabulary have no effect, but with min_tokens every step would visit them.
        stops = dict.fromkeys(id for id in chosen["stop_token_ids"] if id < ready.vocab_size)
        chosen["stop_token_ids"] = tuple(stops)
        try:
            return Sampling(**chosen)
        except ArgumentError as error:
            field = re.match(r"sampling: (\w+)", str(error))
            raise ApiError(400, str(error), param=field and field[1], hint=error.hint) from error

    def job(self, kind: str, prompts: list[list[int]], sampling: Sampling, echo: list[str] | None) -> Job:
        id, now = f"{kind}-{uuid.uuid4().hex}", time.monotonic()  # the same clock in all processes of a machine
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
            raise ApiError(
                400, "echo, logprobs and stream cannot be combined", param="echo", hint="leave one of the three out"
            )
        prompts = encode_all(self.prompt, ready, "prompt")
        left = tokens_left(prompts, self.max_tokens, ready.max_model_len, "prompt")
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
        return len(as_list(self.prompt))


class EmbeddingBody(Body):
    unsupported: ClassVar[fields.Fields] = fields.EMBEDDING
    model: ModelName | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] | None = None

    def texts(self, ready: Ready) -> list[list[int]]:
        self.refuse_unsupported()
        if not ready.embeds:
            if ready.generates:
                hint = "start a server of this model with --embeddings, which pools the last state; or use an encoder"
                raise ApiError(400, "this server generates text and has no embeddings", hint=hint)
            raise ApiError(400, "this model scores text and has no embeddings", hint="use an encoder such as BERT")
        texts = encode_all(self.input, ready, "input")
        tokens_left(texts, 0, ready.max_model_len, "input")
        return texts


def _logit_bias(given: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if given is None:
        return None
    if bad := [key for key in given if int(key) >= vocab_size]:
        raise ApiError(400, f"logit_bias: {bad[0]} is not a token id below {vocab_size}", param="logit_bias")
    return {int(key): value for key, value in given.items()}
