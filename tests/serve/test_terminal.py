"""`bagu chat`: over HTTP with a stub server, and with a real engine in this process."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from page_stub import ANSWER, Stub, stub, tokens
from rich.console import Console
from tiny_server import KEY, MODEL, Running

from bagu.errors import ArgumentError, BaguError
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.recipes.serve import ChatOptions, chat_main
from bagu.serve.chat import terminal
from bagu.serve.chat.clients import EngineChat, HttpChat, Piece
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from tests.json_handler import JsonHandler


@pytest.fixture
def server() -> Iterator[Stub]:
    with stub() as found:
        yield found


def typed(*lines: str) -> Callable[[str], str]:
    """The lines that a user types, then Ctrl-D."""
    rest = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    return read


def talk(chat: Any, *lines: str, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False)
    assert terminal.main(chat, console=console, read=typed(*lines), **options) == 0
    return out.getvalue()


def test_a_conversation_over_http(server: Stub, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    lines = [
        "/system Be brief.",
        "/set temperature=0 top_k=5",
        "two \\",
        "lines",
        "again",
        "/retry",
        f"/save {path}",
        "/new",
        "last",
    ]
    shown = talk(HttpChat(server.url), *lines)
    assert shown.count(ANSWER) == 4
    assert "tokens/s · first token" in shown
    contents = [[m["content"] for m in body["messages"]] for body in server.bodies]
    first = ["Be brief.", "two \nlines"]
    assert contents == [first, [*first, ANSWER, "again"], [*first, ANSWER, "again"], ["Be brief.", "last"]]
    assert {(b["temperature"], b["top_k"], b["model"]) for b in server.bodies} == {(0.0, 5, "tiny")}
    assert [m["role"] for m in json.loads(path.read_text())["messages"]] == ["system", *["user", "assistant"] * 2]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.2}])
def test_bagu_chat_sends_a_server_only_the_sampling_that_was_given(server: Stub, settings: dict[str, float]) -> None:
    chat_main(ChatOptions(model=server.url, prompt="hello", **settings))  # type: ignore[arg-type]
    assert {k: v for k, v in server.bodies[0].items() if k in terminal.SETTINGS} == settings


def test_token_counts_over_http_are_the_servers(server: Stub) -> None:
    """A chunk is not a token: of a character that spans two tokens, only the second has text."""
    made = len(tokens(ANSWER))
    assert f"{made} tokens" in talk(HttpChat(server.url), "hello")
    assert {body["stream_options"]["include_usage"] for body in server.bodies} == {True}


def test_tokens_of_a_real_server_are_its_usage(tiny: Running) -> None:
    settings = {"max_tokens": 40, "seed": 3}
    session = terminal.Session(chat=HttpChat(tiny.url, api_key=KEY), settings=settings)
    session.messages.append({"role": "user", "content": "hello world"})
    pieces: list[str] = []
    took = terminal.stream(session, pieces.append)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello world"}], **settings}
    headers = {"Authorization": f"Bearer {KEY}"}
    usage = tiny.http.post("/v1/chat/completions", json=chat, headers=headers).json()["usage"]
    assert took.tokens == usage["completion_tokens"] != sum(map(bool, pieces))


def test_errors_are_printed_and_the_session_continues(server: Stub) -> None:
    shown = talk(
        HttpChat(server.url),
        "refuse",
        "break",
        "/set temperature=-1",
        "/set warmth=1",
        "/nwe",
        "hello",
        "/quit",
        "never",
    )
    assert "answered 400: the prompt has 9000 tokens and the model 4096" in shown
    assert "half an ans" in shown
    assert "the server ended the answer: the engine died: out of memory" in shown
    assert "temperature is 0 or more" in shown
    assert "there is no setting 'warmth'" in shown
    assert "did you mean 'new'?" in shown
    assert ANSWER in shown
    assert len(server.bodies) == 3


def test_an_unreachable_server_and_a_missing_key_are_errors(server: Stub) -> None:
    with pytest.raises(BaguError, match="cannot be reached"):
        HttpChat("http://127.0.0.1:1")
    with pytest.raises(ArgumentError, match="not the URL"):
        HttpChat("runs/demo")
    server.key = "secret"
    with pytest.raises(BaguError, match="answered 401"):
        HttpChat(server.url)
    assert HttpChat(server.url, api_key="secret").name == "tiny"


def test_an_interrupted_stream_is_an_error() -> None:
    """A server that closes the connection after the first piece."""

    def serve(listener: socket.socket) -> None:
        answers = (
            b'{"data": [{"id": "m"}]}',
            b'data: {"choices": [{"delta": {"content": "Hel"}, "finish_reason": null}]}\n\n',
        )
        for answer in answers:
            peer, _ = listener.accept()
            # The client sends a body in a second segment. Closing with unread bytes would reset the connection.
            with peer, peer.makefile("rb") as request:
                length = 0
                while (header := request.readline()) != b"\r\n":
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                request.read(length)
                peer.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        chat = HttpChat(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(BaguError, match="within the answer"):
            list(chat.answer([{"role": "user", "content": "a"}], {}))
        server.join()
    with pytest.raises(ArgumentError, match="not the URL"):
        HttpChat("http://127.0.0.1:abc")


class NoApi(JsonHandler):
    """A web server that is not a model's."""

    def do_GET(self) -> None:
        self.reply([])


