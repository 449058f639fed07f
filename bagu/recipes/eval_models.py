"""The model of an evaluation: an engine in this process, or a server."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bagu.data import BpeTokenizer, ChatEncoder
from bagu.errors import ArgumentError, BaguError
from bagu.eval.model import Decoding, Message, Model
from bagu.nn.digest import fingerprint_of
from bagu.nn.model import Transformer
from bagu.recipes.eval_server import ServerModel
from bagu.recipes.loader import Loader
from bagu.recipes.verbs import EvalOptions
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Sampling
from bagu.types import Tokenizer

# Positions per KV block. The choices of an item share the full blocks of their prompt, so small blocks share more: 84 %
# of the prefill speed with 4 positions, 80 % with 8. On a GPU the engine's own size is used.
CPU_BLOCK_SIZE = 4


def eval_engine(model: Transformer, tokenizer: Tokenizer, **settings: Any) -> Engine:
    """An engine for evaluations; `settings` are fields of EngineConfig."""
    on_cpu = model.embedding.weight.device.type == "cpu"
    return Engine(model, tokenizer, EngineConfig(**({"block_size": CPU_BLOCK_SIZE if on_cpu else None} | settings)))


class EngineModel:
    """Runs batches on the engine: the common prefix of sequences is computed once. With `chat`, an answer also ends
    where the assistant's turn ends."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, chat: ChatEncoder | None, name: str) -> None:
        self.engine, self.tokenizer, self.chat, self.name = engine, tokenizer, chat, name

    @property
    def max_len(self) -> int:
        return self.engine.max_model_len

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode_prompt(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if self.chat is None:
            raise BaguError(
                f"{self.name} has no chat template, and this task asks in chats", hint="fine-tune it on chats first"
            )
        return self.chat.prompt([dict(m) for m in messages])

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        return self.engine.score(sequences, starts)

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[list[str]]:
        return self._answers(prompts, decoding, [decoding.seed_of(ids) for ids in prompts])

    def generate_chat(self, chats: Sequence[Sequence[Message]], decoding: Decoding) -> list[list[str]]:
        prompts = [self.encode_chat(messages) for messages in chats]
        return self._answers(prompts, decoding, [decoding.seed_of(messages) for messages in chats])

    def _answers(self, prompts: Sequence[Sequence[int]], decoding: Decoding, seeds: Sequence[int]) -> list[list[str]]:
        sampling = Sampling(
            max_tokens=decoding.max_tokens,
            temperature=decoding.temperature,
            n=decoding.samples,
            stop=decoding.stop,
            stop_token_ids=() if self.chat is None else self.chat.turn_ends,
        )
        found: list[list[str]] = [[] for _ in prompts]
        for completion in self.engine.generate(prompts, [replace(sampling, seed=seed) for seed in seeds]):
            found[completion.prompt].append(completion.text or "")
        return found


def load_causal(loader: Loader) -> tuple[Transformer, BpeTokenizer, ChatEncoder | None]:
    loaded, words, chat = loader()
    if not loaded.config.causal:
        raise BaguError(
            f"{loader.model} is an encoder: it gives no probability of the next token", hint="name a causal model"
        )
    return loaded, words, chat


def identity_of(
    model: Transformer, tokenizer: BpeTokenizer, *, invariant: bool, quantization: str | None
) -> dict[str, Any]:
    """The facts of a model in this process that determine its results."""
    weight = model.embedding.weight
    identity = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "checksum": fingerprint_of(model.state_dict()),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "tokenizer": tokenizer.fingerprint,
        "invariant": invariant,
    }
    return identity if quantization is None else identity | {"quantization": quantization}


def model_of(given: EvalOptions) -> tuple[Model, dict[str, Any]]:
    """The model behind MODEL, and the facts that determine its results."""
    model, tokenizer, dtype, device = given.model, given.tokenizer, given.dtype, given.device
    invariant, quantization = given.invariant, given.quantization
    if model.startswith(("http://", "https://")):
        if tokenizer or device or dtype != "auto" or invariant or quantization:
            raise ArgumentError(
                "--tokenizer, --device, --dtype, --quantization and --invariant are the server's to choose"
            )
        return ServerModel(model, api_key=given.api_key), {"url": model}
    loaded, words, chat = load_causal(Loader(model=model, tokenizer=tokenizer, dtype=dtype, device=device))
    identity = identity_of(loaded, words, invariant=invariant, quantization=quantization)
    engine = eval_engine(loaded, words, invariant=invariant, quantization=quantization)
    return EngineModel(engine, words, chat, Path(model).resolve().name), identity
