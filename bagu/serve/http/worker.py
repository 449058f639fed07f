"""The engine process: it reads the messages of the HTTP server's process (pipe.py), runs steps and sends their events.

`StepEvents` is also the heartbeat: it is sent after every step, or every `HOLD_S` if steps are shorter, and every
second when idle. If the server dies, the socket closes and this process exits, so that it does not hold the GPU.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from bagu.errors import ArgumentError, BaguError
from bagu.serve.config import EngineConfig
from bagu.serve.constrain.check import CheckedCompiler
from bagu.serve.embedding import Encoder, embed, score
from bagu.serve.http.adapter_loader import AdapterLoader, AdapterRead
from bagu.serve.http.pipe import (
    Abort,
    Accepted,
    Cancel,
    Chat,
    Embed,
    Failed,
    GetStats,
    Load,
    LoadAdapter,
    Ready,
    Refused,
    Result,
    StepEvents,
    Stop,
    Submit,
    UnloadAdapter,
    Warming,
    send,
    send_step,
)
from bagu.serve.request import Event, Request, Sampling, TokenEvent, Unservable
from bagu.types import Tokenizer

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    from bagu.nn.model import Transformer
    from bagu.serve.engine import Engine

__all__ = ["run"]

Messages = queue.SimpleQueue[tuple[float, Any]]  # (arrival by `time.perf_counter`, message)
Prepare = Callable[[], Callable[[], None]]  # loads and warms up; returns the function that serves
HEARTBEAT_S = 1.0
WARM_UP_TOKENS = 8  # of each warm-up prompt
HOLD_S = 0.004  # how long a token may wait for the tokens of the next steps; a display refreshes every 0.016 s


class Compiled(NamedTuple):
    """The grammar of this request is compiled, or refused; sent by a thread of the engine process."""

    request: Request


def run(
    ours: socket.socket, load: Load, config: EngineConfig, load_draft: Load | None = None,
    prepare_with: Callable[[Prepare], Callable[[], None]] = lambda prepare: prepare(),
) -> None:  # fmt: skip
    """The main function of the process: load, warm up, send `Ready`, then serve until `Stop`. An exception is sent to
    the server as `Failed` and ends the process. `load_draft` loads the draft model, if `config` names one.
    `prepare_with` runs the function that loads and warms up (engine_main.py: in a thread of low priority)."""
    pipe = Connection(ours.detach())
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal signals the whole process group; the server sends Stop
        signal.signal(number, signal.SIG_IGN)
    messages: Messages = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, messages), daemon=True).start()
    try:
        serve = prepare_with(partial(_prepare, pipe, messages, load, config, load_draft))
        serve()
    except Exception as error:
        if isinstance(error, BaguError):  # its message is enough
            reason = f"{error}" + (f" ({error.hint})" if error.hint else "")
        else:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}, in {traceback.extract_tb(error.__traceback__)[-1].name}"
        send(pipe, Failed(reason))
        if config.tp > 1:  # an exit would destroy the process group, which may wait for a rank that is gone
            sys.stderr.flush()
            os._exit(1)
        sys.exit(1)


def _prepare(
    pipe: Connection, messages: Messages, load: Load, config: EngineConfig, load_draft: Load | None
) -> Callable[[], None]:
    """Load the model and warm it up; returns the function that serves it."""
    model, tokenizer, chat = load()
    if not model.config.causal or model.config.score_head:
        return partial(serve_encoder, pipe, messages, model, tokenizer, chat, config)
    from bagu.serve.engine import Engine
    from bagu.serve.speculation.draft_model import DraftSource

    draft = None if load_draft is None else DraftSource(*load_draft()[:2])
    engine = Engine(model, tokenizer, config, draft=draft)
    engine.release_source()
    del model  # the engine has a part of it with tp > 1, and quantized weights with quantization
    send(pipe, Warming())
    warm_up(engine, config.warmup_prompts)

    def serve() -> None:
        serve_generation(pipe, messages, engine, chat)
        engine.close()

    return serve


def serve_generation(pipe: Connection, messages: Messages, engine: Engine, chat: Chat | None) -> None:
    """Handle messages, run steps and send their events, until `Stop`."""
    assert engine.tokenizer is not None
    ready = Ready(
        tokenizer=engine.tokenizer, chat=chat, generates=True, max_model_len=engine.max_model_len,
        vocab_size=engine.model.config.vocab_size, defaults=engine.config.generation,
        tool_parser=engine.config.tool_parser, reasoning_parser=engine.config.reasoning_parser,
        adapters=engine.adapters.infos, loads_adapters=engine.config.allow_adapter_loading,
    )  # fmt: skip
    _ = ready.longest_token
    if engine.config.max_adapters:
        print(f"bagu serve: {engine.adapters.room()}", file=sys.stderr, flush=True)
    send(pipe, ready)
    waiting: dict[str, float] = {}  # arrival times of requests without a token
    requests = RequestQueue(pipe, messages, engine, waiting)
    adapters = AdapterLoader(pipe, messages, engine)
    buffer = EventBuffer(pipe)
    while True:
        received = _take_messages(messages, wait=not engine.has_work)
        if received:
            buffer.flush()
        for arrival, message in received:
            if isinstance(message, Submit):
                for request in message.requests:
                    requests.submit(request, arrival)
            elif isinstance(message, Compiled):
                requests.compiled(message.request, arrival)
            elif isinstance(message, Abort):
                for id in message.request_ids:
                    requests.abort(id)
            elif isinstance(message, LoadAdapter):
                adapters.load(message)
            elif isinstance(message, AdapterRead):
                adapters.install(message)
            elif isinstance(message, UnloadAdapter):
                adapters.unload(message)
            elif isinstance(message, GetStats):
                send(pipe, Result(message.call, engine.stats()))
            elif isinstance(message, Embed):
                send(pipe, Result(message.call, None, "this model generates text; only encoder models embed"))
            elif isinstance(message, Stop):
                return
        if not engine.has_work:
            engine.check_ranks()
            send_step(pipe, StepEvents([]))
            continue
        events = engine.step()
        first_tokens = _first_tokens(events, waiting) if waiting else ()
        buffer.add(events, first_tokens, send_now=bool(first_tokens or waiting or engine.scheduler.waiting))


class RequestQueue:
    """Requests on their way into the engine. One with a new grammar waits here until other threads have compiled it,
    while the engine runs the others."""

    def __init__(self, pipe: Connection, messages: Messages, engine: Engine, waiting: dict[str, float]) -> None:
        self.pipe, self.messages, self.engine, self.waiting = pipe, messages, engine, waiting
        self._compiler = None if engine.grammars is None else CheckedCompiler(engine.grammars)
        self._compiling: set[str] = set()  # ids of requests

    def submit(self, request: Request, arrival: float) -> None:
        """Queue a request and send `Accepted`, now or when its grammar is compiled; or send `Refused`."""
        grammar, compiler = request.sampling.grammar, self._compiler
        if grammar is not None and compiler is not None and not compiler.compiler.has_result(grammar):
            self._compiling.add(request.id)
            compiler.prepare(grammar, partial(self.messages.put, (arrival, Compiled(request))))
            return
        try:
            self.engine.submit(request)
            self.waiting[request.id] = arrival
            send(self.pipe, Accepted(request.id))
        except BaguError as error:  # only this request is refused
            param = error.param if isinstance(error, Unservable) else None
            send(self.pipe, Refused(request.id, str(error), error.hint, param))

    def compiled(self, request: Request, arrival: float) -> None:
        if request.id in self._compiling:  # it was not aborted
            self._compiling.remove(request.id)
            self.submit(request, arrival)

    def close(self) -> None:
        """End the processes that compile."""
        if self._compiler is not None:
            self._compiler.close()

    def abort(self, request_id: str) -> None:
        self._compiling.discard(request_id)
        self.engine.abort(request_id)
        self.waiting.pop(request_id, None)


class EventBuffer:
    """Collects the events of short steps and sends them to the server in one message.

    Every message costs the server 0.1 ms to wake up, however small it is. Steps of a small model take less than a
    millisecond, so their events are sent together every HOLD_S. Two kinds of events are sent at once: those that are
    not the plain next token of a choice, and all events while a prompt waits, since its prefill step may be long.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.events = pipe, list[Event]()
        self.sent = self.stepped = time.perf_counter()

    def add(self, events: Sequence[Event], first_tokens: Sequence[tuple[float, float]], *, send_now: bool) -> None:
        """Add the events of a step that has just ended; send them now or later."""
        self.events += events
        now, before = time.perf_counter(), self.stepped
        self.stepped = now
        plain = all(isinstance(event, TokenEvent) and event.finish is None for event in events)
        if send_now or not plain or now - before >= HOLD_S or now - self.sent >= HOLD_S:
            self._send(first_tokens)

    def flush(self) -> None:
        if self.events:
            self._send(())

    def _send(self, first_tokens: Sequence[tuple[float, float]]) -> None:
        send_step(self.pipe, StepEvents(self.events, first_tokens))
        self.events, self.sent = [], time.perf_counter()


