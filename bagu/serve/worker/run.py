"""The engine process: it reads the messages of the HTTP server's process (wire/), runs steps and sends their events.

`StepEvents` is also the heartbeat: it is sent after every step, or every `generation_loop.HOLD_S` if steps are shorter,
and every second when idle. If the server dies, the socket closes and this process exits, so that it does not hold the
GPU.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from bagu.errors import ArgumentError, BaguError
from bagu.serve.config import EngineConfig
from bagu.serve.request import Request, Sampling, TokenEvent
from bagu.serve.wire.encode import send
from bagu.serve.wire.messages import Failed, Load, Warming
from bagu.serve.worker.encoder_loop import serve_encoder
from bagu.serve.worker.generation_loop import serve_generation
from bagu.serve.worker.request_queue import Messages, receive

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    from bagu.serve.engine import Engine

Prepare = Callable[[], Callable[[], None]]  # loads and warms up; returns the function that serves


WARM_UP_TOKENS = 8  # of each warm-up prompt


def run_prompts(engine: Engine, prompts: Sequence[str] = ()) -> None:
    """Run one short request, so that the first client does not wait for buffers to be initialized, and then the
    prompts of the configuration. Raises ArgumentError if one of them cannot run or has no probabilities."""
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


def run(
    ours: socket.socket,
    load: Load,
    config: EngineConfig,
    load_draft: Load | None = None,
    prepare_with: Callable[[Prepare], Callable[[], None]] = lambda prepare: prepare(),
) -> None:
    """The main function of the process: load, warm up, send `Ready`, then serve until `Stop`. An exception is sent to
    the server as `Failed` and ends the process. `load_draft` loads the draft model, if `config` names one.
    `prepare_with` runs the function that loads and warms up (main.py: in a thread of low priority)."""
    pipe = Connection(ours.detach())
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal signals the whole process group; the server sends Stop
        signal.signal(number, signal.SIG_IGN)
    messages: Messages = queue.SimpleQueue()
    threading.Thread(target=receive, args=(pipe, messages), daemon=True).start()
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
    from bagu.nn.vision.vlm import VLM

    model, tokenizer, chat = load()
    if isinstance(model, VLM):
        if config.embeddings:
            raise ArgumentError("embeddings of a vision-language model", hint="leave out --embeddings")
    elif config.embeddings or not model.config.causal or model.config.score_head:
        return partial(serve_encoder, pipe, messages, model, tokenizer, chat, config)
    from bagu.serve.engine import Engine
    from bagu.serve.speculation.draft_model import DraftSource
    from bagu.serve.warm_up import WarmUp
    from bagu.serve.worker.measure import measure_engine

    draft = None
    if load_draft is not None:
        guess, words, _ = load_draft()
        draft = DraftSource(guess.decoder if isinstance(guess, VLM) else guess, words)
    engine = Engine(model, tokenizer, config, draft=draft)
    engine.release_source()
    del model  # the engine has a part of it with tp > 1, and quantized weights with quantization
    send(pipe, Warming())
    warming = WarmUp(engine)
    warming.run(config.warm_up)
    run_prompts(engine, config.warmup_prompts)
    capacity = measure_engine(engine) if config.is_replica else None

    def serve() -> None:
        serve_generation(pipe, messages, engine, chat, warming, capacity)
        engine.close()

    return serve