def test_a_server_with_another_api_is_an_error() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), NoApi) as other:
        threading.Thread(target=other.serve_forever).start()
        try:
            with pytest.raises(BaguError, match="/v1/models did not answer as OpenAI's API does"):
                HttpChat(f"http://127.0.0.1:{other.server_port}")
        finally:
            other.shutdown()


def test_a_command_that_only_begins_like_retry_is_not_sent_to_the_model(server: Stub) -> None:
    shown = talk(HttpChat(server.url), "hello", "/retryy", "/retry again")
    assert "there is no command 'retryy'" in shown and "did you mean 'retry'?" in shown
    assert len(server.bodies) == 1


def test_ctrl_c_stops_an_answer_and_keeps_its_text(server: Stub) -> None:
    session = terminal.Session(chat=HttpChat(server.url), messages=[{"role": "user", "content": "count"}])
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if len(shown) == 5:
            raise KeyboardInterrupt

    took = terminal.stream(session, show)
    assert took.finish == "abort" and took.tokens is None and "tokens" not in took.describe().replace("first token", "")
    assert session.messages[-1] == {"role": "assistant", "content": "".join(shown)}
    assert server.left.wait(10)


def test_control_characters_are_printed_as_symbols() -> None:
    class Escapes:
        name = "bad"

        def answer(self, messages: Any, settings: Any) -> Iterator[Piece]:
            yield Piece(text="\x1b[2J\x07ok\r\n\x9b", tokens=1, finish="stop")

    assert "␛[2J␇ok␍\n�" in talk(Escapes(), "go")


def test_with_an_engine_in_this_process() -> None:
    config = ModelConfig(
        vocab_size=256, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32,
        max_len=64,
    )  # fmt: skip
    model = init_weights(Transformer(config, dtype=torch.float32), 0)
    engine = Engine(model, Bytes(), EngineConfig(num_blocks=16, max_num_seqs=2))

    def encode(messages: Any) -> list[int]:
        return list("".join(m["content"] for m in messages).encode())

    chat = EngineChat(engine, encode, name="bytes", max_len=64)
    shown = talk(chat, "hello", "x" * 70, settings={"max_tokens": 8, "temperature": 0})
    assert "8 tokens" in shown and "cut at the token limit" in shown
    assert "the conversation has" in shown
    assert engine.stats().blocks_used == 0


class Bytes:
    """Tokens are bytes; 0 is the end of text."""

    vocab_size, eos_id, byte_level = 256, 0, True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    def bytes_of(self, id: int) -> bytes:
        return bytes([id])
