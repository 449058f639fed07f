"""An evaluation of a model behind a server gives the scores of the same model in this process."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import pytest
from tiny_server import KEY, Running, load

from bagu.errors import BaguError
from bagu.eval.model import Decoding
from bagu.eval.score import evaluate
from bagu.eval.task import Item, Task
from bagu.recipes.eval_models import EngineModel
from bagu.recipes.eval_server import ServerModel
from bagu.recipes.judges import EngineJudge, ServerJudge
from bagu.serve.api_client import ApiClient, Refused
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from tests.json_handler import JsonHandler

ITEMS = [
    Item(id=str(i), prompt=f"hello {i}", choices=(" world", " 你好", " x" * (i + 1)), answer=i % 3) for i in range(12)
]


def task(**changes: object) -> Task:
    fields = {"name": "t", "kind": "choice", "items": lambda: ITEMS, "limits": "none", "delimiter": ""} | changes
    return Task(**fields)  # type: ignore[arg-type]


def test_scores_over_http_are_those_of_the_engine(tiny: Running) -> None:
    model, tokenizer, chat = load()
    here = EngineModel(Engine(model, tokenizer, EngineConfig(num_blocks=512)), tokenizer, chat, "tiny")
    there = ServerModel(tiny.url, api_key=KEY)
    assert there.max_len == 4096 and there.encode("hello world") == here.encode("hello world")
    ids = [here.encode("hello world, 你好"), here.encode("def f(x):")]
    for a, b in zip(here.score(ids, [1, 3]), there.score(ids, [1, 3]), strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert evaluate(there, task()).metrics == evaluate(here, task()).metrics
    greedy = Decoding(max_tokens=6)
    assert here.generate(ids, greedy) == there.generate(ids, greedy)
    drawn = Decoding(max_tokens=6, temperature=1.0, samples=2)
    assert plain(here.generate(ids, drawn)) == plain(there.generate(ids, drawn))
    chats = [{"role": "user", "content": "hello"}]
    assert here.encode_chat(chats) == there.encode_chat(chats)
    assert here.generate_chat([chats, chats], greedy) == there.generate_chat([chats, chats], greedy)
    assert plain(here.generate_chat([chats], drawn)) == plain(there.generate_chat([chats], drawn))


def plain(texts: list[list[str]]) -> list[list[str]]:
    """Without control tokens, which a server leaves out of a text."""
    return [[re.sub(r"<\|\w+\|>", "", text) for text in answers] for answers in texts]


@contextmanager
def served(handler: type[JsonHandler]) -> Iterator[str]:
    """The URL of a server with this handler, in a thread."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class ChatServer(JsonHandler):
    """Answers chats as a server does that ends them at the turn's end, texts with what would follow it."""

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "fixed", "max_model_len": 64}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.reply({"tokens": [1, 2, 3]})
        elif self.path == "/v1/chat/completions":
            text = body["messages"][-1]["content"]
            order = reversed(range(body["n"]))  # OpenAI's API promises no order
            self.reply({"choices": [{"index": i, "message": {"content": f"{text} {i}"}} for i in order]})
        else:
            self.reply({"choices": [{"index": 0, "text": "an answer, and the next turn"}] * len(body["prompt"])})


def test_a_task_of_chats_asks_a_server_for_whole_turns() -> None:
    """By the chat route, which stops at the end of a turn: the route for texts goes on to the user's next one."""
    asked = [Item(id=str(i), messages=({"role": "user", "content": f"q{i}"},), answer="") for i in range(3)]
    texts: list[list[str]] = []

    def grade(items: Sequence[Item], answers: Sequence[Sequence[str]]) -> list[list[float]]:
        texts.extend(list(own) for own in answers)
        return [[0.0] * len(own) for own in answers]

    chats = task(
        kind="generation", chat=True, items=lambda: asked, grade=grade, metric="pass",
        decoding=Decoding(max_tokens=8, temperature=1.0, samples=2),
    )  # fmt: skip
    with served(ChatServer) as url:
        evaluate(ServerModel(url), chats)
    assert texts == [[f"q{i} 0", f"q{i} 1"] for i in range(3)]


@pytest.mark.parametrize(
    ("status", "param", "sizes"),
    [(400, "n", [64, 32, 16, 16, 16, 16]), (413, None, [64, 32, 16, 16, 16, 16]), (400, "prompt", [64]),
     (401, None, [64]), (404, "model", [64])],
)  # fmt: skip
def test_a_call_is_halved_only_if_fewer_prompts_may_pass(status: int, param: str | None, sizes: list[int]) -> None:
    """The server takes 16 prompts a call and refuses more with `status`."""
    asked: list[int] = []

    class SmallCalls(ChatServer):
        def do_POST(self) -> None:
            prompts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            asked.append(len(prompts))
            if len(prompts) > 16:
                self.reply({"error": {"message": "no", "param": param}}, status)
            else:
                self.reply({"choices": [{"index": i, "text": str(ids[0])} for i, ids in enumerate(prompts)]})

    prompts = [[i] for i in range(64)]
    with served(SmallCalls) as url:
        model = ServerModel(url)
        if sizes == [64]:
            with pytest.raises(Refused, match=f"answered {status}"):
                model.generate(prompts, Decoding(max_tokens=1))
        else:
            assert model.generate(prompts, Decoding(max_tokens=1)) == [[str(i)] for i in range(64)]
    assert asked == sizes


def test_a_server_that_cannot_score_is_named() -> None:
    with served(ChatServer) as url, pytest.raises(BaguError, match="gives no prompt_logprobs"):
        ServerModel(url).score([[1, 2, 3]], [1])


def test_a_judge_behind_a_server_answers_as_the_same_model_here(tiny: Running) -> None:
    model, tokenizer, chat = load()
    here = EngineJudge(EngineModel(Engine(model, tokenizer, EngineConfig(num_blocks=512)), tokenizer, chat, "tiny"))
    there = ServerJudge(tiny.url, None, api_key=KEY)
    questions = ["Is this good?", "And this?"]
    assert there.ask(questions) == here.ask(questions)
    with pytest.raises(BaguError, match="answered 401"):
        ServerJudge(tiny.url, None, api_key="wrong")


def test_calls_go_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(ChatServer) as url:
        monkeypatch.setenv("http_proxy", url)
        assert ApiClient("http://model.invalid").first_model()["id"] == "fixed"
        with pytest.raises(BaguError, match="cannot be reached"):
            ApiClient("http://model.invalid", proxies={}).first_model()


def test_a_server_that_is_down_is_named() -> None:
    with pytest.raises(BaguError, match=r"http://127.0.0.1:9 cannot be reached"):
        ServerModel("http://127.0.0.1:9")
