"""The two kinds of model for an evaluation: an engine in this process, and a server over HTTP."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bagu.data.chat import ChatEncoder
from bagu.errors import ArgumentError, BaguError
from bagu.eval.model import Decoding, Message, Model
from bagu.nn.digest import digest_of
from bagu.nn.model import Transformer
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Sampling
from bagu.types import Tokenizer

__all__ = ["Api", "EngineModel", "ServerModel", "eval_engine", "model_of"]

TIMEOUT_S = 3600.0
SERVER_MAX_LEN = 2048  # tokens, of a server that does not report its model's
PROMPTS_A_CALL = 64  # per server call: small enough that the response of one call has a few megabytes
CHATS_AT_ONCE = 16  # calls to a server at the same time
MAX_WAITS = 120  # seconds to wait while the queue is full
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
        sampling = Sampling(
            max_tokens=decoding.max_tokens, temperature=decoding.temperature, n=decoding.samples, stop=decoding.stop,
            seed=decoding.seed, stop_token_ids=() if self.chat is None else self.chat.turn_ends,
        )  # fmt: skip
        found: list[list[str]] = [[] for _ in prompts]
        for completion in self.engine.generate(prompts, sampling):
            found[completion.prompt].append(completion.text or "")
        return found

    def generate_chat(self, chats: Sequence[Sequence[Message]], decoding: Decoding) -> list[list[str]]:
        return self.generate([self.encode_chat(messages) for messages in chats], decoding)


class _Refused(BaguError):
    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} answered {status}: {body[:200]}")
        self.status = status


class Api:
    """Calls to a server. Every failure is a BaguError of one sentence."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[dict[str, Any]]:
        answer = self.call("/v1/models")
        if not isinstance(answer, dict) or not answer.get("data"):
            raise BaguError(f"{self.url}/v1/models lists no model", hint="name a server with OpenAI's API")
        return list(answer["data"])

    def first_model(self) -> str:
        return str(self.models()[0].get("id", ""))

    def call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps({k: v for k, v in body.items() if v is not None}).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise _Refused(f"{self.url}{path}", error.code, error.read().decode(errors="replace")) from error
        except (OSError, http.client.HTTPException) as error:
            raise BaguError(
                f"{self.url} cannot be reached: {error}", hint="is it running? `bagu serve MODEL`"
            ) from error
        except ValueError as error:
            raise BaguError(f"{self.url}{path} answered no JSON", hint="name a server with OpenAI's API") from error

    def chat(self, body: Mapping[str, Any]) -> list[str]:
        """The texts of all choices of a chat completion. Waits while the server's queue is full."""
        for waited in range(MAX_WAITS + 1):
            try:
                answer = self.call("/v1/chat/completions", body)
                break
            except _Refused as error:
                if error.status != 429 or waited == MAX_WAITS:
                    raise
                time.sleep(1.0)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
            return [str(choice["message"]["content"] or "") for choice in choices]
        except (AttributeError, KeyError, TypeError) as error:
            raise BaguError(f"{self.url} answered without a message", hint="is it OpenAI's chat API?") from error


class ServerModel:
    """A server with OpenAI's API and vLLM's `/tokenize` and `prompt_logprobs`: bagu's, or vLLM itself."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.api = Api(url, api_key=api_key)
        first = self.api.models()[0]
        self.name = str(first["id"])
        self.max_len = int(first.get("max_model_len") or SERVER_MAX_LEN)
        self._tokens: dict[str, list[int]] = {}  # cache of tokenized texts: contexts repeat

    def encode(self, text: str) -> list[int]:
        if text not in self._tokens:
            if len(self._tokens) > 4096:
                self._tokens.clear()
            self._tokens[text] = self.api.call("/tokenize", {"model": self.name, "prompt": text})["tokens"]
        return list(self._tokens[text])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        body = {"model": self.name, "messages": [dict(m) for m in messages]}
        return list(self.api.call("/tokenize", body)["tokens"])

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        choices = self._complete(sequences, {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0})
        found = []
        for ids, start, choice in zip(sequences, starts, choices, strict=True):
            rows = choice["prompt_logprobs"]
            found.append([float(rows[t][str(ids[t])]["logprob"]) for t in range(start, len(ids))])
        return found

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[list[str]]:
        texts = [choice["text"] for choice in self._complete(prompts, _sampling(decoding))]
        return [texts[i : i + decoding.samples] for i in range(0, len(texts), decoding.samples)]

    def generate_chat(self, chats: Sequence[Sequence[Message]], decoding: Decoding) -> list[list[str]]:
        """By the chat route: only the server knows the tokens that end a turn. A call holds one chat."""
        settings = {"model": self.name, **_sampling(decoding)}
        bodies = [{**settings, "messages": [dict(m) for m in messages]} for messages in chats]
        with ThreadPoolExecutor(CHATS_AT_ONCE) as pool:
            return list(pool.map(self.api.chat, bodies))

    def _complete(self, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The choices of all prompts in order. A call that is too large for the server or its queue is halved."""
        found: list[dict[str, Any]] = []
        size, at, waits = PROMPTS_A_CALL, 0, 0
        while at < len(prompts):
            asked = [list(ids) for ids in prompts[at : at + size]]
            try:
                answer = self.api.call("/v1/completions", {"model": self.name, "prompt": asked, **settings})
            except _Refused as error:
                if size == 1 and (error.status != 429 or waits == MAX_WAITS):
                    raise
                if size == 1:
                    waits += 1
                    time.sleep(1.0)
                size = max(1, size // 2)
                continue
            found += sorted(answer["choices"], key=lambda choice: choice["index"])
            at, waits = at + len(asked), 0
        return found


def _sampling(decoding: Decoding) -> dict[str, Any]:
    """The fields of OpenAI's API."""
    return {
        "max_tokens": decoding.max_tokens, "n": decoding.samples, "temperature": decoding.temperature,
        "seed": decoding.seed, "stop": list(decoding.stop) or None,
    }  # fmt: skip


def model_of(
    model: str,
    *,
    tokenizer: str | None,
    dtype: str,
    device: str | None,
    invariant: bool,
    api_key: str | None,
    quantization: str | None = None,
) -> tuple[Model, dict[str, Any]]:
    """The model behind MODEL, and the facts that determine its results."""
    if model.startswith(("http://", "https://")):
        if tokenizer or device or dtype != "auto" or invariant or quantization:
            raise ArgumentError(
                "--tokenizer, --device, --dtype, --quantization and --invariant are the server's to choose"
            )
        return ServerModel(model, api_key=api_key), {"url": model}
    from bagu.recipes.serve import Loader

    loaded, words, chat = Loader(model=model, tokenizer=tokenizer, dtype=dtype, device=device)()
    if not loaded.config.causal:
        raise BaguError(f"{model} is an encoder: it gives no probability of the next token", hint="name a causal model")
    weight = loaded.embedding.weight
    identity = {
        "parameters": sum(p.numel() for p in loaded.parameters()), "checksum": digest_of(loaded.state_dict()),
        "dtype": str(weight.dtype).removeprefix("torch."), "tokenizer": words.fingerprint, "invariant": invariant,
    }  # fmt: skip
    if quantization is not None:
        identity["quantization"] = quantization
    engine = eval_engine(loaded, words, invariant=invariant, quantization=quantization)
    return EngineModel(engine, words, chat, Path(model).resolve().name), identity
