"""The exception types. Every error says what was asked, what was found, and what to do.

* BaguError
  - ArgumentError       an argument does not fit the op's signature
  - BackendError        a backend that was requested cannot run on this machine
  - ConformanceError    a backend disagrees with its spec
  - NotOffered          a peer library does not support a benchmark case
  - UnknownName         a name is not in its table of known names
"""

import difflib
from collections.abc import Collection, Iterable
from typing import Self


class BaguError(Exception):
    """Base class. `hint` says what to do; it prints on its own line below the message."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.args = (message,)  # same as super().__init__, which torch.compile cannot trace
        self.hint = hint
        if hint:
            self.__notes__ = [f"  -> {hint}"]  # same as add_note, for the same reason


class ArgumentError(BaguError, ValueError):
    """An argument, an option or a setting has a value that cannot work."""


class BackendError(BaguError, RuntimeError):
    """A backend that was requested cannot run on this machine."""


class ConformanceError(BaguError, AssertionError):
    """A backend disagrees with its spec."""


class NotOffered(BaguError):
    """A peer library does not support this case; the benchmark skips it."""


class UnknownName(BaguError, LookupError):
    """A name is not in its table of known names."""

    @classmethod
    def among(cls, kind: str, name: str, known: Iterable[str], *, within: str = "") -> Self:
        """Build the error for an unknown `name`. The hint is the closest known name; `within` prefixes both."""
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {within + near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
        return cls(f"there is no {kind} {within + name!r}", hint=hint)

    @classmethod
    def check(cls, kind: str, name: str, known: Collection[str]) -> None:
        """Raise the error for a `name` that is not known."""
        if name not in known:
            raise cls.among(kind, name, known)
