"""A server with an encoder: vectors, batches with a token budget, statistics and metrics."""

from __future__ import annotations

import json
import math
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tiny_server import KEY, MAX_LEN, MODEL, Running, eventually, gone, load, openai_client, running_server

from bagu.serve.http.openapi.schemas import EmbeddingList

BUDGET = 512  # tokens of a batch, tiny_server's max_num_batched_tokens
JSON = {"Content-Type": "application/json"}


def embed(encoder: Running, input: Any, **fields: Any) -> httpx.Response:
    return encoder.http.post("/v1/embeddings", content=json.dumps({"input": input, **fields}), headers=JSON)


def texts_waiting(encoder: Running) -> int:
    """0 where a busy engine does not answer within its second."""
    answer = encoder.http.get("/engine")
    return int(answer.json()["waiting"]) if answer.status_code == 200 else 0


def large_call() -> bytes:
    """A call of 1,000 batches, half a million token ids: nearly as many as a body may have."""
    body = json.dumps({"input": [[7] * BUDGET] * 1000}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def test_the_openai_client_gets_vectors_of_length_1(encoder: Running) -> None:
    with openai_client(encoder.url) as client:
        both = client.embeddings.create(model=MODEL, input=["hello world", "def f(x)"])
        alone = client.embeddings.create(model=MODEL, input="def f(x)", encoding_format="float")
        with pytest.raises(openai.BadRequestError, match="embeds"):
            client.completions.create(model=MODEL, prompt="a")
    vector = alone.data[0].embedding
    assert both.data[1].embedding == pytest.approx(vector, abs=1e-5) != both.data[0].embedding
    assert math.isclose(sum(x * x for x in vector), 1, rel_tol=1e-5)


def test_a_decoder_embeds_the_normalized_state_of_its_last_token(tmp_path: Path) -> None:
    import torch

    model, tokenizer, _ = load()
    texts = ["hello world", "def f(x)", "hello"]
    with running_server(tmp_path / "stderr", "--embeddings") as server:
        answer = EmbeddingList.model_validate(embed(server, texts).json(), strict=True)
        refused = server.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
    assert (refused.status_code, "use /v1/embeddings" in refused.text) == (400, True)
    for text, found in zip(texts, answer.data, strict=True):
        ids = torch.tensor(tokenizer.encode(text))
        with torch.inference_mode():
            ends = torch.tensor([0, len(ids)], dtype=torch.int32)
            last = model(ids, torch.arange(len(ids)), ends, len(ids)).hidden[-1]
        assert found.embedding == pytest.approx((last / last.norm()).tolist(), abs=1e-5)


def test_a_server_that_generates_says_how_to_get_embeddings(tiny: Running) -> None:
    answer = tiny.http.post("/v1/embeddings", json={"input": "hello"}, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 400 and "--embeddings" in answer.json()["error"]["message"]


def test_texts_are_split_into_batches_within_the_token_budget(encoder: Running) -> None:
    before = encoder.get("/engine")["steps"]
    texts = [[1 + i] * 200 for i in range(8)]  # two fit
    answer = embed(encoder, texts).json()
    assert encoder.get("/engine")["steps"] - before == 4
    assert answer["usage"]["prompt_tokens"] == 1600 and [d["index"] for d in answer["data"]] == list(range(8))
    for text, found in zip(texts, answer["data"], strict=True):
        alone = embed(encoder, text).json()["data"][0]["embedding"]
        assert found["embedding"] == pytest.approx(alone, abs=1e-5)
        assert math.isclose(sum(x * x for x in alone), 1, rel_tol=1e-5)


def test_a_text_longer_than_the_budget_is_its_own_batch(encoder: Running) -> None:
    before = encoder.get("/engine")["steps"]
    assert embed(encoder, [[5] * (BUDGET + 1), [6]]).status_code == 200
    assert encoder.get("/engine")["steps"] - before == 2
    assert embed(encoder, [5] * (MAX_LEN + 1)).status_code == 400


@pytest.mark.parametrize("name", ["dimensions", "truncate_prompt_tokens", "task", "messages"])
def test_an_unsupported_field_is_refused(encoder: Running, name: str) -> None:
    answer = embed(encoder, "hello", **{name: 8})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert embed(encoder, "hello", user="me", normalize=True).status_code == 200


def test_a_disconnect_cancels_the_call(encoder: Running) -> None:
    """1,000 batches are cancelled; while they run, a call with one text gets its turn between them."""
    before = encoder.get("/engine")["steps"]
    with encoder.raw(large_call()):
        eventually(lambda: encoder.get("/engine")["waiting"], "the batches wait")
        assert embed(encoder, "hello").status_code == 200
        assert encoder.get("/engine")["waiting"] > 0
    eventually(lambda: not encoder.get("/engine")["waiting"], "the texts of a client that is gone are forgotten")
    assert encoder.get("/engine")["steps"] - before < 1000


@pytest.mark.slow
def test_a_full_queue_returns_429_and_a_killed_server_ends_its_engine(tmp_path: Path) -> None:
    """As for completions, the queue has `max_num_seqs` calls and `max_queue` more. The engine works when its server is
    killed."""
    flags = ("--kind", "encoder", "--max-num-seqs", "2", "--max-queue", "1")
    with running_server(tmp_path / "stderr", *flags) as small, ExitStack() as stack:
        calls = [stack.enter_context(small.raw(large_call())) for _ in range(3)]
        eventually(lambda: texts_waiting(small) > 2 * 1000, "all three calls wait")
        full = embed(small, "hello")
        assert int(full.headers["retry-after"]) >= 1
        assert full.json()["error"] == {
            "message": "the queue is full: 3 of 3 calls are running or waiting",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
        calls[0].close()
        eventually(lambda: embed(small, "hello").status_code == 200, "a call that is gone leaves its place")
        engine = small.engine_pid()
        os.kill(small.process.pid, signal.SIGKILL)
        eventually(lambda: gone(engine), "the engine's process ended with its server")


def test_openapi_describes_an_encoder(encoder: Running) -> None:
    paths = encoder.get("/openapi.json")["paths"]
    assert "/v1/embeddings" in paths and "/v1/completions" not in paths
    answer = embed(encoder, ["hello", "world"], encoding_format="base64")
    EmbeddingList.model_validate_json(answer.content, strict=True)


def test_engine_stats_and_metrics_of_an_encoder(encoder: Running) -> None:
    stats = encoder.get("/engine")
    assert stats["blocks"] == {"total": 0, "used": 0, "cached": 0, "map": ""} and stats["waiting"] == 0
    text = encoder.http.get("/metrics").text
    assert 'vllm:num_requests_waiting{model_name="tiny"} 0' in text and "vllm:kv_cache_usage_perc{model_name" in text
