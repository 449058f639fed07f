"""Faults that the server must survive: killed clients and engines, engines that hang, signals, and any JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest
import tiny_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_server import KEY, MODEL, PATIENCE_S, Running, eventually, gone, healthy, openai_client, running_server

from bagu.serve.config import EngineConfig
from bagu.serve.http.process import EngineProcess
from bagu.serve.wire.encode import MessageReader
from bagu.serve.wire.messages import Stop

HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
LONG: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}


def idle(tiny: Running) -> bool:
    stats = tiny.get("/engine")
    return stats["blocks"]["used"] == stats["running"] == stats["waiting"] == 0


def reason(tiny: Running) -> str:
    """The reason of /health; empty if the server is healthy."""
    answer = tiny.http.get("/health")
    assert (answer.status_code, "reason" in answer.json()) in ((200, False), (503, True))
    return str(answer.json().get("reason", ""))


def received(connection: socket.socket) -> bytes:
    """Everything that the server sends until it shuts down its writing side."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def refuses_connections(running: Running) -> bool:
    try:
        running.raw(b"").close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_client_killed_mid_stream_frees_its_blocks(tiny: Running) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"prompt": "hello", "max_tokens": 3000, "ignore_eos": True, "stream": True})
    asked = [curl, "-sN", f"{tiny.url}/v1/completions", "-d", body]
    asked += [word for name, value in HEADERS.items() for word in ("-H", f"{name}: {value}")]
    with subprocess.Popen(asked, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline().startswith(b"data: ")
        assert tiny.get("/engine")["running"] == 1
        process.kill()
    eventually(lambda: idle(tiny), "the killed client's blocks are free")


def test_an_engine_killed_mid_stream_is_reported_and_started_again(client: openai.OpenAI, tiny: Running) -> None:
    stream = client.completions.create(stream=True, **LONG)
    assert next(iter(stream)).choices
    engine = tiny.engine_pid()
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="SIGKILL"):
        for _ in stream:
            pass
    assert "SIGKILL" in reason(tiny)
    with pytest.raises(openai.InternalServerError, match="SIGKILL") as refused:
        client.completions.create(model=MODEL, prompt="a")
    assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
    eventually(lambda: healthy(tiny), "the engine is back")
    assert tiny.engine_pid() != engine
    assert client.completions.create(model=MODEL, prompt="a").choices
    eventually(lambda: idle(tiny), "the blocks of the call are free")
    assert 'bagu:engine_restarts_total{model_name="tiny"} 0' not in tiny.http.get("/metrics").text


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that tests may kill."""
    flags = ("--stall-timeout", "3", "--request-timeout", "2", "--shutdown-timeout", "60")
    with running_server(tmp_path_factory.mktemp("mortal") / "stderr", *flags) as running:
        yield running


@pytest.mark.slow
def test_health_depends_on_the_age_of_the_last_step(mortal: Running) -> None:
    engine = mortal.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        said = eventually(lambda: reason(mortal), "a stopped engine is seen")
        assert "last step" in said
    finally:
        os.kill(engine, signal.SIGCONT)
    eventually(lambda: healthy(mortal), "it ticks again")


HALF_SENT = {
    "nothing": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 1000\r\n\r\n{",
    "the rest of a body that was refused": b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
}


def test_incomplete_requests_time_out(mortal: Running) -> None:
    """Also requests that send one byte at a time, as in a Slowloris attack: five of each kind, and five that do not."""
    began = time.monotonic()
    opened = {f"{kind} {i}": mortal.raw(data) for kind, data in HALF_SENT.items() for i in range(10)}
    drip = {name for name in opened if int(name[-1]) % 2 and not name.startswith("nothing")}
    answers = dict.fromkeys(opened, b"")
    try:
        while opened:
            assert time.monotonic() - began < PATIENCE_S, f"still open: {sorted(opened)}"
            for name, connection in list(opened.items()):
                connection.settimeout(0.01)
                try:
                    more = connection.recv(65536)
                    answers[name] += more
                    if not more:
                        opened.pop(name).close()
                except TimeoutError:
                    if name in drip:
                        with contextlib.suppress(ConnectionError):  # the next recv sees it
                            connection.send(b"x")
                except ConnectionError:  # the server closed before it read the last byte
                    assert name in drip
                    opened.pop(name).close()
    finally:
        for connection in opened.values():
            connection.close()
    assert time.monotonic() - began >= 1.5  # not disconnected at once
    for name, answer in answers.items():
        if name.startswith("half"):
            assert b" 408 " in answer.split(b"\r\n")[0] and b"was not complete after 2 s" in answer, name
    eventually(lambda: healthy(mortal), "the server is healthy")


@pytest.mark.parametrize("piece, pause_s", [pytest.param(b"x", 0.05, marks=pytest.mark.slow), (b"x" * 2**16, 0.0)])
def test_a_client_that_keeps_sending_after_its_response_is_disconnected(
    mortal: Running, piece: bytes, pause_s: float
) -> None:
    """After 2 seconds, or after 1 MiB."""
    began = time.monotonic()
    with mortal.raw(HALF_SENT["half a head"]) as connection:
        answer = received(connection)  # then the server has shut down its writing side, and still reads
        assert b" 408 " in answer.split(b"\r\n")[0]
        sent = 0
        with pytest.raises(ConnectionError):  # a reset or a broken pipe
            while time.monotonic() - began < PATIENCE_S:
                sent += connection.send(piece)
                time.sleep(pause_s)
    # not before it: 2 s to send the request and 2 s after the response, of which timers may skip a little
    assert time.monotonic() - began > 3.5 or (sent > 2**20 and not pause_s)
    eventually(lambda: healthy(mortal), "the server is healthy")


def test_an_endless_head_is_refused(mortal: Running) -> None:
    with mortal.raw(b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000) as connection:
        assert b" 431 " in received(connection).split(b"\r\n")[0]


@pytest.mark.slow
def test_calls_get_an_error_after_the_shutdown_timeout(tmp_path: Path) -> None:
    """A stream gets an event, another call a status; a client that does not read is disconnected; no traceback."""
    body = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True}

    def head(length: int) -> bytes:
        lines = (
            "POST /v1/completions HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        )
        return "\r\n".join([*lines, "", ""]).encode()

    with running_server(tmp_path / "stderr", "--shutdown-timeout", "0.5") as running, ExitStack() as stack:
        stream, plain, deaf = (
            stack.enter_context(running.raw(head(len(sent)) + sent))
            for sent in (
                json.dumps({**body, **more}).encode() for more in ({"stream": True}, {}, {"stream": True, "n": 5})
            )
        )
        assert stream.recv(1)
        eventually(lambda: running.get("/engine")["running"] == 7, "all choices run")
        running.http.close()
        running.process.send_signal(signal.SIGTERM)
        streamed, answered = (received(connection).decode() for connection in (stream, plain))
        assert running.process.wait(timeout=PATIENCE_S) == 0
        deaf.close()
    assert '"message":"the server is shutting down"' in streamed and "data: [DONE]" in streamed
    top, _, answer = answered.partition("\r\n\r\n")
    assert " 503 " in top.splitlines()[0] and json.loads(answer)["error"]["code"] == "shutting_down"
    log = (tmp_path / "stderr").read_text()
    assert "Traceback" not in log and "Exception" not in log, log


def test_ctrl_c_while_the_engine_imports_prints_no_traceback(tmp_path: Path) -> None:
    with running_server(tmp_path / "stderr", ready=False, fork=False) as running:
        children = Path(f"/proc/{running.process.pid}/task")
        named = eventually(lambda: spawned(children), "the engine starts")
        for pid in [running.process.pid, *named]:  # a terminal sends it to all processes
            os.kill(pid, signal.SIGINT)
        assert running.process.wait(timeout=PATIENCE_S) == 0
    assert (tmp_path / "stderr").read_text().count("Traceback") == 0


def spawned(tasks: Path) -> list[int]:
    """The processes that multiprocessing has spawned from the threads of a process."""
    pids = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_sigterm_lets_running_calls_finish(mortal: Running) -> None:
    engine = mortal.engine_pid()
    with openai_client(mortal.url) as client:
        stream = client.completions.create(stream=True, **LONG)
        first = next(iter(stream))
        os.kill(engine, signal.SIGSTOP)  # so that the call is still running when the server handles the signal
        mortal.process.send_signal(signal.SIGTERM)
        eventually(lambda: refuses_connections(mortal), "the server is shutting down")
        os.kill(engine, signal.SIGCONT)
        chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model=MODEL, prompt="a")
    assert mortal.process.wait(timeout=PATIENCE_S) == 0, mortal.log.read_text()
    assert gone(engine)


@pytest.mark.usefixtures("forked")
def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, tiny_server.__file__, "--broken"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 1 and "the engine did not start: the weights are torn" in run.stderr
    assert run.stderr.count("the weights are torn") == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TOKEN = st.integers(-1, 400)
NEAR: dict[str, st.SearchStrategy[Any]] = {  # values that pass the type checks
    "prompt": st.text(max_size=20) | st.lists(TOKEN, max_size=6) | st.lists(st.text(max_size=5), max_size=4),
    "messages": st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x"]), "content": JSON})),
    "max_tokens": st.integers(-1, 5),
    "n": st.integers(-1, 4),
    "temperature": st.floats(-1, 3),
    "top_k": st.integers(-2, 400),
    "top_p": st.floats(-0.1, 1.1),
    "min_p": st.floats(-0.1, 1.1),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.booleans() | st.integers(-1, 25),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
    "logit_bias": st.dictionaries(TOKEN.map(str), st.floats(-110, 110), max_size=3),
    "stop_token_ids": st.lists(TOKEN, max_size=3),
    "seed": st.integers(),
    "min_tokens": st.integers(-1, 5),
    "repetition_penalty": st.floats(-1, 3),
    "presence_penalty": st.floats(-3, 3),
    "prompt_logprobs": st.integers(-1, 3),
}
OTHER = (
    "model frequency_penalty ignore_eos stream_options top_logprobs priority chat_template_kwargs skip_special_tokens "
    "tools tool_choice response_format tokens user input text instructions"
)
BODIES = st.fixed_dictionaries(
    {},
    optional={name: near | near | JSON for name, near in NEAR.items()} | dict.fromkeys(OTHER.split(), JSON),
)


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]


@settings(max_examples=80, derandomize=True, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=BODIES)
def test_no_json_breaks_the_server(tiny: Running, path: str, body: dict[str, Any]) -> None:
    body.setdefault("max_tokens", 3)
    if body["max_tokens"] is None:
        body["max_tokens"] = 3  # otherwise a chat would use the whole context
    engine = tiny.engine_pid()
    answer = tiny.http.post(path, content=json.dumps(body), headers=HEADERS)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert path == "/v1/responses" or (answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text)
    assert tiny.engine_pid() == engine


def test_a_call_in_the_moment_after_the_engine_died_does_not_raise() -> None:
    """Until its end is handled, the engine counts as ready; uvloop raises on a write to a closed transport."""
    uvloop = pytest.importorskip("uvloop")

    async def send_after_the_end() -> bool:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, reader = await loop.create_unix_connection(lambda: MessageReader(Mock(), Mock()), sock=ours)
        engine = EngineProcess(Mock(), EngineConfig(), Mock())
        engine._transport = transport
        theirs.close()
        await reader.ended
        engine.send(Stop())
        return transport.is_closing()

    assert uvloop.run(send_after_the_end())
