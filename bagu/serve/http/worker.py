"""The engine's process, and the messages between it and the server (process.py).

    server process (asyncio)                        engine process
    EngineProcess.submit   -> Submit, Abort, ... ->  `_drain` empties the socket, the loop applies what came and steps
    Tickets.deliver        <- Step(events)       <-  all events of a step, or of several short ones (`Outbox`)

A message is what `multiprocessing.connection.Connection` reads and writes: 4 bytes of length, then the content.

`Step` is also the heartbeat: it is sent after each step, or each `HOLD_S` where steps are shorter, and each second when
idle. When the server dies the socket ends, and so does this process: no orphan holds the GPU.
"""

from __future__ import annotations

import marshal
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bagu.errors import BaguError
from bagu.serve.config import EngineConfig, GenerationDefaults
from bagu.serve.embedding import Encoder, embed
from bagu.serve.request import Event, Request, Sampling, TokenEvent, Unservable
from bagu.types import Tokenizer

if TYPE_CHECKING:  # the server's process has no need of them
    from bagu.nn.model import Transformer
    from bagu.serve.engine import Engine

__all__ = [
    "STEP", "Abort", "Accepted", "Answer", "AskStats", "Cancel", "Chat", "Embed", "Failed", "Load", "Ready", "Refused",
    "Step", "Stop", "Submit", "packed", "run",
]  # fmt: skip

Load = Callable[[], "tuple[Transformer, Tokenizer, Chat | None]"]  # model, tokenizer, chat encoder or None; picklable
Inbox = queue.SimpleQueue[tuple[float, Any]]  # messages, and when they came by `time.perf_counter`
HEARTBEAT_S = 1.0
HOLD_S = 0.004  # how long a token may wait for those of the next steps; a display draws every 0.016
STEP = b"S"  # a `Step` by marshal begins with it, and no pickle does


class Submit(NamedTuple):
    requests: tuple[Request, ...]


class Abort(NamedTuple):
    request_ids: tuple[str, ...]


class Embed(NamedTuple):
    call: int
    texts: tuple[tuple[int, ...], ...]


class Cancel(NamedTuple):
    """Nobody waits for the answer of this call any more."""

    call: int


class AskStats(NamedTuple):
    call: int


class Stop(NamedTuple):
    pass


class Template(Protocol):
    """The part of `data.ChatTemplate` that a server reads."""

    @property
    def source(self) -> str: ...


