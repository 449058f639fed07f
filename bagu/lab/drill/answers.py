"""The grader's side of an answer: start its process, call its functions, read the record of each call.

    with Answers() as answers, answers.open(source, file) as answer:
        reply = answer.call("forward", kwargs={"x": x})

A fault of the answer (it raises, hangs, dies) is an `AnswerFault`: one sentence with the line of the learner's file.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from bagu.errors import BaguError
from bagu.lab.drill import wire
from bagu.lab.drill.child import FAILED_START, LIMITS, digest

PACKAGE = Path(__file__).parents[3]
START = (
    "import sys; sys.path.append(sys.argv[1]); from bagu.lab.drill.child import main; "
    "main(int(sys.argv[2]), sys.argv[3])"
)
CALL_S = 60.0  # of one call; the interpreter is slow
LOAD_S = 20.0
GRACE_S = 3.0  # an answer in C code does not see the signal at its limit; it is killed this much later


class AnswerFault(BaguError):
    """What is wrong with an answer besides its values. `cause` is a key of diagnose.CAUSES."""

    def __init__(self, message: str, *, cause: str = "raises", line: int | None = None) -> None:
        super().__init__(message)
        self.cause, self.line = cause, line


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a call returned, and the record of what it executed."""

    value: Any
    aten: Sequence[str] = ()
    functions: Sequence[str] = ()
    imports: Sequence[str] = ()
    largest: int = 0  # bytes of the largest tensor
    flops: int = 0  # of matrix products
    changed: bool = False  # an input has other bytes afterwards
    view: bool = False  # the result shares memory with an input
    state: Sequence[str] = ()  # the global state that the call left changed
    sent: Sequence[int] = field(default_factory=tuple)  # bytes that each rank sent

    def with_record_of(self, other: Reply) -> Reply:
        """This reply with the record of both."""
        both = {k: sorted({*getattr(self, k), *getattr(other, k)}) for k in ("aten", "functions", "imports", "state")}
        return replace(
            self,
            **both,
            largest=max(self.largest, other.largest),
            flops=self.flops + other.flops,
            changed=self.changed or other.changed,
            view=self.view or other.view,
        )


class Answers:
    """A helper process that forks a process per answer. `isolate=False` runs answers with the caller's rights."""

    def __init__(self, *, isolate: bool = True, triton: bool = True) -> None:
        mine, its = socket.socketpair()
        kinds = os.environ.get("BAGU_SANDBOX", "namespaces,landlock") if isolate and sys.platform == "linux" else ""
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(PACKAGE), str(its.fileno()), kinds],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_SETTINGS, **({} if triton else {"DRILL_NO_TRITON": "1"})},
        )
        its.close()
        self._control = mine
        try:
            said = wire.receive(mine)
        except wire.Closed:
            self.close()
            raise BaguError("the grader's helper process did not start", hint="see its message above") from None
        self.isolation: str | None = said["isolation"]
        self.problems: list[str] = said["problems"]

    def open(self, source: str, file: str, *, seconds: float = 600.0) -> Answer:
        """Load an answer. `seconds` limits its CPU time in all."""
        mine, its = socket.socketpair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        with its:
            socket.send_fds(self._control, [f"open {seconds:g}".encode()], [its.fileno(), errors.fileno()])
            number = wire.receive(self._control)
        return Answer(self, number, mine, errors, source, file)

    def end(self, number: int, *, kill: bool) -> int:
        """The exit code of an answer's process; negative for a signal."""
        self._control.sendall(f"{'kill' if kill else 'wait'} {number}".encode())
        return int(wire.receive(self._control))

    def close(self) -> None:
        self._control.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_SETTINGS = {
    "TRITON_INTERPRET": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "PYTHONDONTWRITEBYTECODE": "1",
}


