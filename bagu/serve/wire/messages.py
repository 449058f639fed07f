"""The messages between the HTTP server's process (http/process.py) and the engine process (worker/).

    server process (asyncio)                        engine process
    EngineProcess.submit   -> Submit, Abort, ... ->  a thread reads the socket; the main loop handles messages, steps
    PendingCalls.deliver   <- StepEvents         <-  the events of a step, or of several short steps (`EventBuffer`)

encode.py encodes them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bagu.parallel.unlike.profile import StepCost
from bagu.serve.adapters.info import AdapterInfo
from bagu.serve.config import GenerationDefaults
from bagu.serve.images.prompt import ImageSpec
from bagu.serve.kv.groups import LayerGroup
from bagu.serve.message.format import finds_reasoning
from bagu.serve.message.forms import ToolForm, find_form
from bagu.serve.request import Event, Request
from bagu.types import Tokenizer

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    from bagu.nn.model import Transformer
    from bagu.nn.vision.vlm import VLM

Load = Callable[
    [], "tuple[Transformer | VLM, Tokenizer, Chat | None]"
]  # model, tokenizer, chat encoder or None; picklable


class Submit(NamedTuple):
    requests: tuple[Request, ...]


class Abort(NamedTuple):
    request_ids: tuple[str, ...]


class Embed(NamedTuple):
    call: int
    texts: tuple[tuple[int, ...], ...]


class Cancel(NamedTuple):
    """The client of this call has disconnected; its result is not needed."""

    call: int


class GetStats(NamedTuple):
    call: int


class LoadAdapter(NamedTuple):
    """Load the LoRA adapter at a path of this machine under a name."""

    call: int
    name: str
    path: str


class UnloadAdapter(NamedTuple):
    call: int
    name: str


class GetIndex(NamedTuple):
    """Send the keys of all cached blocks: a `CacheChanges` was lost."""


class Stop(NamedTuple):
    pass


class Template(Protocol):
    """The part of `data.ChatTemplate` that the server uses."""

    @property
    def source(self) -> str: ...


class Encoded(Protocol):
    """The part of `data.EncodedChat` that the server uses."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def mask(self) -> list[int]: ...


class Chat(Protocol):
    """The part of `data.ChatEncoder` that the server uses."""

    @property
    def template(self) -> Template: ...
    @property
    def turn_ends(self) -> tuple[int, ...]: ...
    def prompt_text(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str: ...
    def prompt_tokens(self, text: str) -> list[int]: ...
    def encode(self, messages: Sequence[dict[str, Any]], **variables: Any) -> Encoded: ...


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a router over several engines knows of one: the cost of its steps, and how it caches prefixes."""

    cost: StepCost
    slots: int  # choices that run at the same time
    step_tokens: int
    block_size: int = 1
    groups: tuple[LayerGroup, ...] = ()  # none: no prefixes are cached


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Sent when the engine is warmed up, with the properties of the model that the server needs."""

    tokenizer: Tokenizer
    chat: Chat | None
    generates: bool  # True for a causal language model, False for an encoder or a reward model
    max_model_len: int
    vocab_size: int
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    scores: bool = False  # True for a reward model
    adapters: tuple[AdapterInfo, ...] = ()  # LoRA adapters that were loaded at the start
    loads_adapters: bool = False  # whether requests may load and unload adapters
    capacity: Capacity | None = None  # measured if `EngineConfig.is_replica`
    images: ImageSpec | None = None  # None: a model of text alone

    @property
    def embeds(self) -> bool:
        return not (self.generates or self.scores)

    @property
    def other_use(self) -> str:
        """What a model does that does not generate, for error messages."""
        return "scores text" if self.scores else "embeds text"

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """The form in which this model writes tool calls."""
        return None if self.chat is None else find_form(self.chat.template.source, self.tool_parser)

    @cached_property
    def thinks(self) -> bool:
        """Whether messages may begin with reasoning in <think> tags."""
        return self.chat is not None and finds_reasoning(self.chat.template.source, self.reasoning_parser)

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """The tokens that end the assistant's turn, in addition to the end-of-text token."""
        return () if self.chat is None else self.chat.turn_ends

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of n tokens has at most n times as many characters. It takes 0.1 s for a
        vocabulary of 150,000, so the engine process computes it before it sends `Ready`."""
        tokenizer = self.tokenizer
        return max(1, max(len(tokenizer.bytes_of(token)) for token in range(tokenizer.vocab_size)))

    @property
    def system_role(self) -> str:
        """The chat template's role for OpenAI's `developer` messages: most templates have only `system`."""
        return "developer" if self.chat is not None and "developer" in self.chat.template.source else "system"

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Control tokens by name. The protocol `Tokenizer` does not include them."""
        found: Mapping[str, int] = getattr(self.tokenizer, "special_ids", {})
        return found

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which have no text in a response."""
        return frozenset(self.special_tokens.values())


class StepEvents(NamedTuple):
    """The events of a step. `first_tokens` has a pair for each request whose first token is among them: the seconds in
    the queue, and from its first step to the token. (Plain tuples, for marshal.)"""

    events: list[Event]
    first_tokens: Sequence[tuple[float, float]] = ()


class CacheChanges(NamedTuple):
    """The blocks of the prefix cache that changed, by group and key. `cleared`: only those in `entered` are left.
    Numbers count from 0: a gap is a lost message."""

    number: int
    cleared: bool
    entered: Sequence[tuple[int, bytes]]
    left: Sequence[tuple[int, bytes]]


class Accepted(NamedTuple):
    request_id: str


class Refused(NamedTuple):
    request_id: str
    message: str
    hint: str
    param: str | None
    status: int = 400


class Result(NamedTuple):
    """The result of a message with a call's number, or an error message and its HTTP status."""

    call: int
    value: Any
    error: str | None = None
    status: int = 400


class Adapters(NamedTuple):
    """The LoRA adapters that are loaded now; sent when they change."""

    infos: tuple[AdapterInfo, ...]


class Warming(NamedTuple):
    """The model is loaded; the warm-up begins."""


class Failed(NamedTuple):
    """The process is about to end because of an error."""

    reason: str