def serve_encoder(
    pipe: Connection, messages: Messages, model: Transformer, tokenizer: Tokenizer, chat: Chat | None,
    config: EngineConfig,
) -> None:  # fmt: skip
    """The same for an encoder or a reward model: a step is a batch of texts."""
    if config.tp > 1:
        raise ArgumentError(f"tp = {config.tp} with an encoder model", hint="encoders run on one rank: use tp=1")
    if config.max_adapters:
        raise ArgumentError("LoRA adapters with an encoder model", hint="adapters are for models that generate")
    model.mlm = None  # embeddings do not use the masked language modelling head
    encode = score if model.config.score_head else embed
    encode(model, [(0,)])
    longest = min(model.config.max_len, config.max_model_len or model.config.max_len)
    vocab_size = model.config.vocab_size
    ready = Ready(
        tokenizer=tokenizer, chat=chat, generates=False, scores=model.config.score_head, max_model_len=longest,
        vocab_size=vocab_size,
    )  # fmt: skip
    _ = ready.longest_token
    send(pipe, ready)
    encoder = Encoder(model, config.step_tokens(model.embedding.weight.device.type), encode)
    while True:
        for _, message in _take_messages(messages, wait=not encoder.has_work):
            if isinstance(message, Embed):
                encoder.add(message.call, message.texts)
            elif isinstance(message, Cancel):
                encoder.cancel(message.call)
            elif isinstance(message, GetStats):
                send(pipe, Result(message.call, encoder.stats()))
            elif isinstance(message, Stop):
                return
        for call, vectors in encoder.step() if encoder.has_work else ():
            send(pipe, Result(call, vectors))
        send_step(pipe, StepEvents([]))


