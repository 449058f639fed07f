"""The API in operation: keys, origins, the queue, disconnects, metrics and the engine's state."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_client import ALL, ASK, CHAT, JSON, LONG, TEXT, get, head, idle, post
from tiny_server import KEY, MODEL, ORIGIN, Running, eventually, running_server

from bagu.errors import ArgumentError
from bagu.serve.http.options import ServerOptions


def preflight(tiny: Running, origin: str) -> httpx.Response:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return tiny.http.options(CHAT, headers={"Origin": origin, **asked})


def test_only_pages_of_allowed_origins_can_call(tiny: Running) -> None:
    answer = preflight(tiny, ORIGIN)  # browsers send it without the key
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(answer.headers["access-control-allow-headers"].split(","))
    body: dict[str, Any] = {"messages": ASK, "max_tokens": 2, "stream": True}
    for key, status in ((KEY, 200), ("wrong", 401)):
        headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}", **JSON}
        answer = post(tiny, CHAT, body, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
    refused = preflight(tiny, "http://elsewhere.example")
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    answer = get(tiny, "/health", headers={"Origin": "http://elsewhere.example"})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_origins_are_single_values_or_json_lists() -> None:
    assert ServerOptions(allowed_origins=('["http://a", "http://b:1"]', "https://c")).origins == (
        "http://a",
        "http://b:1",
        "https://c",
    )
    for wrong in ("localhost", "http://a/path", "[1]", '["http://a"'):
        with pytest.raises(ArgumentError, match="allowed origins"):
            _ = ServerOptions(allowed_origins=(wrong,)).origins


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}])
def test_the_api_key_guards_expensive_routes(tiny: Running, header: dict[str, str]) -> None:
    for path, body in ((TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        answer = post(tiny, path, body, headers=header)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert get(tiny, "/health", headers=header).status_code == 200


def test_a_full_queue_returns_429_with_retry_after(client: openai.OpenAI, tiny: Running) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "hello", **LONG}
    streams = [client.completions.create(**ask, n=8, stream=True) for _ in range(2)]
    try:
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="one too many")
        assert int(refused.value.response.headers["retry-after"]) >= 1
    finally:
        for stream in streams:
            stream.close()
    eventually(lambda: idle(tiny), "the closed streams gave their blocks back")
    assert client.completions.create(model=MODEL, prompt="now").choices


def test_a_disconnect_frees_the_blocks_with_and_without_streaming(client: openai.OpenAI, tiny: Running) -> None:
    with client.completions.create(model=MODEL, prompt="hello", stream=True, **LONG) as stream:
        next(iter(stream))
        assert tiny.get("/engine")["blocks"]["used"] > 0
    eventually(lambda: idle(tiny), "the blocks of a closed stream are free")
    body = json.dumps({"prompt": "hello", "max_tokens": 3000, "ignore_eos": True}).encode()
    with tiny.raw(head(TEXT, len(body)) + body):
        eventually(lambda: tiny.get("/engine")["running"], "the call without a stream runs")
    eventually(lambda: idle(tiny), "the blocks of a call without a stream are free")


def test_metrics_count_requests_and_tokens(client: openai.OpenAI, tiny: Running) -> None:
    def value(name: str) -> float:
        text = get(tiny, "/metrics").text
        return sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M))

    names = ["vllm:generation_tokens_total", "vllm:request_success_total", "vllm:time_to_first_token_seconds_count"]
    names += ["vllm:inter_token_latency_seconds_count", "vllm:request_prompt_tokens_count"]
    before = [value(name) for name in names]
    client.completions.create(model=MODEL, prompt="hello", max_tokens=5, **ALL)
    assert [value(n) - b for n, b in zip(names, before, strict=True)] == [5, 1, 1, 4, 1]
    assert value("vllm:num_requests_running") == 0
    assert 'handler="/v1/completions"' in get(tiny, "/metrics").text
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert f"# TYPE vllm:spec_decode_num_{name}_total counter" in get(tiny, "/metrics").text
    for line in get(tiny, "/metrics").text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) .+|[a-z0-9_:]+(\{([a-z_]+="[^"]*",?)+\})? [-+0-9.e]+', line), line


def test_an_http_1_0_stream_is_not_chunked_and_ends_with_the_connection(tiny: Running) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 5, "stream": True, "ignore_eos": True}).encode()
    with tiny.raw(head(TEXT, len(body), "1.0") + body) as connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    top, _, stream = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in top.lower() and b"connection: close" in top.lower()
    assert stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n")
    with tiny.raw(b"GET /version HTTP/1.0\r\n\r\n") as connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    top, _, whole = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(whole) in top.lower() and json.loads(whole)["version"]


def test_queue_prefill_and_decode_times_add_up(client: openai.OpenAI, tiny: Running) -> None:
    def total(name: str) -> tuple[float, float]:
        text = get(tiny, "/metrics").text
        found = [re.search(rf"^vllm:{name}_seconds_{part}{{.*}} (\S+)$", text, re.M) for part in ("sum", "count")]
        assert found[0] is not None and found[1] is not None, name
        return float(found[0][1]), float(found[1][1])

    names = ["request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency"]
    before = [total(name) for name in names]
    # eight run at the same time: one of nine requests waits until another has finished
    client.completions.create(model=MODEL, prompt=[[5] * 300] * 9, max_tokens=40, **ALL)
    spent = [(s - b, c - n) for (s, c), (b, n) in zip(map(total, names), before, strict=True)]
    assert [count for _, count in spent] == [9] * 4
    queue, prefill, decode, whole = (seconds for seconds, _ in spent)
    assert min(queue, prefill, decode) > 0 and queue + prefill + decode <= whole + 1e-6  # of rounding


def test_the_page_and_engine_stats_are_served(tiny: Running) -> None:
    page = get(tiny, "/")
    assert page.status_code == 200 and "<html" in page.text and "Content-Security-Policy" in page.headers
    for name in re.findall(r'(?:src|href)="/?([\w.]+)"', page.text):
        assert get(tiny, f"/{name}").status_code == 200, name
    stats = tiny.get("/engine")
    blocks = stats["blocks"]
    assert len(blocks["map"]) == blocks["total"] and blocks["map"].count("c") == blocks["cached"]
    assert {"tokens_per_s", "running", "waiting", "batch_size", "ttft_ms_p50"} <= stats.keys()
    assert tiny.get("/version")["version"]


def test_an_idle_engine_makes_no_step(tiny: Running) -> None:
    eventually(lambda: idle(tiny), "nothing runs")
    steps = {tiny.get("/engine")["steps"] for _ in range(20)}  # every call wakes the engine's loop
    assert len(steps) == 1


def test_the_servers_process_does_not_load_torch(tmp_path: Path) -> None:
    """Importing torch takes 2 s of CPU time and 200 MB. Only the engine's process needs it."""
    if sys.platform != "linux":
        pytest.skip("/proc shows the files that a process has loaded")
    with running_server(tmp_path / "stderr", "--api-key", KEY, fork=False) as server:
        assert post(server, CHAT, {"messages": ASK, "max_tokens": 2}).status_code == 200  # its tokenizer is loaded
        http, engine = (Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, server.engine_pid()))
    assert "libtorch" in engine and "libtorch" not in http
