"""The client of `bagu bench serve`: streams OpenAI completions and records the arrival time of each part.

A busy client would measure itself. While requests run, it only stores bytes with their arrival time; HTTP, events and
JSON are parsed after the last stream has ended. Each request has its own connection, which the server closes at the
end.
"""

import asyncio
import bisect
import itertools
import json
import re
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bagu.errors import BaguError
from bagu.machine.cores import available_cores
from bagu.machine.terminal import counted
from bagu.serve.api_client import ApiClient, Refused

Received = list[tuple[float, bytes]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request as seen by the client. Times are seconds on one clock. `times` are the arrivals of events with text,
    and of the last event, which has the finish reason. `error` is None if the answer is complete."""

    asked: float
    times: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class Server(ApiClient):
    """The server that gets the load. Its connections are direct, so no call uses a proxy."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key=api_key, timeout_s=60, proxies={})
        self.host = str(self.parts.hostname)
        self.tls = ssl.create_default_context() if self.parts.scheme == "https" else None
        self.port = self.parts.port or (443 if self.tls else 80)

    @property
    def where(self) -> str:
        """Where client and server run, as far as the client knows."""
        if self.host in ("127.0.0.1", "::1", "localhost"):
            return f"client, server and engine share {counted(available_cores(), 'core')}"
        return f"client on {counted(available_cores(), 'core')}, server on another machine"

    def cpu_seconds(self) -> float | None:
        """CPU time of the server process so far, from its Prometheus metrics; None if the server does not report it."""
        with suppress(Refused), self.response("/metrics") as response:
            found = re.search(r"^process_cpu_seconds_total (\S+)$", response.read().decode(), re.M)
            return None if found is None else float(found[1])
        return None

    def engine_ttft_ms(self, last: int) -> float | None:
        """The engine's median time to first token of the last requests; None if the server does not report it."""
        with suppress(Refused):
            value = self.call(f"/engine?last={last}").get("engine_ttft_ms_p50")
            return None if value is None else float(value)
        return None

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The bytes of a request for a connection of its own."""
        data = json.dumps(body).encode()
        headers = self.headers | {"Host": self.parts.netloc, "Connection": "close", "Content-Length": str(len(data))}
        lines = [f"POST {self.parts.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + data


class _Connection(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self.request, self.received = request, Received()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def drive(
    server: Server,
    requests: Sequence[bytes],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None,
    timeout_s: float,
) -> list[tuple[float, Received | str]]:
    """Send request i at `arrivals[i]` seconds from now, or later if `max_concurrency` requests are in flight. Return
    for each the time it was sent, and the received bytes or the error."""
    loop, room = asyncio.get_running_loop(), asyncio.Semaphore(max_concurrency or len(requests))
    began = loop.time()

    async def one(request: bytes, arrival: float) -> tuple[float, Received | str]:
        await asyncio.sleep(max(0.0, began + arrival - loop.time()))
        async with room:
            asked, transport = time.perf_counter(), None
            try:
                async with asyncio.timeout(timeout_s):
                    transport, connection = await loop.create_connection(
                        lambda: _Connection(request), server.host, server.port, ssl=server.tls
                    )
                    await connection.ended
            except OSError as error:  # includes TimeoutError
                return asked, f"{type(error).__name__}: {error}"
            finally:
                if transport is not None:
                    transport.abort()
            return asked, connection.received

    return await asyncio.gather(*map(one, requests, arrivals))


def answered(asked: float, received: Received | str) -> Answer:
    """Parse the received bytes."""
    if isinstance(received, str):
        return Answer(asked=asked, error=received)
    times: list[float] = []
    usage: dict[str, int] = {}
    try:
        for when, event in _events(received):
            if event == "[DONE]":
                if not {"prompt_tokens", "completion_tokens"} <= usage.keys():
                    raise BaguError("the server reported no token counts (it ignores stream_options.include_usage)")
                read, made = usage["prompt_tokens"], usage["completion_tokens"]
                return Answer(asked=asked, times=tuple(times), input_tokens=read, output_tokens=made)
            chunk = json.loads(event)
            if "error" in chunk:
                raise BaguError(f"the server aborted the answer: {chunk['error']['message']}")
            usage = chunk.get("usage") or usage
            if any(c.get("text") or c.get("finish_reason") for c in chunk["choices"]):
                times.append(when)
    except BaguError as error:
        return Answer(asked=asked, times=tuple(times), error=str(error))
    except (ValueError, KeyError) as error:
        return Answer(asked=asked, times=tuple(times), error=f"{type(error).__name__}: {error}")
    return Answer(asked=asked, times=tuple(times), error="the stream ended before [DONE]")


def _events(received: Received) -> Iterator[tuple[float, str]]:
    """The data of each server-sent event, and the arrival time of its last byte."""
    raw = b"".join(data for _, data in received)
    ends = list(itertools.accumulate(len(data) for _, data in received))
    head, found, _ = raw.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not found or status != [b"200"]:
        text = raw[len(head) + 4 :][:300].decode(errors="replace")
        raise BaguError(f"status {b''.join(status).decode() or 'missing'}: {text or 'nothing'}")
    chunked = b"transfer-encoding: chunked" in head.lower()
    pending = b""
    for end, data in _chunks(raw, len(head) + 4) if chunked else [(len(raw), raw[len(head) + 4 :])]:
        pending += data
        when = received[bisect.bisect_left(ends, end)][0]
        *complete, pending = pending.split(b"\n\n")
        for event in complete:
            if event.startswith(b"data:"):
                yield when, event[5:].strip().decode()


def _chunks(raw: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """The chunks of a body from byte `at` on, each with its end."""
    while (line_end := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line_end].split(b";")[0], 16)
        begin = line_end + 2
        if not size:
            return
        if begin + size > len(raw):
            raise BaguError(f"a chunk of {size} bytes is incomplete")
        yield begin + size, raw[begin : begin + size]
        at = begin + size + 2
