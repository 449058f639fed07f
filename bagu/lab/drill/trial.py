"""A trial: one thing that is asked of an answer, and the judgement of what came back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bagu.lab.drill.answers import Answer, Reply
from bagu.lab.drill.core import Text
from bagu.lab.drill.diagnose import Suspects


class Wrong(Exception):
    """A result that is not right. `index` is where it differs first."""

    def __init__(self, message: str, *, got: Any = None, want: Any = None, cause: str = "") -> None:
        super().__init__(message)
        self.message, self.got, self.want, self.cause = message, got, want, cause


def no_call(answer: Answer) -> Reply:
    raise NotImplementedError("a trial over ranks has `each` instead")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One thing that is asked of an answer. `ask` calls it; `judge` raises Wrong if what came back is not right."""

    name: str
    why: Text
    judge: Callable[[Reply], None]
    ask: Callable[[Answer], Reply] = no_call
    cause: str = ""  # the likely cause if this trial fails after those before it
    edge: bool = False
    suspects: Suspects = field(default_factory=dict)
    usual: str = "formula"
    mutable: bool = False  # the answer may change its inputs
    ranks: int = 0  # the number of processes, for a function that runs once per rank
    each: tuple[str, Sequence[Sequence[Any]]] = ("", ())  # that function, and the arguments of each rank
    draws: bool = False  # the answer draws random numbers