class Answer:
    """One answer in its process."""

    def __init__(self, owner: Answers, number: int, channel: socket.socket, errors: Any, source: str, file: str):
        self.owner, self.number, self.channel, self.errors, self.file = owner, number, channel, errors, file
        self.ended = False
        self.triton = "import triton" in source  # the interpreter is too slow for a profile
        said = self._ask({"source": source, "seconds": LOAD_S}, LOAD_S, "while the file is loaded")
        self.names: list[str] = said["names"]
        self.imports: list[str] = said["imports"]
        self.state: dict[str, Any] = said["state"]

    def call(
        self, function: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, kind: str = "call",
        steps: Sequence[Sequence[Any]] = (), seconds: float = CALL_S, reuse: bool = False, rng: int = 0,
        draws: bool = False,
    ) -> Reply:  # fmt: skip
        """Call a function of the answer (kind "call"), read all that it yields ("iterate"), or make an object of a
        class and call its methods ("script"). `reuse` puts the values into the memory of the call before."""
        asked = self._request(function, args, kwargs, kind, steps, seconds, reuse, rng, draws)
        given = wire.tensors([asked["args"], asked["kwargs"]])
        before = [] if reuse else [digest(t) for t in given]  # reused memory has other strides, and other gaps
        said = self._ask(asked, seconds, f"in {function}")
        return self._reply(said, changed=not reuse and said["hashes"] != before)

    def _request(
        self, function: str, args: Any, kwargs: Any, kind: str, steps: Any, seconds: float, reuse: bool, rng: int,
        draws: bool,
    ) -> dict[str, Any]:  # fmt: skip
        if function not in self.names:
            listed = ", ".join(self.names) or "no function or class"
            raise AnswerFault(f"{self.file}: it does not define {function} (found: {listed})", cause="name")
        return {
            "function": function,
            "args": list(args),
            "kwargs": dict(kwargs or {}),
            "kind": kind,
            "steps": [list(s) for s in steps],
            "seconds": seconds,
            "reuse": reuse,
            "rng": rng,
            "draws": draws,
            "triton": self.triton,
        }

    def _reply(self, said: Mapping[str, Any], *, changed: bool = False, sent: Sequence[int] = ()) -> Reply:
        state = [k for k, v in said["state"].items() if self.state.get(k) != v]
        return Reply(
            value=said["value"],
            aten=said["aten"],
            functions=said["functions"],
            imports=said["imports"],
            largest=said["largest"],
            flops=said["flops"],
            changed=changed,
            view=said["view"],
            state=state,
            sent=tuple(sent),
        )

    def _ask(self, asked: Mapping[str, Any], seconds: float, where: str) -> dict[str, Any]:
        self.channel.settimeout(seconds + GRACE_S)
        try:
            wire.send(self.channel, asked)
            said = wire.receive(self.channel)
        except TimeoutError:
            self.close(kill=True)
            raise AnswerFault(f"{self.file}: no result after {seconds:g} s {where}", cause="hangs") from None
        except (wire.Closed, OSError):
            raise self.died(where) from None
        return self.checked(said, where)

    def checked(self, said: Any, where: str) -> dict[str, Any]:
        """The reply, unless it is an exception of the answer's."""
        if not isinstance(said, dict) or ("raised" not in said and "printed" not in said):
            self.close(kill=True)
            raise AnswerFault(f"{self.file}: its process sent something that is no result {where}", cause="protocol")
        if "raised" in said:
            line, text = said["line"], said["text"]
            at = f"{self.file} line {line}" if line else self.file
            shown = f"\n    {text}" if text else ""
            what = "it called sys.exit" if said["raised"] == "SystemExit" else f"{said['raised']}: {said['message']}"
            cause = "hangs" if said["raised"] == "TimeoutError" else "raises"
            raise AnswerFault(f"{at}: {what} ({where}){shown}", cause=cause, line=line)
        return said

    def died(self, where: str) -> AnswerFault:
        """The fault of an answer whose process has ended."""
        if self.ended:
            return AnswerFault(f"{self.file}: its process has ended before ({where})", cause="dies")
        code = self.owner.end(self.number, kill=False)
        self.ended = True
        self.errors.seek(0)
        said = self.errors.read(64 << 10).decode(errors="replace")
        found = re.search(r'File "[^"\n]*answer\.py", line (\d+)', said)
        line = int(found[1]) if found else None
        at = f"{self.file} line {line}" if line else self.file
        if code == FAILED_START and line is None:
            why = f"its process could not start: {(said.strip().splitlines() or ['no message'])[-1]}"
        elif "Thread creation failed" in said:  # OpenMP ends the process when the sandbox refuses a thread
            why = "it asked for a larger number of threads than the sandbox allows"
        elif code >= 0:
            why = f"its process exited with {code} instead of returning a result"
        else:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            why = f"its process was ended by {name}: {_SIGNALS.get(name, 'see the limits in docs/drills.md')}"
        return AnswerFault(f"{at}: {why} ({where})", cause="dies", line=line)

    def close(self, *, kill: bool = True) -> None:
        self.channel.close()
        if not self.ended:
            self.ended = True
            with suppress(wire.Closed, OSError):
                self.owner.end(self.number, kill=kill)
        self.errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_SIGNALS = {
    "SIGSEGV": "a pointer reached outside of its tensor (a missing mask, or a wrong stride)",
    "SIGBUS": "a pointer reached outside of its tensor",
    "SIGKILL": "it was killed, probably for its memory",
    "SIGXCPU": "it used more CPU time than an answer may",
    "SIGXFSZ": f"it wrote more than {LIMITS.disk_bytes >> 20} MiB to a file",
    "SIGABRT": "a library aborted",
}


