"""When the engine process sends events: plain tokens of short steps together, everything else at once."""

from __future__ import annotations

import marshal
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from bagu.serve.request import PromptLogprobs, TokenEvent
from bagu.serve.wire.encode import STEP_TAG
from bagu.serve.worker import generation_loop
from bagu.serve.worker.generation_loop import EventBuffer


def token(number: int, finish: str | None = None) -> TokenEvent:
    return TokenEvent("a", 0, number, finish=finish)  # type: ignore[arg-type]


def received(pipe: Connection) -> list[list[int]]:
    """The tokens of each received message."""
    found = []
    while pipe.poll():
        data = pipe.recv_bytes()
        assert data[:1] == STEP_TAG
        found.append([event[2] for event in marshal.loads(data[1:])[0]])
    return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[EventBuffer, Connection]:
    """A buffer for which every step is short."""
    monkeypatch.setattr(generation_loop, "HOLD_S", 1e9)
    theirs, ours = Pipe()
    return EventBuffer(ours), theirs


def test_tokens_of_short_steps_are_sent_together_and_in_order(held: tuple[EventBuffer, Connection]) -> None:
    buffer, pipe = held
    for i in range(3):
        buffer.add([token(i)], (), send_now=False)
    assert received(pipe) == []
    buffer.flush()
    buffer.flush()
    assert received(pipe) == [[0, 1, 2]]


def test_the_last_token_is_sent_at_once_with_those_before_it(held: tuple[EventBuffer, Connection]) -> None:
    buffer, pipe = held
    buffer.add([token(0)], (), send_now=False)
    buffer.add([token(1, "stop")], (), send_now=False)
    assert received(pipe) == [[0, 1]]


def test_a_first_token_is_sent_at_once_with_its_times(held: tuple[EventBuffer, Connection]) -> None:
    buffer, pipe = held
    buffer.add([token(0)], [(0.25, 0.5)], send_now=True)
    events, first_tokens = marshal.loads(pipe.recv_bytes()[1:])
    assert [event[2] for event in events] == [0] and first_tokens == ((0.25, 0.5),)


def test_prompt_logprobs_are_sent_at_once(held: tuple[EventBuffer, Connection]) -> None:
    buffer, pipe = held
    buffer.add([PromptLogprobs("a", 0, ())], (), send_now=False)
    assert pipe.recv().events == [PromptLogprobs("a", 0, ())]


def test_the_events_of_a_long_step_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_loop, "HOLD_S", 0.0)
    theirs, ours = Pipe()
    EventBuffer(ours).add([token(0)], (), send_now=False)
    assert received(theirs) == [[0]]


def test_a_long_step_without_events_is_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_loop, "HOLD_S", 0.0)
    theirs, ours = Pipe()
    EventBuffer(ours).add([], (), send_now=False)
    assert received(theirs) == [[]]
