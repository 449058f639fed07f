"""Scores of pairs and reranking, with an encoder and with a reward model, through real servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tiny_server import MAX_LEN, MODEL, Running, load, running_server

from bagu.errors import BaguError
from bagu.serve.embedding import score
from bagu.serve.http.openapi.schemas import Reranked, ScoreList

TEXTS = ["hello world", "def f(x):", "你好，世界", "return x", "hello, world"]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("reward") / "stderr", "--kind", "reward") as running:
        yield running


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return server.http.post(path, json=body)


def test_an_encoder_scores_by_the_cosine_of_embeddings(encoder: Running) -> None:
    answer = post(encoder, "/v1/score", model=MODEL, text_1="hello world", text_2=TEXTS)
    found = ScoreList.model_validate_json(answer.content, strict=True)
    data = post(encoder, "/v1/embeddings", input=["hello world", *TEXTS]).json()["data"]
    vectors = torch.tensor([row["embedding"] for row in data], dtype=torch.float64)
    expected = (vectors[1:] @ vectors[0]).tolist()
    # fp32 embeddings of a text in two batches differ: 32 products of numbers below 1, each with an error of ulps
    assert [row.score for row in found.data] == pytest.approx(expected, rel=0, abs=64 * 2**-23)
    assert [row.index for row in found.data] == list(range(5)) and found.data[0].score == pytest.approx(1)
    tokens = sum(post(encoder, "/tokenize", prompt=text).json()["count"] for text in TEXTS)
    assert found.usage.prompt_tokens == tokens, "a text in several pairs is embedded once"
    pairs = post(encoder, "/v1/score", text_1=TEXTS[:2], text_2=TEXTS[1:3]).json()["data"]
    assert pairs[0]["score"] == pytest.approx(found.data[1].score, rel=0, abs=64 * 2**-23) and len(pairs) == 2


def test_documents_are_sorted_by_relevance(encoder: Running) -> None:
    scores = [row["score"] for row in post(encoder, "/v1/score", text_1="hello", text_2=TEXTS).json()["data"]]
    documents = [*TEXTS[:3], *({"text": text} for text in TEXTS[3:])]
    answer = post(encoder, "/v1/rerank", model=MODEL, query="hello", documents=documents)
    found = Reranked.model_validate_json(answer.content, strict=True)
    assert [row.index for row in found.results] == sorted(range(5), key=lambda i: -scores[i])
    assert [row.document.text for row in found.results if row.document] == [TEXTS[row.index] for row in found.results]
    answer = post(encoder, "/v1/rerank", query="hello", documents=documents, top_n=2, return_documents=False).json()
    assert answer["results"] == [{"index": r.index, "relevance_score": r.relevance_score} for r in found.results[:2]]


def test_a_reward_model_scores_an_answer_to_a_question(reward: Running) -> None:
    answer = post(reward, "/v1/score", text_1="hello", text_2=TEXTS)
    found = ScoreList.model_validate_json(answer.content, strict=True)
    model, _, chat = load(kind="reward")
    texts = [
        chat.encode([{"role": "user", "content": "hello"}, {"role": "assistant", "content": t}]).ids for t in TEXTS
    ]
    expected = [score(model, [text])[0][0] for text in texts]  # one text at a time
    assert [row.score for row in found.data] == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == 5 and found.usage.total_tokens == sum(map(len, texts))
    ranked = post(reward, "/v1/rerank", query="hello", documents=TEXTS).json()["results"]
    assert [row["index"] for row in ranked] == sorted(range(5), key=lambda i: -expected[i])
    refused = post(reward, "/v1/embeddings", input="a")
    assert refused.status_code == 400 and "scores text" in refused.json()["error"]["message"]
    refused = post(reward, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    assert refused.status_code == 400 and "/v1/score" in refused.json()["error"]["message"]
    paths = reward.get("/openapi.json")["paths"]
    assert {"/v1/score", "/v1/rerank"} <= paths.keys() and not {"/v1/embeddings", "/v1/completions"} & paths.keys()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "a " * MAX_LEN}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents.0.text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
def test_wrong_pairs_are_refused_with_the_field(encoder: Running, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(encoder, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_generating_model_has_no_scores(tiny: Running) -> None:
    from api_client import HEADERS

    answer = tiny.http.post("/v1/score", json={"text_1": "a", "text_2": "b"}, headers=HEADERS)
    assert answer.status_code == 400 and "has no scores" in answer.json()["error"]["message"]


def test_the_loader_of_the_server_accepts_a_reward_model(tmp_path: Path) -> None:
    from bagu.recipes.models import save_model
    from bagu.recipes.serve import Loader

    model, tokenizer, _ = load(kind="reward")
    save_model(model, tokenizer, tmp_path)
    tokenizer.save(tmp_path)
    loader = Loader(model=str(tmp_path), dtype="fp32", device="cpu")
    with pytest.raises(BaguError, match="is a reward model"):
        loader()
    loaded, _, chat = replace(loader, allow_reward=True)()
    assert loaded.config.score_head and chat is not None
