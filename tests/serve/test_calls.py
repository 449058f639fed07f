"""Event streams to clients that read at once, slowly, or not to the end."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from bagu.data.tokenizer import BpeTokenizer
from bagu.serve.http.bodies.openai import Job
from bagu.serve.http.calls import SEND, ClientCall, EventStream
from bagu.serve.http.errors import ApiError
from bagu.serve.http.keys import Key, KeyUse
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.pending import PendingCalls
from bagu.serve.http.responses import CompletionResponse, to_json
from bagu.serve.request import PromptLogprobs, Request, Sampling, TokenEvent, TokenLogprob
from bagu.serve.wire.messages import Ready

TOKENIZER = BpeTokenizer.train(["abc"], vocab_size=300)


class Client:
    """An ASGI server's `send`, which waits while `gate` is closed, and the bodies it has sent."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.bodies: list[bytes] = []

    async def send(self, message: dict[str, Any]) -> None:
        await self.gate.wait()
        self.bodies.append(message.get("body", b""))

    def texts(self) -> list[str]:
        """The text of each write; of an error its message."""
        found = []
        for body in self.bodies:
            events = [
                json.loads(e.removeprefix("data: ")) for e in body.decode().split("\n\n")[:-1] if "[DONE]" not in e
            ]
            found.append("".join(e["error"]["message"] if "error" in e else e["choices"][0]["text"] for e in events))
        return found


class Open:
    """The part of a `ClientCall` that a stream needs, without an engine."""

    def __init__(self) -> None:
        self.calls = PendingCalls(4, Metrics("m"))
        self.request = Request(id="a", prompt=(1,), sampling=Sampling(max_tokens=9))
        self.pending, self.closed = self.calls.open([self.request]), False

    def close(self) -> None:
        self.closed = True

    def draw(self, text: str, finish: Any = None) -> None:
        self.calls.deliver([TokenEvent("a", 0, TOKENIZER.encode(text)[0], finish=finish)])


def run(scene: Callable[[Open, Client], Coroutine[Any, Any, None]]) -> tuple[Open, Client]:
    """Stream the response of a call while `scene` runs; both must end."""

    async def play() -> tuple[Open, Client]:
        call, client = Open(), Client()
        ready = Ready(tokenizer=TOKENIZER, chat=None, generates=True, max_model_len=9, vocab_size=300)
        job = Job("cmpl-1", (call.request,), None, True, False, True)
        stream = asyncio.create_task(
            EventStream(CompletionResponse(job, ready, "m"), call)({SEND: client.send}, None, client.send)  # type: ignore[arg-type]
        )
        await asyncio.sleep(0)
        await scene(call, client)
        await asyncio.wait_for(stream, 10)
        return call, client

    return asyncio.run(play())


def test_a_token_is_written_in_the_call_that_delivers_it() -> None:
    async def scene(call: Open, client: Client) -> None:
        for n, letter in enumerate("abc", start=1):
            call.draw(letter, finish="length" if letter == "c" else None)
            assert (
                client.texts()[1:] == list("abc")[:n]
            )  # without an iteration of the event loop in between; the first is the head

    call, client = run(scene)
    assert client.bodies[-1] == b"data: [DONE]\n\n" and call.closed


def test_events_for_a_slow_client_are_sent_in_one_write_later() -> None:
    async def scene(call: Open, client: Client) -> None:
        client.gate.clear()
        for letter in "abca":
            call.draw(letter)
            await asyncio.sleep(0)
        assert client.texts() == [""]
        client.gate.set()
        while len(client.bodies) < 3:
            await asyncio.sleep(0)
        call.draw("b", finish="length")

    _, client = run(scene)
    assert client.texts() == ["", "a", "bca", "b", ""]


def test_a_failure_is_sent_to_a_slow_client_after_the_events_before_it() -> None:
    async def scene(call: Open, client: Client) -> None:
        client.gate.clear()
        call.draw("a")
        call.draw("b")
        call.calls.fail("a", ApiError(503, "gone"))
        await asyncio.sleep(0)
        client.gate.set()

    call, client = run(scene)
    assert client.texts() == ["", "a", "b", "gone"] and call.closed


def test_an_error_of_the_asgi_server_ends_the_stream() -> None:
    async def scene(call: Open, client: Client) -> None:
        client.gate.clear()
        call.draw("a")
        client.bodies = None  # type: ignore[assignment]  # the next `append` fails, after a wait
        client.gate.set()

    with pytest.raises(AttributeError):
        run(scene)


def test_only_prompts_that_the_engine_takes_are_counted_and_charged() -> None:
    async def play() -> None:
        calls, key = PendingCalls(4, Metrics("m")), KeyUse(Key(name="k", key="secret"))
        engine: Any = SimpleNamespace(submit=calls.open, close=calls.close)
        requests = tuple(Request(id=id, prompt=(1,) * n) for id, n in (("taken", 3), ("refused", 40)))
        call = ClientCall(engine, requests, asyncio.Event().wait, key)  # type: ignore[arg-type]
        calls.accept("taken")
        assert calls.fail("refused", ApiError(400, "the grammar cannot be compiled")) == ["taken"]
        call.close()
        assert key.tokens == calls.metrics.prompt_tokens == calls.metrics.request_prompt.sum == 3

    asyncio.run(play())


def test_a_prompt_logprob_of_minus_infinity_is_json() -> None:
    ready = Ready(tokenizer=TOKENIZER, chat=None, generates=True, max_model_len=9, vocab_size=300)
    request = Request(id="a", prompt=(1, 2), sampling=Sampling(max_tokens=0, prompt_logprobs=1))
    response = CompletionResponse(Job("cmpl-1", (request,), None, False, False, True), ready, "m")
    never = TokenLogprob(-math.inf, ((3, 0.0), (4, -math.inf)))
    response.add([PromptLogprobs("a", 1, (never,)), TokenEvent("a", 0, None, finish="length")])
    (choice,) = json.loads(to_json(response.body()))["choices"]
    assert [found["logprob"] for found in choice["prompt_logprobs"][1].values()] == [-9999.0, 0.0, -9999.0]
