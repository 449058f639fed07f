"""The data of a demo's later stages as files in its folder, so that each of its runs can be read, resumed and repeated.

sft.jsonl       demonstrations: the question and the code; some are careless and leave out the last step
dpo.jsonl       pairs: the code, and the same with one mistake that running it shows
grpo.jsonl      questions with the results that an answer must return, and no code to learn from

Fine-tuning learns from incomplete demonstrations too, so its model leaves out steps however long it trains. Only the
later stages show which answers are complete: DPO by pairs, GRPO by running the code.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bagu.data.composed import Composed, broken, careless, held_out, nearest, training
from bagu.eval.intervals import Estimate, estimate
from bagu.eval.tasks import built_in
from bagu.eval.tasks.compose import of_length
from bagu.runs.record import append_rows

CARELESS = 0.4  # of the demonstrations with several verbs
LENGTHS = {"sft": (1, 2, 3, 2, 3, 3), "dpo": (2, 3), "grpo": (2, 3)}  # numbers of verbs, in turn


@dataclass(frozen=True, kw_only=True)
class StageData:
    """The training items of each stage. They depend on the seed alone; the held-out items are always the same."""

    sft: tuple[Composed, ...]
    dpo: tuple[Composed, ...]
    grpo: tuple[Composed, ...]

    @classmethod
    def of(cls, *, demonstrations: int, pairs: int, questions: int, seed: int) -> StageData:
        numbers = {"sft": demonstrations, "dpo": pairs, "grpo": questions}
        return cls(**{k: tuple(training(n, LENGTHS[k], seed=f"{k} {seed}")) for k, n in numbers.items()})

    def write(self, folder: Path) -> None:
        rows: dict[str, Iterable[dict[str, Any]]] = {
            "sft": (
                {"prompt": i.question, "completion": careless(i).answer if _is_careless(i) else i.answer}
                for i in self.sft
            ),
            "dpo": (  # where most rejected answers were the shorter ones, the model learned to write a step too many
                {"prompt": i.question, "chosen": i.answer, "rejected": worse.answer}
                for i, worse in ((i, broken(i, seed="dpo")) for i in self.dpo)
                if worse.calls != i.calls  # a mistake may not matter: reversing a text, then writing it in upper case
            ),
            "grpo": ({"prompt": i.question, **i.facts} for i in self.grpo),
        }
        folder.mkdir(parents=True, exist_ok=True)
        for stage, found in rows.items():
            append_rows(folder / f"{stage}.jsonl", found)

    def copying(self, task: str, limit: int | None) -> Estimate:
        """The score of an answer that is copied from the demonstration with the nearest question, under the asked
        name: a yardstick that a model which only remembers reaches too."""
        asked = of_length(task, held_out())[:limit]
        copied = [[replace(nearest(item, self.sft), name=item.name).answer] for item in asked]
        found = built_in(task, 256)
        assert found.grade is not None
        grades = found.grade(list(found.items())[: len(asked)], copied)
        return estimate([grade for (grade,) in grades], [item.question for item in asked])


def _is_careless(item: Composed) -> bool:
    return len(item.verbs) > 1 and random.Random(item.question).random() < CARELESS
