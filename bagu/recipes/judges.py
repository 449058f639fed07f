"""The judge behind `bagu eval --judge`: a server with OpenAI's chat API, or a model that is loaded here.

`URL#MODEL` names one of a server's models; without it the first that the server lists is asked.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bagu.errors import BaguError
from bagu.eval.judge import Judge
from bagu.eval.model import Decoding
from bagu.recipes.eval_models import EngineModel, eval_engine, load_causal
from bagu.recipes.eval_server import TIMEOUT_S, chat_texts
from bagu.recipes.loader import Loader
from bagu.serve.api_client import ApiClient

MAX_TOKENS, LEAST_TOKENS = 512, 8  # of the judge's answer
CALLS = 8  # to a server at the same time


def judge_of(name: str, *, api_key: str | None, device: str | None) -> Judge:
    """The judge behind --judge."""
    if name.startswith(("http://", "https://")):
        url, _, model = name.partition("#")
        return ServerJudge(url, model or None, api_key=api_key)
    loaded, words, chat = load_causal(Loader(model=name, device=device))
    return EngineJudge(EngineModel(eval_engine(loaded, words), words, chat, Path(name).resolve().name))


class EngineJudge:
    """A chat model in this process."""

    def __init__(self, model: EngineModel) -> None:
        if model.chat is None:
            raise BaguError(f"the judge {model.name} has no chat template", hint="name a chat model with --judge")
        self.model, self.name = model, model.name

    def ask(self, questions: Sequence[str]) -> list[str]:
        prompts = [self.model.encode_chat([{"role": "user", "content": question}]) for question in questions]
        longest = max(map(len, prompts), default=0)
        room = min(MAX_TOKENS, self.model.max_len - longest)
        if room < LEAST_TOKENS:
            raise BaguError(f"its prompt has {longest} tokens, and it takes {self.model.max_len}")
        return [answer for (answer,) in self.model.generate(prompts, Decoding(max_tokens=room))]


class ServerJudge:
    """A model behind /v1/chat/completions."""

    def __init__(self, url: str, model: str | None, *, api_key: str | None) -> None:
        self.api = ApiClient(url, api_key=api_key, timeout_s=TIMEOUT_S)
        self.name: str = model or self.api.first_model()["id"]

    def ask(self, questions: Sequence[str]) -> list[str]:
        with ThreadPoolExecutor(CALLS) as pool:
            return list(pool.map(self._answer, questions))

    def _answer(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        body = {"model": self.name, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        answers = chat_texts(self.api, body)
        if not answers:
            raise BaguError(f"{self.api.url} answered without a message", hint="is it OpenAI's chat API?")
        return answers[0]
