"""The built-in tasks, by name. They use only the standard library of the running Python and this package."""

from __future__ import annotations

from collections.abc import Callable

from bagu.errors import UnknownName
from bagu.eval.task import Task
from bagu.eval.tasks.complete import complete
from bagu.eval.tasks.compose import COMPOSE, LONG, compose
from bagu.eval.tasks.continue4 import continue4
from bagu.eval.tasks.library import library_loss
from bagu.eval.tasks.recall import LENGTHS, recall, recall_free
from bagu.eval.tasks.safety import safety
from bagu.eval.tasks.signature import signature
from bagu.eval.tasks.write import write

__all__ = ["TASKS", "built_in"]

TASKS: dict[str, Callable[[int], Task]] = {  # each takes the model's longest sequence, in tokens
    "library": lambda max_len: library_loss(),
    "continue4": continue4,
    "signature": signature,
    "complete": complete,
    "write": write,
    COMPOSE: compose,
    LONG: lambda max_len: compose(max_len, LONG),
    "recall": recall,
    **{name: recall_free(name) for name in LENGTHS},
    "safety": lambda max_len: safety(),
}


def built_in(name: str, max_len: int) -> Task:
    if name not in TASKS:
        raise UnknownName.among("task", name, TASKS)
    return TASKS[name](max_len)
