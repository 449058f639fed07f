"""Ctrl-C and SIGTERM end a run after the current step, so that it is saved and can be resumed."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from bagu.parallel.supervise import SAME_SIGNAL_S


class Interrupt:
    """While open, the first Ctrl-C (or SIGTERM) only sets `asked`, so that the step can be completed and saved.

    A second one, a second later or more, has its normal effect. Outside the main thread, signals cannot be caught.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self._at = 0.0  # of the first signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._ask) for s in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _ask(self, number: int, _: object) -> None:
        if not self.asked:
            self.asked, self._at = True, time.monotonic()
        elif time.monotonic() - self._at >= SAME_SIGNAL_S:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
