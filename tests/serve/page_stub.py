"""A stub server for tests of the chat page: the page's files, and the four routes it calls, with fixed answers.

The answer depends on the last message: "count" is a stream that ends only when the client disconnects, "refuse" an HTTP
error, "break" an error inside the stream, "reason" an answer with `reasoning_content`, anything else `Stub.answer`.
With tools the answer to a user is two calls; with a schema it is `Stub.json`. The stream is written a few bytes at
a time, so that events and characters arrive in pieces.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bagu.serve.config import GenerationDefaults
from bagu.serve.page import HEADERS, assets

ANSWER = """PagedAttention keeps the **KV cache** in blocks, as an operating system keeps memory in pages.

1. A sequence has a *block table*.
2. Blocks are shared by their `reference count`.

```python
def blocks_needed(tokens: int, block_size: int = 16) -> int:
    # the last block may be partly empty
    return -(-tokens // block_size)
```

| block size | waste |
|---|---:|
| 16 | 0.8 % |
| 256 | 12.4 % |

块表把逻辑块映射到物理块 👍 <img src=x onerror=alert(1)>"""
PIECE = 11  # bytes per write
DEFAULT_SAMPLING = GenerationDefaults(temperature=0.6, top_k=20).effective
REASONING = "Two and two <b>is</b>\n\n- four"
THOUGHT = "<think>\nTwo and two <b>is</b>\n\n- four\n</think>\n\nIt is **4**."
BLOCKS = "u" * 37 + "c" * 61 + "." * 158

CALLS = [  # deltas: the arguments of the first call arrive in two pieces
    {
        "tool_calls": [
            {"index": 0, "id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
        ]
    },
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "<b>Li'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": 'ma"}'}}]},
    {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "get_time", "arguments": "{}"}}]},
]

PASSAGE = {"text": "The valve opens at 7 bar. <img src=x onerror=alert(1)>", "line": 3}
SOURCE = {"number": 1, "filename": "docs/guide.md", "file_id": "file-1", "vector_store_id": "vs_docs", **PASSAGE}
MARKS = [{"type": "url_citation", "number": 1, "verified": False, "why": "'9' is not in it"}]


class Stub(ThreadingHTTPServer):
    """`bodies` are the chat requests in order; `left` is set when a client disconnects during an answer. An answer
    pauses after the text `pause_after`, if it is set, until `resume` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.assets = assets()
        self.reset()

    def reset(self) -> None:
        """Restore the initial state: all tests use the same server."""
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.engine_calls = 0
        self.key: str | None = None
        self.answer = ANSWER
        self.json = '{"city": "Lima", "population": 10092000}'
        self.models = ["tiny"]
        self.suggested: list[str] = []
        self.images = False
        self.stores: list[dict[str, str]] = []
        self.pause_after: str | None = None
        self.resume = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


@contextmanager
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def tokens(text: str) -> list[bytes]:
    """Words with the space before them; other than ASCII is split into bytes, so that characters span tokens."""
    parts = re.findall(r"[^\x00-\x7f]|[ ]?[A-Za-z0-9_]+|\s|[^\w\s]", text)
    split: list[bytes] = []
    for part in parts:
        raw = part.encode()
        split += [raw] if raw.isascii() else [raw[:2], raw[2:]]
    return split


def logprob(token: bytes, at: int, top: int) -> dict[str, Any]:
    p = [0.97, 0.62, 0.31, 0.94, 0.08, 0.999, 0.004][at % 7]
    others = [(b" memory", 0.5), (b" the", 0.25), (b"\n", 0.125), (b" pages", 0.0625)]
    ranked = sorted([(token, p), *((t, (1 - p) * q) for t, q in others)], key=lambda pair: -pair[1])

    def entry(token: bytes, p: float) -> dict[str, Any]:
        return {"token": token.decode(errors="replace"), "bytes": list(token), "logprob": math.log(p)}

    return {**entry(token, p), "top_logprobs": [entry(*pair) for pair in ranked[:top]]}


