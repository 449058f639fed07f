"""`bagu.load` and `bagu.evaluate`: a model as a Python object, over the engine that the server runs.

The engine is made at the first call that needs it, in this process. A setting that a call leaves out is that of the
model's generation_config.json, as in `bagu serve`; where that has none, the temperature is 0.7.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack, overload

from bagu.data.chat import ChatEncoder
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.eval.choice import continuation as join
from bagu.eval.score import Result
from bagu.eval.score import evaluate as score_task
from bagu.machine.device import named_device
from bagu.machine.openmp import wait_briefly
from bagu.machine.terminal import counted
from bagu.nn.model import Transformer
from bagu.recipes.eval_models import EngineModel, identity_of
from bagu.recipes.evaluate import find_task, item_progress
from bagu.recipes.find import find_model
from bagu.recipes.generation import read_generation
from bagu.recipes.loader import Loader
from bagu.recipes.model_reward import ModelReward
from bagu.recipes.models import model_config
from bagu.recipes.serve import TEMPERATURE
from bagu.serve.config import EngineConfig
from bagu.serve.embedding import Encoder, embed, embed_last
from bagu.serve.engine import Engine
from bagu.serve.request import Sampling
from bagu.train.rl.reward_function import Sample

MAX_TOKENS = 256  # of `generate`; an answer of `chat` may fill the context, as in `bagu chat`

Source = str | os.PathLike[str]
Message = Mapping[str, Any]  # role and content
Texts = list[str] | tuple[str, ...]  # a Sequence[str] could be a str


class Settings(TypedDict, total=False):
    """The settings of a generation."""

    max_tokens: int
    temperature: float  # 0 is greedy
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    stop: str | Sequence[str]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """Log-probabilities in nats: of every token, given all before it, and their sum."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]

    @property
    def logprob(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprob / len(self.logprobs))

    def __repr__(self) -> str:
        return (
            f"Score(logprob={self.logprob:.3f}, {counted(len(self.tokens), 'token')}, perplexity={self.perplexity:.4g})"
        )


def load(
    name: Source,
    *,
    tokenizer: Source | None = None,
    dtype: str = "auto",
    device: str | None = None,
    engine: EngineConfig | None = None,
) -> Model:
    """Load a run, a checkpoint of a run, a Hugging Face folder or id, an adapter, or a GGUF file.

    `tokenizer` is a folder, for a model without one. `dtype` is bf16 or fp32, `device` cpu or cuda; both are chosen for
    this machine by default. `engine` has the other options of `bagu serve` (quantization, max_model_len, …).

    >>> with bagu.load("runs/words") as words:
    ...     text = words.generate("one two three", max_tokens=4)
    >>> words
    Model(words, closed)
    """
    wait_briefly()
    if not isinstance(name, str | os.PathLike):
        raise ArgumentError(f"load: a {type(name).__name__} names no model", hint="give a folder, a file or a hub id")
    source = os.fspath(name)
    found = find_model(source)
    config = replace(engine or EngineConfig(), generation=read_generation(found))
    if model_config(found).score_head:
        rewards = ModelReward(source, device=named_device(device))
        return Model(source, rewards.model, rewards.tokenizer, None, config, rewards)
    words = None if tokenizer is None else os.fspath(tokenizer)
    loader = Loader(model=source, tokenizer=words, dtype=dtype, device=device)
    network, loaded, chat = loader()
    network.mlm = None  # embeddings are the hidden states below this head
    return Model(source, network, loaded, chat, config)