def call_ranks(answers: Sequence[Answer], function: str, args: Sequence[Sequence[Any]], *, seconds: float) -> Reply:
    """Run a function once per rank, with `send` and `recv` as its last arguments. Messages pass through here: the bytes
    of each rank are counted where the answer cannot change them. The value is the list of what the ranks returned."""
    ranks = len(answers)
    waiting: dict[int, int] = {}  # rank -> the rank that it receives from
    queues: dict[tuple[int, int], list[Any]] = {}
    sent, done, values = [0] * ranks, 0, [None] * ranks
    last: dict[str, Any] = {}
    before = [[digest(t) for t in given if hasattr(t, "untyped_storage")] for given in args]
    changed = False
    with selectors.DefaultSelector() as ready:
        for rank, (answer, given) in enumerate(zip(answers, args, strict=True)):
            answer.channel.settimeout(seconds + GRACE_S)
            request = answer._request(function, given, None, "rank", (), seconds, False, 0, False)
            wire.send(answer.channel, request)
            ready.register(answer.channel, selectors.EVENT_READ, rank)
        while done < ranks:
            events = ready.select(seconds)
            if not events:
                raise AnswerFault(f"{answers[0].file}: no message for {seconds:g} s", cause="hangs")
            for key, _ in events:
                rank = key.data
                try:
                    said = wire.receive(answers[rank].channel)
                except (wire.Closed, TimeoutError, OSError):
                    raise answers[rank].died(f"rank {rank} of {ranks}") from None
                kind = said.get("message") if isinstance(said, dict) else None
                if kind == "send" and 0 <= said["to"] < ranks:
                    sent[rank] += said["tensor"].nbytes
                    queues.setdefault((rank, said["to"]), []).append(said["tensor"])
                elif kind == "send":
                    raise AnswerFault(f"{answers[0].file}: rank {rank} of {ranks} sent to rank {said['to']}")
                elif kind == "recv":
                    waiting[rank] = said["from"]
                else:
                    last = answers[rank].checked(said, f"rank {rank} of {ranks}")
                    values[rank] = last["value"]
                    changed = changed or last["hashes"] != before[rank]
                    done += 1
                    ready.unregister(answers[rank].channel)
            for rank, source in list(waiting.items()):
                if queue := queues.get((source, rank)):
                    del waiting[rank]
                    wire.send(answers[rank].channel, {"tensor": queue.pop(0)})
            if waiting and len(waiting) + done == ranks:  # every message passes here: no other can come
                held = ", ".join(f"rank {a} waits for rank {b}" for a, b in sorted(waiting.items()))
                raise AnswerFault(f"{answers[0].file}: deadlock: {held}", cause="deadlock")
    return answers[0]._reply({**last, "value": values}, changed=changed, sent=sent)
