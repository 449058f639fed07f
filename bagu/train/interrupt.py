"""Ctrl-C and SIGTERM end a run after the current step, so that it is saved and can be resumed."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupt:
    """While open, the first Ctrl-C (or SIGTERM) only sets `asked`, so that the step can be completed and saved.

    The second one has its normal effect. Outside the main thread, signals cannot be caught.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._ask) for s in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _ask(self, *_: object) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
