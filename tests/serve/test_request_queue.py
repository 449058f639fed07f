"""Requests whose grammar is compiled in the background wait outside the engine."""

from __future__ import annotations

import pickle
import queue
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
from constrained import POINT, constrained_engine, constrained_model, json_tokenizer

from bagu.serve.grammar import Grammar
from bagu.serve.request import Request, Sampling
from bagu.serve.warm_up import WarmUp
from bagu.serve.wire.encode import STEP_TAG
from bagu.serve.wire.messages import Accepted, Refused, Stop, Submit
from bagu.serve.worker.generation_loop import serve_generation
from bagu.serve.worker.request_queue import Compiled, Messages, RequestQueue


class Worker:
    """The parts of the engine process around the queue."""

    def __init__(self) -> None:
        tokenizer = json_tokenizer()
        self.engine = constrained_engine(constrained_model(tokenizer), tokenizer)
        self.messages: Messages = queue.SimpleQueue()
        self.waiting: dict[str, float] = {}
        ours: Connection
        ours, self.server = Pipe()
        self.requests = RequestQueue(ours, self.messages, self.engine, self.waiting)

    def next_message(self) -> Compiled:
        arrival, message = self.messages.get(timeout=120)
        assert arrival == 1.0 and isinstance(message, Compiled)
        return message

    def sent(self) -> Any:
        assert self.server.poll(0), "nothing was sent"
        return self.server.recv()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.requests.close()


def request(id: str, grammar: Grammar | None) -> Request:
    return Request(id=id, prompt=(7, 8), sampling=Sampling(max_tokens=3, grammar=grammar))


def test_other_requests_run_while_a_grammar_is_compiled(worker: Worker) -> None:
    worker.requests.submit(request("slow", Grammar.json_schema(POINT)), 1.0)
    assert not worker.engine.has_work and not worker.server.poll(0)
    worker.requests.submit(request("plain", None), 1.0)
    assert worker.sent() == Accepted("plain")
    while worker.engine.has_work:  # it finishes although nothing has taken the compiled grammar
        worker.engine.step()
    message = worker.next_message()
    worker.requests.compiled(message.request, 1.0)
    assert worker.sent() == Accepted("slow") and worker.engine.has_work and "slow" in worker.waiting
    worker.requests.submit(request("again", Grammar.json_schema(POINT)), 1.0)  # kept: accepted at once
    assert worker.sent() == Accepted("again")


def test_an_aborted_request_is_not_submitted_when_its_grammar_is_ready(worker: Worker) -> None:
    worker.requests.submit(request("gone", Grammar.regex("a+")), 1.0)
    worker.requests.submit(request("stays", Grammar.regex("a+")), 1.0)  # waits for the same compilation
    worker.requests.abort("gone")
    for _ in range(2):
        worker.requests.compiled(worker.next_message().request, 1.0)
    assert worker.sent() == Accepted("stays") and list(worker.engine.scheduler.queues.requests) == ["stays"]
    assert worker.engine.stats().grammar_compilations == 1


def test_a_refused_grammar_is_answered_with_the_reason(worker: Worker) -> None:
    worker.requests.submit(request("bad", Grammar.regex("([")), 1.0)
    worker.requests.compiled(worker.next_message().request, 1.0)
    answer = worker.sent()
    assert isinstance(answer, Refused) and answer.param == "grammar" and "unclosed" in answer.message
    assert not worker.engine.has_work


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_the_compiler_refuses_the_request(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a result for its grammar it would be compiled again and again."""

    def fails(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(worker.engine.grammars, "matcher", fails)
    worker.requests.submit(request("a", Grammar.regex("a+")), 1.0)
    worker.requests.compiled(worker.next_message().request, 1.0)
    answer = worker.sent()
    assert isinstance(answer, Refused) and "the grammar compiler failed" in answer.message


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started in a test."""
    found: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def recorded(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        found.append(popen(*args, **options))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    return found


def test_a_process_that_ended_while_idle_refuses_no_grammar(
    worker: Worker, started: list[subprocess.Popen[bytes]]
) -> None:
    """As when the system is out of memory and kills it."""
    for name, pattern in (("first", "a+"), ("second", "b+")):
        worker.requests.submit(request(name, Grammar.regex(pattern)), 1.0)
        worker.requests.compiled(worker.next_message().request, 1.0)
        assert worker.sent() == Accepted(name)
        started[-1].kill()
        started[-1].wait()
    assert len(started) == 2


def test_a_stopped_engine_process_ends_the_processes_that_compile(started: list[subprocess.Popen[bytes]]) -> None:
    tokenizer = json_tokenizer()
    engine = constrained_engine(constrained_model(tokenizer), tokenizer)
    messages: Messages = queue.SimpleQueue()
    ours, server = Pipe()
    messages.put((1.0, Submit((request("a", Grammar.regex("a+")),))))
    thread = threading.Thread(target=serve_generation, args=(ours, messages, engine, None, WarmUp(engine)))
    thread.start()
    while server.poll(60) and ((data := server.recv_bytes())[:1] == STEP_TAG or pickle.loads(data) != Accepted("a")):
        pass
    messages.put((1.0, Stop()))
    thread.join(120)
    assert not thread.is_alive() and started and all(process.poll() is not None for process in started)
