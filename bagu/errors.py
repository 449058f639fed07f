"""What can go wrong, as types. Every error says what was asked, what was found, and what to do.

* BaguError
  - ArgumentError       an argument does not fit the op's signature
  - BackendError        a backend that was asked for cannot run here
  - ConformanceError    a backend disagrees with its spec
  - NotOffered          a peer library does not have what a benchmark asks of it
  - UnknownName         a name is not in its table
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self

__all__ = ["ArgumentError", "BackendError", "BaguError", "ConformanceError", "NotOffered", "UnknownName"]


class BaguError(Exception):
    """Base class. `hint` is the next thing to try; it prints on its own line under the message."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.args = (message,)  # what super().__init__ does, which torch.compile cannot trace
        self.hint = hint
        if hint:
            self.__notes__ = [f"  -> {hint}"]  # what add_note does; the same


class ArgumentError(BaguError, ValueError):
    """An argument's rank, shape, dtype or device does not fit the op's signature."""


class BackendError(BaguError, RuntimeError):
    """A backend that was asked for cannot run here."""


class ConformanceError(BaguError, AssertionError):
    """A backend disagrees with its spec."""


class NotOffered(BaguError):
    """Raised by a peer for a case that its library does not have: a benchmark leaves it out."""


class UnknownName(BaguError, LookupError):
    """A name is not in its table."""

    @classmethod
    def among(cls, kind: str, name: str, known: Iterable[str], *, within: str = "") -> Self:
        """The error for `name`, with the nearest known one as the hint; both are shown behind `within`."""
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {within + near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
        return cls(f"there is no {kind} {within + name!r}", hint=hint)
