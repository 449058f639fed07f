"""Response bodies as pydantic models, only for `/openapi.json`: responses.py and api.py build the JSON directly.

The chunks of a stream have the same fields; document.py describes them in text, since OpenAPI 3.1 has no schema for a
sequence of events.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FailureDetail(Schema):
    message: str
    type: str
    param: str | None  # the field to change
    code: str | int


class Failure(Schema):
    error: FailureDetail


class CachedTokens(Schema):
    cached_tokens: int  # prompt tokens found in the prefix cache


class ReasoningTokens(Schema):
    reasoning_tokens: int  # completion tokens before the end of the reasoning


class Usage(Schema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None  # only for a model that thinks


class ScoredToken(Schema):
    logprob: float
    decoded_token: str


class Choice(Schema):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None  # the stop string or stop token; null for the end-of-text token
    prompt_logprobs: list[dict[str, ScoredToken] | None] = []  # only if requested; by token id


class TokenLogprob(Schema):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Schema):
    content: list[ChosenToken]


class CalledFunction(Schema):
    name: str
    arguments: str  # a JSON object


class ToolCall(Schema):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Source(Schema):
    number: int  # of the mark that cites it
    vector_store_id: str
    file_id: str
    filename: str
    line: int
    score: float
    text: str
    attributes: dict[str, str | float | bool]


class UrlCitation(Schema):
    start_index: int
    end_index: int
    title: str
    url: str


class Annotation(Schema):
    type: Literal["url_citation"]
    url_citation: UrlCitation
    number: int
    verified: bool
    why: str  # why it is not verified


class AssistantMessage(Schema):
    role: Literal["assistant"]
    content: str | None  # null if the message only calls tools
    reasoning_content: str | None = None  # only for a model that thinks
    tool_calls: list[ToolCall] = []  # only if the message calls tools
    sources: list[Source] = []  # only with file_search: the passages that were sent with the question
    annotations: list[Annotation] = []  # only with file_search: the marks [1], [2] that name a source


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Schema):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class OutputItem(BaseModel):
    """A message, a function call, a search or reasoning; its other fields depend on the type."""

    id: str
    type: Literal["message", "function_call", "file_search_call", "reasoning"]
    status: Literal["completed", "incomplete"]


class InputDetails(Schema):
    cached_tokens: int


class ResponseUsage(Schema):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ModelResponse(BaseModel):
    """A response of the Responses API; further fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage
    previous_response_id: str | None


class DeletedResponse(Schema):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class TextLogprobs(Schema):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Choice):
    text: str
    logprobs: TextLogprobs | None


class Completion(Schema):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class EmbeddingUsage(Schema):
    prompt_tokens: int
    total_tokens: int


class Embedding(Schema):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # a string if encoding_format is base64: little-endian fp32


class EmbeddingList(Schema):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Score(Schema):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(Schema):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Document(Schema):
    text: str


class RankedDocument(Schema):
    index: int  # in the request
    relevance_score: float
    document: Document | None = None  # unless return_documents is false


class Reranked(Schema):
    id: str
    model: str
    results: list[RankedDocument]  # best first
    usage: EmbeddingUsage


class DefaultSampling(Schema):
    """The defaults for fields that a chat request leaves out."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int | None  # None: up to the model's longest sequence


class Model(Schema):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None = None  # of a LoRA adapter: the base model
    max_model_len: int = 0  # only after the model is loaded
    default_sampling: DefaultSampling | None = None  # None for an encoder
    suggested_prompts: list[str] = []  # of generation_config.json, for the chat page
    images: bool = False  # whether messages may have images


class ModelList(Schema):
    object: Literal["list"]
    data: list[Model]


class Tokenized(Schema):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(Schema):
    prompt: str


class ReplicaState(Schema):
    """One of several engines of the model (`bagu serve --replicas`)."""

    replica: int
    device: str
    state: Literal["loading", "warming", "ready", "restarting", "failed", "draining", "stopped"]
    reason: str = ""


class Health(Schema):
    status: Literal["ok"]
    replicas: list[ReplicaState] = []


class Unhealthy(Schema):
    status: Literal["unhealthy"]
    reason: str
    replicas: list[ReplicaState] = []


class Version(Schema):
    version: str


class Blocks(Schema):
    total: int
    used: int
    cached: int
    map: str  # one character per block: u used, c cached, . free


class EngineState(Schema):
    tokens_per_s: float
    running: int
    waiting: int
    batch_size: int
    tick_ms: float
    preemptions: int
    ttft_ms_p50: float | None
    engine_ttft_ms_p50: float | None
    prefix_hit_percent: float | None
    draft_accept_percent: float | None
    tokens_per_draft: float | None
    generated_tokens: int
    steps: int
    blocks: Blocks
