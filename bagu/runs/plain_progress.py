"""Lines of progress for output that is not a terminal."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console

SECONDS_BETWEEN_LINES = 5.0  # at least
T = TypeVar("T")


class PlainLines:
    """A line every few seconds. Called with (done, total)."""

    def __init__(
        self, unit: str, console: Console, *, prefix: str = "", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.unit, self.console, self.prefix = unit, console, prefix
        self._clock = clock
        self._began: tuple[float, int] | None = None  # time and number done at the first call
        self._last = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._began is None:
            self._began, self._last = (now, done), now
        start, already = self._began
        if now - self._last < SECONDS_BETWEEN_LINES or done == already:
            return
        self._last, took = now, now - start
        left = took / (done - already) * (total - done)
        line = f"{self.prefix}{done} of {total} {self.unit} in {took:.0f} s, about {left:.0f} s left"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def plain_progress(items: Sequence[T], unit: str, console: Console, *, prefix: str = "") -> Iterator[T]:
    """The items, with `PlainLines` of progress."""
    line = PlainLines(unit, console, prefix=prefix)
    for index, item in enumerate(items):
        line(index, len(items))
        yield item
