"""Prefetching: a thread prepares batches in advance, so that the device does not wait for the host.

    with loader.prefetch(start) as batches:
        for micro_batches in batches: ...

Items are the results of `make(step)`, in order. An exception in `make` is raised at the item it belongs to.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar

from bagu.errors import ArgumentError

T = TypeVar("T")


class Prefetch(Generic[T]):
    """An iterator over make(start), make(start + 1), ... that holds at most `depth` of them in memory."""

    def __init__(self, make: Callable[[int], T], start: int, *, stop: int | None = None, depth: int = 2) -> None:
        if depth < 1:
            raise ArgumentError(f"the prefetch depth is {depth}", hint="give 1 or more")
        self.wait_s = 0.0  # seconds that the last `next` waited
        self.total_wait_s = 0.0
        self._ready: queue.Queue[T | _Ended] = queue.Queue(maxsize=depth)
        self._closing = threading.Event()
        self._ended: _Ended | None = None
        self._thread = threading.Thread(
            target=self._work, args=(make, start, stop), name=f"prefetch from step {start}", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended is not None:
            self._ended.raise_again()
        began = time.perf_counter()
        item = self._ready.get()
        self.wait_s = time.perf_counter() - began
        self.total_wait_s += self.wait_s
        if isinstance(item, _Ended):
            self._ended = item
            item.raise_again()
        return item

    def close(self) -> None:
        """Stop the thread and wait for it, at most for the batch it is making. May be called again."""
        self._closing.set()
        while self._thread.is_alive():
            self._drain()  # makes space, so that a waiting `put` returns and sees the flag
            self._thread.join(timeout=0.01)
        self._drain()
        self._ended = self._ended or _Ended(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drain(self) -> None:
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return

    def _work(self, make: Callable[[int], T], start: int, stop: int | None) -> None:
        step = start
        try:
            while not self._closing.is_set() and (stop is None or step < stop):
                self._ready.put(make(step))
                step += 1
        except BaseException as error:  # raised again in the consumer's thread
            self._ready.put(_Ended(error))
        else:
            self._ready.put(_Ended(None))


class _Ended:
    """The last item: the error that ended the thread, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def raise_again(self) -> NoReturn:
        if self.error is not None:
            raise self.error
        raise StopIteration
