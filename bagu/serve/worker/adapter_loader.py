"""Loading and unloading of LoRA adapters by request, in the engine process.

A thread reads the files, so that steps go on meanwhile; the main loop installs what was read between two steps.
"""

from __future__ import annotations

import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

from bagu.errors import BaguError
from bagu.machine.hub import find_adapter_below
from bagu.serve.wire.encode import send
from bagu.serve.wire.messages import Adapters, LoadAdapter, Result, UnloadAdapter
from bagu.serve.worker.request_queue import Messages

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    from bagu.nn.peft import Adapter
    from bagu.serve.engine import Engine


class AdapterRead(NamedTuple):
    """The files of an adapter are read, or could not be; sent by a thread of the engine process."""

    asked: LoadAdapter
    adapter: Adapter | None
    failure: Result | None


class AdapterLoader:
    def __init__(self, pipe: Connection, messages: Messages, engine: Engine) -> None:
        self.pipe, self.messages, self.engine = pipe, messages, engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")  # one at a time: a bound on memory

    def load(self, asked: LoadAdapter) -> None:
        """Read the adapter in the thread, which sends `AdapterRead` to the main loop."""
        self._thread.submit(self._read, asked)

    def install(self, read: AdapterRead) -> None:
        if read.failure is not None:
            send(self.pipe, read.failure)
            return
        try:
            self.engine.load_adapter(read.asked.name, read.asked.path, read.adapter)
        except BaguError as error:
            send(self.pipe, _failure(read.asked.call, error))
        else:
            self._succeed(read.asked.call)

    def unload(self, asked: UnloadAdapter) -> None:
        try:
            self.engine.unload_adapter(asked.name)
        except BaguError as error:
            send(self.pipe, _failure(asked.call, error, status=404))
        else:
            self._succeed(asked.call)

    def _succeed(self, call: int) -> None:
        """Send the new list first: who asked may have disconnected."""
        send(self.pipe, Adapters(self.engine.adapters.infos))
        send(self.pipe, Result(call, None))

    def _read(self, asked: LoadAdapter) -> None:
        adapter, failure = None, None
        try:
            root = self.engine.config.adapter_root
            assert root is not None, "the route refuses without a root"
            adapter = self.engine.adapters.read(find_adapter_below(root, asked.path))
        except BaguError as error:
            failure = _failure(asked.call, error)
        except Exception as error:  # a bug: only this call fails
            traceback.print_exc()
            failure = Result(asked.call, None, f"the adapter could not be read: {type(error).__name__}: {error}", 500)
        self.messages.put((time.perf_counter(), AdapterRead(asked, adapter, failure)))


def _failure(call: int, error: BaguError, *, status: int = 400) -> Result:
    return Result(call, None, f"{error} ({error.hint})" if error.hint else str(error), status)