def _take_messages(messages: Messages, *, wait: bool) -> list[tuple[float, Any]]:
    """All received messages. With `wait`, waits up to HEARTBEAT_S for the first one."""
    found = []
    try:
        if wait:
            found.append(messages.get(timeout=HEARTBEAT_S))
        while True:
            found.append(messages.get_nowait())
    except queue.Empty:
        return found


def _receive(pipe: Connection, messages: Messages) -> None:
    """Read messages from the pipe, also while a step runs, and record their arrival times."""
    try:
        while True:
            message = pipe.recv()
            messages.put((time.perf_counter(), message))
    except (EOFError, OSError):  # the server has exited
        os._exit(0)


def _first_tokens(events: Sequence[Event], waiting: dict[str, float]) -> list[tuple[float, float]]:
    """(seconds in the queue, seconds from the first step to the token) of the requests whose first token is here.
    Removes every request with an event from `waiting`; one with max_tokens = 0 has no first token."""
    now, found = time.perf_counter(), []
    for event in events:
        if not isinstance(event, TokenEvent):
            continue
        arrival = waiting.pop(event.request_id, None)
        if arrival is not None and event.token is not None and event.started is not None:
            found.append((event.started - arrival, now - event.started))
    return found


def warm_up(engine: Engine, prompts: Sequence[str] = ()) -> None:
    """Run one short request, so that the first client does not wait for kernels and buffers to be initialized, and
    then the prompts of the configuration. Raises ArgumentError if one of them cannot run or has no probabilities."""
    assert engine.tokenizer is not None
    sampling = Sampling(max_tokens=2, temperature=0.5, ignore_eos=True)
    engine.submit(Request(id="warm-up", prompt=(0,), sampling=sampling))
    _finish(engine)
    for number, text in enumerate(prompts, 1):
        try:
            ids = tuple(engine.tokenizer.encode(text))
            sampling = Sampling(max_tokens=WARM_UP_TOKENS, temperature=0.0, logprobs=0)
            engine.submit(Request(id=f"warm-up-{number}", prompt=ids, sampling=sampling))
        except BaguError as error:
            raise ArgumentError(f"warm-up prompt {number} cannot run: {error}", hint=error.hint) from error
        if not all(map(math.isfinite, _finish(engine))):
            hint = "the weights are broken, or overflow in this dtype"
            raise ArgumentError(f"warm-up prompt {number}: the model's probabilities are not finite", hint=hint)


def _finish(engine: Engine) -> list[float]:
    """Run steps until the engine has no work; returns the log probabilities of the sampled tokens, if requested."""
    found = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent) and event.logprob is not None:
                found.append(event.logprob)
    return found
