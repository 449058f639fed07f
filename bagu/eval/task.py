"""The definition of a task: items, prompts, and the criterion for a correct answer.

    choice       the model's answer is the choice with the highest (normalised) log-likelihood
    generation   the model generates an answer, and `grade` gives it 0 to 1
    loss         documents; the score is bits per byte

A task is a value; `files.py` reads one from a file, `tasks/` has the built-in ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bagu.errors import BaguError
from bagu.eval.model import Decoding, Message

Kind = Literal["choice", "generation", "loss"]
Normalization = Literal["raw", "characters", "tokens", "pmi"]
NORMALIZATIONS: tuple[Normalization, ...] = ("raw", "characters", "tokens", "pmi")


class TaskError(BaguError):
    """A task that cannot be evaluated."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question or document. `cluster` names the source that it shares with other items (a file, a passage), by
    default none; `facts` are for `grade` and for readers of the results."""

    id: str
    prompt: str = ""
    messages: tuple[Message, ...] = ()  # for a chat task, instead of a prompt
    choices: tuple[str, ...] = ()
    answer: int | str | None = None  # for a choice task, the index of the right choice
    cluster: str | None = None
    place: str = ""  # file and line, for errors
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judge's answer about one answer of the model."""

    grade: float | None  # 0 to 1; None if the judge gave no valid grade
    text: str


Grade = Callable[[Sequence[Item], Sequence[Sequence[str]]], list[list[float]]]  # items, their answers -> a grade each
Verdicts = Callable[[Sequence[Item], Sequence[Sequence[str]]], list[list[Verdict]]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """`limits` states what a score does not show. A generation task has either `grade` or `judge`."""

    name: str
    kind: Kind
    items: Callable[[], Iterable[Item]]
    limits: str
    metric: str = "accuracy"
    chat: bool = False
    few_shot: int = 0
    example: Callable[[Item], str] | None = None  # an item with its answer, as in a few-shot prompt
    normalization: Normalization = "raw"
    delimiter: str = " "  # between prompt and choice
    unconditional: str = "Answer:"  # replaces the prompt for PMI
    decoding: Decoding = field(default_factory=Decoding)
    grade: Grade | None = None
    judge: Verdicts | None = None
    measures: Mapping[str, Grade] = field(default_factory=dict)  # further shares of the same answers, by name
    judged: str = ""  # identifies the grades in results: the judge and its prompt, or the pattern of an exact match
    k: tuple[int, ...] = (1,)  # of pass@k
    stride: float = 0.5  # for a loss task: the step between windows, as a fraction of the longest sequence

    def where(self, item: Item) -> str:
        """The place of an item, for errors."""
        return item.place or f"task {self.name}, item {item.id}"

    def __post_init__(self) -> None:
        if self.kind == "generation" and self.grade is None and self.judge is None:
            raise TaskError(f"task {self.name}: a generation task needs a way to grade answers")
        if self.few_shot < 0:
            raise TaskError(f"task {self.name}: {self.few_shot} examples", hint="few_shot is 0 or more")
        if self.chat and (self.kind != "generation" or self.few_shot):
            what = "few-shot examples" if self.few_shot else f"kind {self.kind!r}"
            raise TaskError(f"task {self.name}: a chat with {what}", hint="only plain generation tasks ask in chats")
        if self.kind == "generation" and not (self.k and all(1 <= k <= self.decoding.samples for k in self.k)):
            raise TaskError(
                f"task {self.name}: pass@{max(self.k, default='k')} of {self.decoding.samples} samples",
                hint="draw at least as many samples as the largest k",
            )


def checked_items(task: Task, limit: int | None = None) -> list[Item]:
    """The items of a task; raises a TaskError with file and line for an invalid one."""
    items: list[Item] = []
    seen: set[str] = set()
    for item in task.items():
        if limit is not None and len(items) == limit:
            break
        where = task.where(item)
        if item.id in seen:
            raise TaskError(f"{where}: a second item has the id {item.id!r}")
        seen.add(item.id)
        if task.kind == "choice":
            _check_choices(item, where)
        elif task.kind == "loss" and not item.prompt:  # 0 bits over 0 bytes: the interval would be NaN
            raise TaskError(f"{where}: the document is empty", hint="delete that row")
        items.append(item)
    if not items:
        raise TaskError(f"task {task.name} has no items", hint="check the data that it reads")
    return items


def _check_choices(item: Item, where: str) -> None:
    if len(item.choices) < 2:
        raise TaskError(f"{where}: {len(item.choices)} choices", hint="a choice task has two or more for each item")
    if len(set(item.choices)) < len(item.choices):
        equal = next(c for c in item.choices if item.choices.count(c) > 1)
        raise TaskError(f"{where}: two choices are equal: {equal!r}", hint="their likelihoods are, too; remove one")
    if not isinstance(item.answer, int) or not 0 <= item.answer < len(item.choices):
        raise TaskError(f"{where}: the answer {item.answer!r} is none of the {len(item.choices)} choices")
