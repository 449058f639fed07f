"""A model behind a server with OpenAI's API, for evaluations."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from bagu.errors import BaguError
from bagu.eval.model import Decoding, Message
from bagu.serve.api_client import ApiClient, Refused

TIMEOUT_S = 3600.0
SERVER_MAX_LEN = 2048  # tokens, of a server that does not report its model's
PROMPTS_A_CALL = 64  # per server call: small enough that the response of one call has a few megabytes
CALLS_AT_ONCE = 16  # calls to a server at the same time
MAX_WAITS = 120  # seconds to wait while the queue is full
SIZE_STATUSES = (413, 429, 504)  # body too large, queue full, timeout of a proxy: fewer prompts may pass


def chat_texts(api: ApiClient, body: Mapping[str, Any]) -> list[str]:
    """The texts of all choices of a chat completion. Waits while the server's queue is full."""
    waits = 0
    while True:
        try:
            with api.response("/v1/chat/completions", body) as response:
                choices = sorted(json.load(response)["choices"], key=lambda choice: choice.get("index", 0))
                return [str(choice["message"]["content"] or "") for choice in choices]
        except Refused as error:
            if error.status != 429 or waits == MAX_WAITS:
                raise
        waits += 1
        time.sleep(1.0)


class ServerModel:
    """A server with OpenAI's API and vLLM's `/tokenize` and `prompt_logprobs`: bagu's, or vLLM itself."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.api = ApiClient(url, api_key=api_key, timeout_s=TIMEOUT_S)
        first = self.api.first_model()
        self.name: str = first["id"]
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
            rows = choice.get("prompt_logprobs")
            if rows is None:
                raise BaguError(
                    f"{self.api.url} gives no prompt_logprobs, which scoring needs", hint="serve it with bagu or vLLM"
                )
            found.append([float(rows[t][str(ids[t])]["logprob"]) for t in range(start, len(ids))])
        return found

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[list[str]]:
        if decoding.temperature == 0:
            texts = [choice["text"] for choice in self._complete(prompts, _sampling(decoding, decoding.seed))]
            return [texts[i : i + decoding.samples] for i in range(0, len(texts), decoding.samples)]

        def sample(ids: Sequence[int]) -> list[str]:  # a call has one seed, so it has one prompt
            return [choice["text"] for choice in self._complete([ids], _sampling(decoding, decoding.seed_of(ids)))]

        with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
            return list(pool.map(sample, prompts))

    def generate_chat(self, chats: Sequence[Sequence[Message]], decoding: Decoding) -> list[list[str]]:
        """By the chat route: only the server knows the tokens that end a turn. A call holds one chat."""
        bodies = [
            {
                "model": self.name,
                "messages": [dict(m) for m in messages],
                **_sampling(decoding, decoding.seed_of(messages)),
            }
            for messages in chats
        ]
        with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
            return list(pool.map(partial(chat_texts, self.api), bodies))

    def _complete(self, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The choices of all prompts in order. A call that may be too large for the server or its queue is halved."""
        found: list[dict[str, Any]] = []
        size, at, waits = PROMPTS_A_CALL, 0, 0
        while at < len(prompts):
            asked = [list(ids) for ids in prompts[at : at + size]]
            try:
                answer = self.api.call("/v1/completions", {"model": self.name, "prompt": asked, **settings})
            except Refused as error:
                if size > 1 and _smaller_may_pass(error):
                    size //= 2
                elif error.status == 429 and waits < MAX_WAITS:
                    waits += 1
                    time.sleep(1.0)
                else:
                    raise
                continue
            found += sorted(answer["choices"], key=lambda choice: choice["index"])
            at, waits = at + len(asked), 0
        return found


def _smaller_may_pass(error: Refused) -> bool:
    """Whether the same call with fewer prompts may succeed. bagu's server names `n` if they never fit its queue."""
    return error.status in SIZE_STATUSES or (error.status == 400 and error.param == "n")


def _sampling(decoding: Decoding, seed: int) -> dict[str, Any]:
    """The fields of OpenAI's API; those without a value are left out."""
    fields = {
        "max_tokens": decoding.max_tokens,
        "n": decoding.samples,
        "temperature": decoding.temperature,
        "seed": seed,
        "stop": list(decoding.stop) or None,
    }
    return {name: value for name, value in fields.items() if value is not None}
