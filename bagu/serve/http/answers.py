"""The bodies of answers as models, for `/openapi.json`: responses.py and api.py write them without.

A stream's events are chunks of the same names; they are described in words (openapi.py), since OpenAPI 3.1 has no word
for a sequence of events.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "ChatCompletion", "Completion", "Detokenized", "EmbeddingList", "EngineState", "Failure", "Health", "Model",
    "ModelList", "Tokenized", "Unhealthy", "Version",
]  # fmt: skip


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FailureDetail(Answer):
    message: str
    type: str
    param: str | None  # the field to change
    code: str | int


class Failure(Answer):
    error: FailureDetail


class CachedTokens(Answer):
    cached_tokens: int  # of the prompt, found in the prefix cache


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ScoredToken(Answer):
    logprob: float
    decoded_token: str


class Choice(Answer):
    index: int
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None  # the stop string or stop token; null for the end of text
    prompt_logprobs: list[dict[str, ScoredToken] | None] = []  # where they were asked for; by token id


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ChosenToken]


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Choice):
    text: str
    logprobs: TextLogprobs | None


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # a text where encoding_format is base64: little-endian fp32


class EmbeddingList(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class DefaultSampling(Answer):
    """What holds where a chat does not set a field."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int | None  # None: what fits


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = 0  # once the model is loaded
    default_sampling: DefaultSampling | None = None  # not of an encoder


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class Tokenized(Answer):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(Answer):
    prompt: str


class Health(Answer):
    status: Literal["ok"]


class Unhealthy(Answer):
    status: Literal["unhealthy"]
    reason: str


class Version(Answer):
    version: str


class Blocks(Answer):
    total: int
    used: int
    cached: int
    map: str  # one character a block: u used, c cached, . free


class EngineState(Answer):
    tokens_per_s: float
    running: int
    waiting: int
    batch_size: int
    tick_ms: float
    preemptions: int
    ttft_ms_p50: float | None
    engine_ttft_ms_p50: float | None
    prefix_hit_percent: float | None
    generated_tokens: int
    steps: int
    blocks: Blocks
