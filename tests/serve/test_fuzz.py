"""Thousands of odd requests to one server with drafts, adapters, tools and schemas: no 500, no hang, nothing kept.

>>> pytest -m slow -s tests/serve/test_fuzz.py        # prints the counts
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_client import HEADERS, idle
from small_adapters import saved_adapter
from test_request_cost import HOLE, Fill, Meter, operations, shapes
from tiny_server import KEY, MODEL, Running, eventually, load, no_certificates, running_server

NUM_REQUESTS, NUM_WARM, NUM_CLIENTS = 10_000, 5_000, 6
SEED = 36
MAX_GROWTH = 1.1  # of the resident memory of all processes, from the warm server to the end
TIMEOUT_S = 120.0  # without a byte: a hang
LONE = "\ud800"  # json.dumps writes its escape
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3, 0.5, 1e-46, 1e308, -(2**63) - 1, 2**63, 10**30, "", "a", LONE, f"x{LONE}y", "\0",
    "你好", "<tool_call>", "auto", "none", "json_object", [], {}, [[]], [None], {"a": None}, {LONE: 1}, "a" * 3000,
    [0] * 3000, [257], [-1], ["a", "b"], {"type": "text"}, {"type": "json_object"},
]  # fmt: skip
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {"enum": ["x", None, 3]}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"type": "number", "minimum": -3, "maximum": 3}, "maxItems": 4},
    {"type": "integer", "minimum": -(2**70)}, {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    {"type": "string", "pattern": "^[a-c]{1,3}$"}, {"type": "string", "format": "date"}, {"type": "x"}, {"const": LONE},
    {"$ref": "#"}, {"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}, True, False, {},
]  # fmt: skip
TEXTS = ["hello world, 你好", "def f(x):\n    return x\n" * 4, "a b a b a b a b a b a b", "🙂", "", "x" * 2000]


def tool(draw: random.Random, name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": draw.choice([*SCHEMAS[:2] * 9, *SCHEMAS])}}


def chat(draw: random.Random) -> dict[str, Any]:
    """A chat that most servers would take: tools, schemas, drafts of repeated text, adapters, streams."""
    body: dict[str, Any] = {
        "model": draw.choice([*[MODEL, "one", "two"] * 4, "three"]),
        "messages": [{"role": "user", "content": draw.choice(TEXTS)} for _ in range(draw.choice([1, 1, 2]))],
        "max_tokens": draw.choice([1, 5, 20, 60]), "stream": draw.random() < 0.5,
    }  # fmt: skip
    if draw.random() < 0.5:
        names = ["clock", "get_weather"][: draw.choice([1, 2])]
        named = {"type": "function", "function": {"name": "clock"}}
        body |= {"tools": [tool(draw, name) for name in names]}
        body |= {
            "tool_choice": draw.choice(["auto", "required", "none", named]),
            "parallel_tool_calls": draw.random() < 0.5,
        }
    if draw.random() < 0.3:
        schema = {"name": "s", "schema": draw.choice(SCHEMAS)}
        body["response_format"] = draw.choice([{"type": "json_object"}, {"type": "json_schema", "json_schema": schema}])
    elif draw.random() < 0.2:
        body["structured_outputs"] = draw.choice(
            [
                {"json": draw.choice(SCHEMAS)}, {"regex": "[ab]{2,5}"}, {"regex": "("}, {"choice": ["yes", "no"]},
                {"choice": [LONE]}, {"grammar": 'start: "a" | "b" start'},
            ]
        )  # fmt: skip
    more: dict[str, list[Any]] = {
        "n": [1, 2, 5], "temperature": [0, 1, 2, 1e-46], "top_p": [0.1, 1, 1e-50], "top_k": [1, 5, 400],
        "seed": [0, 2**63 - 1], "stop": ["a", ["b", "\n"]], "logit_bias": [{"5": 100}, {"5": -100}], "min_tokens": [3],
        "repetition_penalty": [0.5, 2], "ignore_eos": [True], "user": ["u", LONE], "prompt_logprobs": [1],
        "metadata": [{"a": "b"}, {"a": LONE}], "logprobs": [True], "top_logprobs": [0, 5], "store": [True],
    }  # fmt: skip
    return body | {name: draw.choice(values) for name, values in more.items() if draw.random() < 0.06}


def spoiled(draw: random.Random, value: Any) -> Any:
    """A copy with one odd value, field or item somewhere in it."""
    if draw.random() < 0.2 or not isinstance(value, (dict, list)) or not value:
        return draw.choice(ODD)
    if isinstance(value, list):
        i = draw.randrange(len(value))
        return [*value[:i], spoiled(draw, value[i]), *value[i + 1 :]]
    name = draw.choice([*value, "unknown", LONE])
    return {**value, name: spoiled(draw, value.get(name))}


def requests(server: Running, folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """(kind, route, body), without end; each kind has its share."""
    draw, values = random.Random(SEED), shapes()
    fills: list[tuple[str, str, Fill]] = list(operations(server))
    adapters = [("load", {"lora_name": "two", "lora_path": str(folder / "two")}), ("unload", {"lora_name": "two"})]
    while True:
        kind = draw.choices(
            ["chat", "response", "text", "field", "adapter", "limit", "bytes"], [45, 10, 10, 25, 4, 2, 4]
        )[0]
        route, body = "/v1/chat/completions", chat(draw)
        if kind == "response":
            route, body["input"] = "/v1/responses", body.pop("messages")
            body["max_output_tokens"] = body.pop("max_tokens")
            body["tools"] = [{"type": "function", **tool["function"]} for tool in body.pop("tools", [])]
        elif kind == "text":
            route, body["prompt"] = (
                "/v1/completions",
                draw.choice([*TEXTS, [5, 6, 5, 6, 5, 6], [2**40], [TEXTS[0], "a"]]),
            )
            body = {name: body[name] for name in body if name not in ("messages", "tools", "tool_choice")}
        elif kind == "adapter":
            verb, body = draw.choice(adapters)
            route = f"/v1/{verb}_lora_adapter"
        elif kind in ("field", "limit"):
            route, _, fill = draw.choice(fills)
            if kind == "limit":
                hole = json.dumps(fill(HOLE)).encode()
                yield kind, route, hole.replace(json.dumps(HOLE).encode(), draw.choice([*values.values()]), 1)
                continue
            body = fill(draw.choice(ODD))
        if draw.random() < 0.2 and kind not in ("field", "adapter"):
            body = spoiled(draw, body)
        raw = json.dumps(body).encode()
        yield (
            kind,
            route,
            raw if kind != "bytes" else raw[: draw.randrange(len(raw))] + draw.choice([b"", b"\xff", b"]", b"NaN"]),
        )


def send(client: httpx.Client, request: tuple[int, tuple[str, str, bytes]]) -> str:
    """What came back: a status, or a fault in words. One in seven clients of a stream hangs up early."""
    number, (_, route, body) = request
    try:
        with client.stream("POST", route, content=body, headers=HEADERS) as answer:
            text = b""
            for part in answer.iter_bytes():
                text += part
                if number % 7 == 0 and "event-stream" in answer.headers["content-type"]:
                    return "200 left"
        if answer.status_code >= 500 or b"Traceback" in text or (answer.status_code == 200 and b'"error":{' in text):
            return f"fault: {route} {answer.status_code} {text[:300]!r} for {body[:300]!r}"
        return f"{answer.status_code}{' stream' if 'event-stream' in answer.headers['content-type'] else ''}"
    except httpx.HTTPError as error:
        return f"fault: {route} {error!r} for {body[:300]!r}"


def resident(server: Running) -> list[float]:
    """MB of the server and of each process that it has started."""
    waiting, found = [server.process.pid], []
    while waiting:
        pid = waiting.pop()
        found.append(round(Meter(pid).status("VmRSS") / 2**20, 1))
        for thread in Path(f"/proc/{pid}/task").iterdir():
            waiting += map(int, (thread / "children").read_text().split())
    return found


@pytest.mark.slow
def test_ten_thousand_odd_requests_leave_the_server_as_it_was(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        saved_adapter(load()[0], tmp_path / "adapters" / name, seed)
    root, flags = tmp_path / "adapters", ("--speculative", "ngram", "--max-adapters", "2", "--max-model-len", "512")
    flags = (
        *flags,
        "--api-key",
        KEY,
        "--open-metrics",
        "--adapter",
        "one",
        str(root / "one"),
        "--adapter-root",
        str(root),
    )
    counts, faults, warm, began = Counter[str](), [], 0.0, time.monotonic()
    with (
        running_server(tmp_path / "stderr", *flags) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S, trust_env=False, verify=no_certificates()) as client,
        ThreadPoolExecutor(NUM_CLIENTS) as pool,
    ):
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        source = requests(server, root)
        for start in range(0, NUM_REQUESTS, 500):
            drawn = [next(source) for _ in range(500)]
            found = list(pool.map(lambda r: send(client, r), enumerate(drawn)))
            faults += [line for line in found if line.startswith("fault")]
            counts.update(
                f"{kind} {'fault' if line.startswith('fault') else line}"
                for (kind, _, _), line in zip(drawn, found, strict=True)
            )
            eventually(lambda: idle(server), "no block is used, no request runs or waits")
            now = sum(parts := resident(server))
            warm = now if start + 500 == NUM_WARM else warm
            print(
                f"{start + 500} requests, {time.monotonic() - began:.0f} s, {now:.0f} MB {parts}, {len(faults)} faults",
                flush=True,
            )
        state = server.get("/engine")
    print(dict(sorted(counts.items())), state["draft_accept_percent"], *faults, sep="\n")
    assert faults == [] and "Traceback" not in server.log.read_text()
    assert state["draft_accept_percent"] is not None, "drafts were verified"
    assert now <= MAX_GROWTH * warm, f"{warm:.0f} MB when warm, {now:.0f} MB at the end"