class Model:
    """A language model, an encoder or a reward model; `load` makes it. As a context manager it is closed at the end.

    `tokenizer`, `network` (the Transformer) and `engine` are there for what these methods do not offer; the engine
    takes token ids.
    """

    def __init__(
        self,
        source: str,
        network: Transformer,
        tokenizer: BpeTokenizer,
        chat: ChatEncoder | None,
        config: EngineConfig,
        rewards: ModelReward | None = None,
    ) -> None:
        self.source, self.name = source, Path(source).resolve().name
        self.tokenizer, self.config = tokenizer, config
        self._network: Transformer | None = network
        self._chat, self._rewards = chat, rewards

    def __fspath__(self) -> str:
        """Where it was loaded from, so that it can be given as a path."""
        return self.source

    def __repr__(self) -> str:
        if self._network is None:
            return f"Model({self.name}, closed)"
        kind = {"generates": "language model", "embeds": "encoder", "rewards": "reward model"}[self._use]
        weight = self._network.embedding.weight
        size, dtype = sum(p.numel() for p in self._network.parameters()), str(weight.dtype).removeprefix("torch.")
        return f"Model({self.name}, {kind}, {size:,} parameters, {dtype} on {weight.device})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights and the cache."""
        if (made := vars(self).pop("_asked", None)) is not None:
            made.engine.close()
        self._network = self._rewards = None

    @overload
    def generate(self, prompt: str, *, n: None = None, **settings: Unpack[Settings]) -> str: ...
    @overload
    def generate(self, prompt: str, *, n: int, **settings: Unpack[Settings]) -> list[str]: ...
    @overload
    def generate(self, prompt: Texts, *, n: None = None, **settings: Unpack[Settings]) -> list[str]: ...
    @overload
    def generate(self, prompt: Texts, *, n: int, **settings: Unpack[Settings]) -> list[list[str]]: ...
    def generate(self, prompt: str | Texts, *, n: int | None = None, **settings: Unpack[Settings]) -> Any:
        """Continue a text, or a list of texts in one batch: a str for a str, a list for a list, without the prompt.

        `n` asks for this many continuations of each text, as a list. Settings: max_tokens (256, or the rest of the
        context), temperature (0 is greedy), top_p, top_k, min_p, repetition_penalty, stop (a text or several) and
        seed; with a seed, text i of a list draws with seed + i.

        >>> model.generate("one two three", max_tokens=2, temperature=0)
        ' four five'
        >>> model.generate(["one two three", "four five six"], max_tokens=2, temperature=0)
        [' four five', ' seven eight']
        """
        prompts = [self._encoded(text, "generate") for text in _texts(prompt, "generate")]
        sampling = [self._sampling(ids, settings, MAX_TOKENS, number=i, n=n or 1) for i, ids in enumerate(prompts)]
        found: list[list[str]] = [[] for _ in prompts]
        for completion in self.engine.generate(prompts, sampling):
            found[completion.prompt].append(completion.text or "")
        answers = [each[0] for each in found] if n is None else found
        return answers[0] if isinstance(prompt, str) else answers

    def stream(self, prompt: str | Sequence[Message], **settings: Unpack[Settings]) -> Iterator[str]:
        """Generate from a text, or answer a chat, piece by piece. Closing the iterator ends the generation.

        >>> "".join(model.stream("one two three", max_tokens=2, temperature=0))
        ' four five'
        """
        if isinstance(prompt, str):
            ids = self._encoded(prompt, "stream")
            sampling = self._sampling(ids, settings, MAX_TOKENS)
        else:
            ids = self._asked.encode_chat(_messages(prompt))
            ends = () if self._chat is None else self._chat.turn_ends
            sampling = replace(self._sampling(ids, settings), stop_token_ids=ends)
        return (piece.text for piece in self.engine.stream(ids, sampling) if piece.text)

    def chat(self, messages: str | Sequence[Message], **settings: Unpack[Settings]) -> str:
        """The assistant's answer to messages with `role` and `content`, or to a str as the user's message.

        >>> answer = model.chat([{"role": "user", "content": "one two"}], max_tokens=4)
        """
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return "".join(self.stream(asked, **settings))

    def score(self, text: str, continuation: str | None = None) -> Score:
        """The log-probabilities of a continuation after a text, or of the text itself. Without a text before it, the
        first token has none, unless the tokenizer begins every text with a control token.

        >>> right, wrong = (model.score("one two three", word) for word in (" four", " nine"))
        >>> right.logprob > wrong.logprob
        True
        """
        for part in (text, "" if continuation is None else continuation):
            _texts(part if isinstance(part, str) else [part], "score")
        self._check("generates", "score")
        if continuation == "":
            raise ArgumentError("score: the continuation is empty", hint="give a text, or leave it out")
        ids, start = (
            (self._encoded(text, "score"), 1) if continuation is None else join(self._asked, text, continuation)
        )
        if len(ids) < 2:
            raise ArgumentError(
                f"score: {text!r} is one token, and the first token has no probability", hint="give a longer text"
            )
        (logprobs,) = self.engine.score([ids], [start])
        return Score(tokens=tuple(self.tokenizer.decode([id]) for id in ids[start:]), logprobs=tuple(logprobs))

    @overload
    def embed(self, texts: str) -> list[float]: ...
    @overload
    def embed(self, texts: Texts) -> list[list[float]]: ...
    def embed(self, texts: str | Texts) -> list[float] | list[list[float]]:
        """A unit vector per text: the mean of an encoder's hidden states, or a decoder's last hidden state.

        >>> [one, two] = model.embed(["one two", "three"])
        >>> len(one) == model.network.config.hidden_size
        True
        """
        network = self.network
        self._check("rewards", "embed", wanted=False)
        ids = [self._encoded(text, "embed", any_kind=True) for text in _texts(texts, "embed")]
        longest = network.config.max_len
        if too_long := [number for number, each in enumerate(ids) if len(each) > longest]:
            found = f"text {too_long[0]} has {len(ids[too_long[0]])} tokens, and the model takes {longest}"
            raise ArgumentError(f"embed: {found}", hint="divide it")
        budget = self.config.step_tokens(network.embedding.weight.device.type)
        encoder = Encoder(network, budget, embed_last if network.config.causal else embed)
        encoder.add(0, ids)
        vectors = [] if not ids else next(done[0][1] for done in iter(encoder.step, None) if done)
        return vectors[0] if isinstance(texts, str) else vectors

    def reward(self, prompt: str | Sequence[Message], answer: str) -> float:
        """The score of a reward model for an answer to a prompt, or to the messages of a chat."""
        self._check("rewards", "reward")
        assert self._rewards is not None
        chat = () if isinstance(prompt, str) else tuple(_messages(prompt))
        asked = prompt if isinstance(prompt, str) else str(chat[-1]["content"])
        (found,) = self._rewards([Sample(prompt=asked, completion=answer, messages=chat)])
        if found.fault is not None:
            raise ArgumentError(f"reward: the answer {found.fault}", hint="shorten it")
        return found.reward

    @property
    def network(self) -> Transformer:
        """The Transformer."""
        if self._network is None:
            raise BaguError(f"the model {self.name} is closed", hint="load it again")
        return self._network

    @property
    def engine(self) -> Engine:
        """The engine in this process, for token ids and for other options of `Sampling`."""
        return self._asked.engine

    @cached_property
    def _asked(self) -> EngineModel:
        network = self.network
        self._check("generates", "the engine")
        return EngineModel(Engine(network, self.tokenizer, self.config), self.tokenizer, self._chat, self.name)

    @property
    def _use(self) -> str:
        config = self.network.config
        return "rewards" if config.score_head else "generates" if config.causal else "embeds"

    def _check(self, use: str, call: str, *, wanted: bool = True) -> None:
        """Raise if the model is of another kind than `call` needs."""
        if (self._use == use) != wanted:
            what, instead = {
                "generates": ("a language model", "generate or score"),
                "embeds": ("an encoder, which predicts no next token", "embed"),
                "rewards": ("a reward model, which scores answers and predicts no tokens", "reward"),
            }[self._use]
            raise BaguError(f"{call}: {self.name} is {what}", hint=f"use {instead}, or load another model")

    def _encoded(self, text: str, call: str, *, any_kind: bool = False) -> list[int]:
        if not any_kind:
            self._check("generates", call)
        ids = self.tokenizer.encode_prompt(text)
        if not ids:
            raise ArgumentError(
                f"{call}: a text is empty", hint="it needs at least one token: this tokenizer adds none"
            )
        return ids

    def _sampling(
        self, ids: Sequence[int], settings: Settings, most: int | None = None, *, number: int = 0, n: int = 1
    ) -> Sampling:
        given: dict[str, Any] = dict(settings)
        if unknown := given.keys() - {*Settings.__annotations__}:
            raise UnknownName.among("setting of a generation", min(unknown), Settings.__annotations__)
        if isinstance(stop := given.get("stop", ()), str):
            stop = (stop,)
        seed = given.get("seed")
        given |= {"stop": tuple(stop), "seed": seed if seed is None else seed + number}
        room = max(1, self.engine.max_model_len - len(ids))  # the engine refuses a prompt that leaves none
        default = {"temperature": TEMPERATURE, "max_tokens": most or room, **self.config.generation.sampling}
        return Sampling(**{**default, "max_tokens": min(default["max_tokens"], room), **given, "n": n})