class Chat(Protocol):
    """The part of `data.ChatEncoder` that a server calls."""

    @property
    def template(self) -> Template: ...
    def prompt(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]: ...
    def encode(self, messages: Sequence[dict[str, Any]]) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The engine is warm: what the server needs to know of it."""

    tokenizer: Tokenizer
    chat: Chat | None
    generates: bool  # a causal model; the others embed
    max_model_len: int
    vocab_size: int
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """The token the assistant's turn ends with, as the template writes it: a chat stops there, not only at the end
        of text. None where the template does not say what is the assistant's."""
        if self.chat is None:
            return ()
        try:
            said = self.chat.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except BaguError:
            return ()
        return (said.ids[max(i for i, mine in enumerate(said.mask) if mine)],)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the token that stands for the most text: no text of n tokens has more than n times as many
        characters. 0.1 s for a vocabulary of 150,000; the engine's process asks first, and the answer is sent along."""
        tokenizer = self.tokenizer
        return max(1, max(len(tokenizer.bytes_of(token)) for token in range(tokenizer.vocab_size)))

    @property
    def system_role(self) -> str:
        """The role by which the chat template knows OpenAI's `developer`: most templates have only `system`."""
        return "developer" if self.chat is not None and "developer" in self.chat.template.source else "system"

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which have no text in a reply. The protocol `Tokenizer` has no word for them."""
        return frozenset(getattr(self.tokenizer, "special_ids", {}).values())


class Step(NamedTuple):
    """What came of one step, and for each request whose first token is in it the seconds that it waited for the first
    step with it, and from there to the token (plain pairs, for marshal)."""

    events: list[Event]
    first_tokens: Sequence[tuple[float, float]] = ()


class Accepted(NamedTuple):
    request_id: str


class Refused(NamedTuple):
    request_id: str
    message: str
    hint: str
    param: str | None


class Answer(NamedTuple):
    """What `Embed` or `AskStats` asked for; an error is its message."""

    call: int
    value: Any
    error: str | None = None


class Failed(NamedTuple):
    """The process is about to end, and why."""

    reason: str


def run(ours: socket.socket, load: Load, config: EngineConfig) -> None:
    """The process: load, warm up, say so, serve until told to stop. Any exception is reported, then ends it."""
    pipe = Connection(ours.detach())
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal signals the whole group; the server decides when
        signal.signal(number, signal.SIG_IGN)
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_drain, args=(pipe, inbox), daemon=True).start()
    try:
        model, tokenizer, chat = load()
        if model.config.causal:
            serve_generation(pipe, inbox, model, tokenizer, chat, config)
        else:
            serve_embeddings(pipe, inbox, model, tokenizer, chat, config)
    except Exception as error:
        if isinstance(error, BaguError):  # it says itself what is wrong
            why = f"{error}" + (f" ({error.hint})" if error.hint else "")
        else:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}, in {traceback.extract_tb(error.__traceback__)[-1].name}"
        send(pipe, Failed(why))
        sys.exit(1)


def serve_generation(
    pipe: Connection, inbox: Inbox, model: Transformer, tokenizer: Tokenizer, chat: Chat | None,
    config: EngineConfig,
) -> None:  # fmt: skip
    """Apply what came, step, send what came out: until Stop."""
    from bagu.serve.engine import Engine

    engine = Engine(model, tokenizer, config)
    _warm_up(engine)
    ready = Ready(
        tokenizer=tokenizer, chat=chat, generates=True, max_model_len=engine.max_model_len,
        vocab_size=model.config.vocab_size, defaults=config.generation,
    )  # fmt: skip
    _ = ready.longest_token
    send(pipe, ready)
    waiting: dict[str, float] = {}  # requests without a token: when they came
    outbox = Outbox(pipe)
    while True:
        found = _messages(inbox, wait=not engine.has_work)
        if found:
            outbox.flush()
        for came, message in found:
            if isinstance(message, Submit):
                for request in message.requests:
                    try:
                        engine.submit(request)
                        waiting[request.id] = came
                        send(pipe, Accepted(request.id))
                    except BaguError as error:  # what can never be served: the others go on
                        param = error.param if isinstance(error, Unservable) else None
                        send(pipe, Refused(request.id, str(error), error.hint, param))
            elif isinstance(message, Abort):
                for id in message.request_ids:
                    engine.abort(id)
                    waiting.pop(id, None)
            elif isinstance(message, AskStats):
                send(pipe, Answer(message.call, engine.stats()))
            elif isinstance(message, Embed):
                send(pipe, Answer(message.call, None, "this model generates text; embeddings are of encoder models"))
            elif isinstance(message, Stop):
                return
        if not engine.has_work:
            send_step(pipe, Step([]))
            continue
        events = engine.step()
        firsts = _first_tokens(events, waiting) if waiting else ()
        outbox.add(events, firsts, hurry=bool(firsts or waiting or engine.scheduler.waiting))


class Outbox:
    """What steps bring, on its way to the server.

    Every message wakes the server, which costs it 0.1 ms of a cold core however little is in it. Steps of a small model
    take less than a millisecond: their events go together, every HOLD_S. Whatever is not the plain next token of a
    stream goes at once, and so does everything while a prompt waits, since the step that computes it may be long.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.events = pipe, list[Event]()
        self.sent = self.stepped = time.perf_counter()

    def add(self, events: Sequence[Event], first_tokens: Sequence[tuple[float, float]], *, hurry: bool) -> None:
        """The events of a step that has just ended."""
        self.events += events
        now, before = time.perf_counter(), self.stepped
        self.stepped = now
        plain = all(isinstance(event, TokenEvent) and event.finish is None for event in events)
        if hurry or not plain or now - before >= HOLD_S or now - self.sent >= HOLD_S:
            self._send(first_tokens)

    def flush(self) -> None:
        if self.events:
            self._send(())

    def _send(self, first_tokens: Sequence[tuple[float, float]]) -> None:
        send_step(self.pipe, Step(self.events, first_tokens))
        self.events, self.sent = [], time.perf_counter()


