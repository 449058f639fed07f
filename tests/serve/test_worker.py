"""Pending calls and their latencies."""

from __future__ import annotations

import asyncio

import pytest

from bagu.serve.http.errors import ApiError
from bagu.serve.http.observe.metrics import Histogram, Metrics
from bagu.serve.http.pending import PendingCalls
from bagu.serve.request import Request, Sampling, TokenEvent


def request(id: str, n: int = 1) -> Request:
    return Request(id=id, prompt=(1, 2), sampling=Sampling(n=n))


def test_a_call_reads_all_new_events_and_ends_with_its_last_choice() -> None:
    async def scene() -> None:
        calls = PendingCalls(4, metrics := Metrics("m"))
        call = calls.open([request("a", n=2)])
        reader = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        calls.deliver([TokenEvent("a", 0, 5), TokenEvent("a", 1, 6), TokenEvent("stranger", 0, 7)])
        assert [e.token for e in await reader] == [5, 6]  # type: ignore[union-attr]
        calls.deliver([TokenEvent("a", 0, 8, finish="length")])
        calls.deliver([TokenEvent("a", 1, 9, finish="stop")])
        assert len(await call.read()) == 2 and await call.read() == []
        assert calls.close(call) == [] and calls.choices == 0
        assert metrics.finished == {"length": 1, "stop": 1, "abort": 0} and metrics.generation_tokens == 4
        assert sum(metrics.first_token.counts) == sum(metrics.between_tokens.counts) == 2

    asyncio.run(scene())


def test_a_failure_is_raised_after_the_events_before_it() -> None:
    async def scene() -> None:
        calls = PendingCalls(4, metrics := Metrics("m"))
        call = calls.open([request("a"), request("b")])
        calls.deliver([TokenEvent("a", 0, 5)])
        assert calls.fail("a", ApiError(503, "gone")) == ["b"]
        assert len(await call.read()) == 1
        with pytest.raises(ApiError, match="gone"):
            await call.read()
        assert calls.choices == 0 and metrics.finished["error"] == 2

    asyncio.run(scene())


def test_closing_a_call_returns_its_unfinished_requests() -> None:
    calls = PendingCalls(4, metrics := Metrics("m"))
    call = calls.open([request("a"), request("b", n=2)])
    calls.deliver([TokenEvent("a", 0, 5, finish="stop"), TokenEvent("b", 0, 5, finish="stop")])
    assert calls.close(call) == ["b"] and calls.close(call) == []
    assert metrics.finished == {"stop": 2, "abort": 1} and calls.choices == 0


def test_the_queue_is_bounded() -> None:
    calls = PendingCalls(4, Metrics("m"))
    calls.open([request("a", n=3)])
    with pytest.raises(ApiError) as full:
        calls.open([request("b", n=2)])
    assert full.value.status == 429 and int(full.value.headers["Retry-After"]) >= 1
    with pytest.raises(ApiError) as never:
        calls.open([request("c", n=5)])
    assert never.value.status == 400  # it does not even fit into an empty queue
    calls.open([request("d")])


def test_a_histogram_is_cumulative() -> None:
    histogram = Histogram("h", "Help.", (1, 2), keep=3)
    for value in (0.5, 1, 1.5, 9):
        histogram.observe(value)
    lines = [line.split()[-1] for line in histogram.lines('a="b"')][2:]
    assert lines == ["2", "3", "4", "12.0", "4"]
    assert histogram.quantile(0.5) == 1.5 and histogram.quantile(0.5, last=1) == 9  # of the last three; of the last one
    assert histogram.quantile(0.5, last=0) is None
