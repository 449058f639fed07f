"""Requests to the tiny server, for the tests of the HTTP API."""

from __future__ import annotations

import json
from typing import Any

import httpx
from tiny_server import KEY, Running

ASK = [{"role": "user", "content": "hello world, 你好"}]
ALL: dict[str, Any] = {"extra_body": {"ignore_eos": True}}  # a random model may sample the end of text at any time
LONG: dict[str, Any] = {"max_tokens": 3000, **ALL}
JSON = {"Content-Type": "application/json"}
HEADERS = {"Authorization": f"Bearer {KEY}", **JSON}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def post(tiny: Running, path: str, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return tiny.http.post(path, content=content, **{"headers": HEADERS, **options})


def head(path: str, length: int, version: str = "1.1") -> bytes:
    """The head of a request on a raw socket, for a JSON body of this length."""
    lines = [f"POST {path} HTTP/{version}", "Host: x", *(f"{name}: {value}" for name, value in HEADERS.items())]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def get(tiny: Running, path: str, **options: Any) -> httpx.Response:
    return tiny.http.get(path, **options)


def idle(tiny: Running) -> bool:
    stats = tiny.get("/engine")
    return stats["blocks"]["used"] == stats["running"] == stats["waiting"] == 0