def serve_embeddings(
    pipe: Connection, inbox: Inbox, model: Transformer, tokenizer: Tokenizer, chat: Chat | None,
    config: EngineConfig,
) -> None:  # fmt: skip
    """The same for an encoder: a step is a batch of texts."""
    model.mlm = None  # the head that predicts words is not part of what a text means
    embed(model, [(0,)])
    longest = min(model.config.max_len, config.max_model_len or model.config.max_len)
    vocab_size = model.config.vocab_size
    ready = Ready(tokenizer=tokenizer, chat=chat, generates=False, max_model_len=longest, vocab_size=vocab_size)
    _ = ready.longest_token
    send(pipe, ready)
    encoder = Encoder(model, config.step_tokens(model.embedding.weight.device.type))
    while True:
        for _, message in _messages(inbox, wait=not encoder.has_work):
            if isinstance(message, Embed):
                encoder.add(message.call, message.texts)
            elif isinstance(message, Cancel):
                encoder.cancel(message.call)
            elif isinstance(message, AskStats):
                send(pipe, Answer(message.call, encoder.stats()))
            elif isinstance(message, Stop):
                return
        for call, vectors in encoder.step() if encoder.has_work else ():
            send(pipe, Answer(call, vectors))
        send_step(pipe, Step([]))


def _messages(inbox: Inbox, *, wait: bool) -> list[tuple[float, Any]]:
    """What has come, and when; with `wait`, nothing only after a heartbeat's time."""
    found = []
    try:
        if wait:
            found.append(inbox.get(timeout=HEARTBEAT_S))
        while True:
            found.append(inbox.get_nowait())
    except queue.Empty:
        return found


def _drain(pipe: Connection, inbox: Inbox) -> None:
    """Empty the pipe while a step runs, and note when a message came."""
    try:
        while True:
            message = pipe.recv()
            inbox.put((time.perf_counter(), message))
    except (EOFError, OSError):  # the server is gone: so is the need for this process
        os._exit(0)


def _first_tokens(events: Sequence[Event], waiting: dict[str, float]) -> list[tuple[float, float]]:
    """How long requests waited for their first token and how long that took, of those whose first event is here; they
    wait no more. A request that wants its prompt scored and no token has none."""
    now, found = time.perf_counter(), []
    for event in events:
        if not isinstance(event, TokenEvent):
            continue
        came = waiting.pop(event.request_id, None)
        if came is not None and event.token is not None and event.started is not None:
            found.append((event.started - came, now - event.started))
    return found


def packed(message: Any) -> bytes:
    """A message with its length before it, as `Connection.recv` reads it."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(4, "big") + content


def send(pipe: Connection, message: Any) -> None:
    pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def send_step(pipe: Connection, step: Step) -> None:
    """`Step` as plain tuples by `marshal`, which looks up no class: the one message there is for every token."""
    if all(isinstance(event, TokenEvent) for event in step.events):
        pipe.send_bytes(STEP + marshal.dumps(([tuple(event) for event in step.events], tuple(step.first_tokens))))
    else:
        send(pipe, step)


def _warm_up(engine: Engine) -> None:
    """One short request through every stage, so that the first client does not pay for what is made on first use."""
    engine.submit(Request(id="warm-up", prompt=(0,), sampling=Sampling(max_tokens=2, temperature=0.5, ignore_eos=True)))
    while engine.has_work:
        engine.step()
