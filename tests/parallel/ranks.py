"""Several processes with one Gloo group, started once: `Ranks(4).run(function, …)` calls it on every rank.

Ranks are forked from a server that has imported torch and bagu, so that a start costs tens of milliseconds and not the
seconds of the imports. `function` is a module-level function: it is sent by name, its arguments and results by pickle.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bagu.cli import main
from tests.forked import fork_server

TIMEOUT = 240  # seconds for one call on all ranks: far above what a loaded machine needs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_bagu(number: int, words: Sequence[str], log: Path, limit: float = TIMEOUT) -> list[int | None]:
    """The exit codes of `bagu WORDS` on this many ranks, with torchrun's variables. Output goes to `log`."""
    shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    started = [fork_server().Process(target=_bagu, args=(words, env, log), daemon=True) for env in environments]
    for process in started:
        process.start()
    for process in started:
        process.join(limit)
        process.kill()
        process.join()
    return [process.exitcode for process in started]


def _bagu(words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    main(list(words))


def _serve(pipe: Connection, rank: int, ranks: int) -> None:
    """The process of one rank: answer calls, each in process groups of its own, until the pipe closes.

    The groups are destroyed after the call (None says that every rank has answered). Each one has a thread of Gloo that
    wakes up a hundred times a second: the groups of a hundred calls took half of the CPU time of a rank.
    """
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported is never garbage: a collection takes milliseconds
    timeout = timedelta(seconds=TIMEOUT)
    with contextlib.suppress(EOFError):
        while True:
            call = pipe.recv()
            if call is None:
                dist.destroy_process_group()
                gc.collect()  # cycles hold groups, and their threads
                continue
            store, function, args, kwargs = call
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout
                )
                answer = (True, function(*args, **kwargs))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send(answer)


class Ranks:
    """`number` processes. `run` returns the result of each rank, and raises if one of them raised."""

    def __init__(self, number: int) -> None:
        context = fork_server()
        self._folder, self._calls = tempfile.TemporaryDirectory(), 0
        self._pipes, self._processes = [], []
        for rank in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, number), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        self._calls += 1
        store = str(Path(self._folder.name) / f"store-{self._calls}")
        for pipe in self._pipes:
            pipe.send((store, function, args, kwargs))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT):
                raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT} s")
            answers.append(pipe.recv())
        for pipe in self._pipes:
            pipe.send(None)
        failed = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


@contextlib.contextmanager
def ranks(number: int) -> Iterator[Ranks]:
    group = Ranks(number)
    try:
        yield group
    finally:
        group.close()
