"""The main loop of the engine process for a model that does not generate: a step is a batch of texts."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from bagu.errors import ArgumentError
from bagu.serve.config import EngineConfig
from bagu.serve.embedding import Encoder, embed, embed_last, score
from bagu.serve.wire.encode import send, send_step
from bagu.serve.wire.messages import Cancel, Chat, Embed, GetStats, Ready, Result, StepEvents, Stop
from bagu.serve.worker.measure import measure_encoder
from bagu.serve.worker.request_queue import Messages, take_messages
from bagu.types import Tokenizer

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    from bagu.nn.model import Transformer


def serve_encoder(
    pipe: Connection,
    messages: Messages,
    model: Transformer,
    tokenizer: Tokenizer,
    chat: Chat | None,
    config: EngineConfig,
) -> None:
    """Handle messages, encode batches of texts and send their vectors, until `Stop`."""
    if config.tp > 1:
        raise ArgumentError(f"tp = {config.tp} with an encoder model", hint="encoders run on one rank: use tp=1")
    if config.adapter_slots:
        raise ArgumentError("LoRA adapters with an encoder model", hint="adapters are for models that generate")
    if config.embeddings and model.config.score_head:
        raise ArgumentError("embeddings of a reward model", hint="leave out --embeddings: it is served by /v1/score")
    model.mlm = None  # embeddings do not use the masked language modelling head
    encode = score if model.config.score_head else embed_last if model.config.causal else embed
    encode(model, [(0,)])
    longest = min(model.config.max_len, config.max_model_len or model.config.max_len)
    vocab_size = model.config.vocab_size
    ready = Ready(
        tokenizer=tokenizer,
        chat=chat,
        generates=False,
        scores=model.config.score_head,
        max_model_len=longest,
        vocab_size=vocab_size,
        capacity=measure_encoder(model, encode, config) if config.is_replica else None,
    )
    _ = ready.longest_token  # computed here, so that the first request does not wait for it
    send(pipe, ready)
    encoder = Encoder(model, config.step_tokens(model.embedding.weight.device.type), encode)
    while True:
        for _, message in take_messages(messages, wait=not encoder.has_work):
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