CACHED = {**HEADERS, "Cache-Control": "max-age=3600"}  # a load of the page takes 0.3 s of CPU time less


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, body: bytes, media_type: str, status: int = 200, headers: Mapping[str, str] = HEADERS) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def reply_json(self, value: Any, status: int = 200) -> None:
        self.reply(json.dumps(value).encode(), "application/json", status)

    def refuse(self, status: int, message: str) -> None:
        self.reply_json(
            {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}, status
        )

    def allowed(self) -> bool:
        if self.server.key in (None, self.headers.get("Authorization", "").removeprefix("Bearer ")):
            return True
        self.refuse(401, "the API key is wrong or missing")
        return False

    def do_GET(self) -> None:
        asset = self.server.assets.get(self.path)
        if asset:
            self.reply(asset.body, asset.media_type, headers=CACHED)
        elif self.path == "/engine":
            if not self.allowed():
                return
            self.server.engine_calls += 1
            used, cached = BLOCKS.count("u"), BLOCKS.count("c")
            blocks = {"total": len(BLOCKS), "used": used, "cached": cached, "map": BLOCKS}
            rate = 412.5 + 120 * math.sin(self.server.engine_calls / 2)
            self.reply_json(
                {
                    "tokens_per_s": rate,
                    "running": 3,
                    "waiting": 1,
                    "batch_size": 3,
                    "blocks": blocks,
                    "ttft_ms_p50": 23.4,
                }
            )
        elif self.path == "/v1/models":
            if self.allowed():
                common = {
                    "object": "model", "default_sampling": DEFAULT_SAMPLING,
                    "suggested_prompts": self.server.suggested, **({"images": True} if self.server.images else {}),
                }  # fmt: skip
                self.reply_json({"object": "list", "data": [{"id": id, **common} for id in self.server.models]})
        elif self.path.startswith("/v1/vector_stores?"):
            self.reply_json({"object": "list", "data": self.server.stores})
        elif self.path == "/v1/vector_stores/vs_docs/files/file-1/content":
            self.reply_json({"data": [{"type": "text", "text": "# Guide", "line": 1}, {**PASSAGE, "type": "text"}]})
        else:
            self.refuse(404, f"there is nothing at {self.path}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        self.server.bodies.append(body)
        asked = body["messages"][-1]["content"]
        if isinstance(asked, list):
            asked = asked[-1]["text"]
        if "refuse" in asked:
            self.refuse(400, "the prompt has 9000 tokens and the model 4096")
            return
        if "oneOf" in json.dumps(body.get("response_format")):
            self.refuse(400, "response_format: the schema's oneOf is not supported")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for event in self.events(body, asked):
                data = (
                    f"data: {event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}\n\n".encode()
                )
                for at in range(0, len(data), PIECE):
                    self.wfile.write(data[at : at + PIECE])
        except (BrokenPipeError, ConnectionResetError):
            self.server.left.set()

    def events(self, body: dict[str, Any], asked: str) -> Iterator[Any]:
        def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
            return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "tiny", "choices": [choice]}

        yield chunk({"role": "assistant", "content": ""})
        if "count" in asked:
            n = 0
            while True:
                n += 1
                yield chunk({"content": f"{n} "})
                threading.Event().wait(0.005)
        if "break" in asked:
            yield chunk({"content": "half an ans"})
            yield {"error": {"message": "the engine died: out of memory", "code": 503}}
            yield "[DONE]"
            return
        if "reason" in asked:
            for token in tokens(REASONING):
                yield chunk({"reasoning_content": token.decode()})
        if "tools" in body and body["messages"][-1]["role"] == "user":
            yield from map(chunk, CALLS)
            yield chunk({}, "tool_calls")
            yield "[DONE]"
            return
        held, sent = b"", ""
        answer = self.server.json if "response_format" in body else self.server.answer
        parts = tokens(answer.replace("{model}", body["model"]))
        pause_after, resume = self.server.pause_after, self.server.resume
        for at, token in enumerate(parts):
            held += token
            try:
                text, held = held.decode(), b""
            except UnicodeDecodeError:
                text = ""
            sent += text
            top = body.get("top_logprobs", 0)
            yield chunk(
                {"content": text}, None, {"content": [logprob(token, at, top)]} if body.get("logprobs") else None
            )
            if pause_after and sent.endswith(pause_after):
                resume.wait(60)
        read = "file_search" in body and "zebra" not in asked
        cited = {"sources": [SOURCE] if read else [], "annotations": MARKS if read else []}
        yield chunk(cited if "file_search" in body else {}, "stop")
        usage = {"prompt_tokens": 9, "completion_tokens": len(parts), "total_tokens": 9 + len(parts)}
        yield {**chunk({}), "choices": [], "usage": usage}
        yield "[DONE]"