def _texts(given: str | Iterable[str], call: str) -> list[str]:
    """The texts of a str or of a list."""
    texts: list[Any] = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for text in texts:
        if not isinstance(text, str):
            hint = {int: "for token ids use model.engine", dict: "for messages use model.chat"}.get(type(text), "")
            raise ArgumentError(
                f"{call}: expected a text, and found a {type(text).__name__}", hint=hint or "give a str"
            )
    return texts


def _messages(given: Sequence[Message]) -> list[Message]:
    """The messages of a chat, at least one, each with a role."""
    messages = list(given)
    wrong = [m for m in messages if not (isinstance(m, Mapping) and "role" in m)]
    if wrong or not messages:
        found = f"found {wrong[0]!r:.60}" if wrong else "there is none"
        raise ArgumentError(
            f"chat: expected messages, and {found}", hint='write [{"role": "user", "content": "…"}], or give a str'
        )
    return messages


def evaluate(
    model: Model | Source,
    task: str,
    *,
    limit: int | None = None,
    few_shot: int | None = None,
    seed: int = 0,
    out: Source | None = None,
) -> Result:
    """Score a model on a built-in task, a task file (.toml) or BENCHMARK=PATH, as `bagu eval` does.

    `limit` takes the first items only, `few_shot` sets the number of examples before each question, `out` is a folder
    that receives every item. docs/eval.md describes the tasks.

    >>> result = bagu.evaluate(model, "library", limit=1)
    >>> result.metrics["bits_per_byte"].items
    1
    """
    if not isinstance(model, Model):
        with load(model) as loaded:
            return evaluate(loaded, task, limit=limit, few_shot=few_shot, seed=seed, out=out)
    if limit is not None and limit < 1:
        raise ArgumentError(f"evaluate: limit = {limit}", hint="1 or more")
    model._check("generates", "evaluate")
    found = find_task(task, model.network.config.max_len)
    if few_shot is not None:
        found = replace(found, few_shot=few_shot)
    identity = {} if out is None else _identity(model)
    with item_progress(found.name) as progress:
        return score_task(
            model._asked,
            found,
            out=None if out is None else Path(out),
            limit=limit,
            seed=seed,
            identity=identity,
            progress=progress,
        )


def _identity(model: Model) -> dict[str, Any]:
    invariant, quantization = model.config.invariant, model.config.quantization
    return identity_of(model.network, model.tokenizer, invariant=invariant, quantization=quantization)
