"""An evaluation of a model behind a server gives the scores of the same model in this process."""

from __future__ import annotations

import pytest
from tiny_server import KEY, Running, load

from bagu.errors import BaguError
from bagu.eval.model import Decoding
from bagu.eval.score import evaluate
from bagu.eval.task import Item, Task
from bagu.recipes.eval_models import EngineModel, ServerModel
from bagu.recipes.judges import EngineJudge, ServerJudge
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine

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
    chats = [{"role": "user", "content": "hello"}]
    assert here.encode_chat(chats) == there.encode_chat(chats)


def test_a_judge_behind_a_server_answers_as_the_same_model_here(tiny: Running) -> None:
    model, tokenizer, chat = load()
    here = EngineJudge(EngineModel(Engine(model, tokenizer, EngineConfig(num_blocks=512)), tokenizer, chat, "tiny"))
    there = ServerJudge(tiny.url, None, api_key=KEY)
    questions = ["Is this good?", "And this?"]
    assert there.ask(questions) == here.ask(questions)
    with pytest.raises(BaguError, match="answered 401"):
        ServerJudge(tiny.url, None, api_key="wrong")


def test_a_server_that_is_down_is_named() -> None:
    with pytest.raises(BaguError, match=r"http://127.0.0.1:9 cannot be reached"):
        ServerModel("http://127.0.0.1:9")
