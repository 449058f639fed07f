"""Generation tasks: prompts to answers, answers to grades."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagu.eval.model import Model
from bagu.eval.task import Item, Task, TaskError


def generate_answers(model: Model, task: Task, items: Sequence[Item], prefix: str) -> list[dict[str, Any]]:
    """For each item the answers and their grades, 0 to 1, or None where a judge gave none."""
    prompts = []
    for item in items:
        ids = model.encode_chat(item.messages) if task.chat else model.encode(prefix + item.prompt)
        if not ids:
            raise TaskError(f"{task.where(item)}: the prompt is empty", hint="a generation needs a token to start from")
        if len(ids) + task.decoding.max_tokens > model.max_len:
            raise TaskError(
                f"{task.where(item)}: the prompt has {len(ids)} tokens and the answer up to "
                f"{task.decoding.max_tokens}, and the model takes {model.max_len}",
                hint="use fewer examples (--few-shot), or a model with a longer context",
            )
        prompts.append(ids)
    chats = [item.messages for item in items]
    texts = model.generate_chat(chats, task.decoding) if task.chat else model.generate(prompts, task.decoding)
    if task.judge is not None:
        verdicts = task.judge(items, texts)
        return [
            {"answers": list(t), "grades": [v.grade for v in vs], "judgements": [v.text for v in vs]}
            for t, vs in zip(texts, verdicts, strict=True)
        ]
    assert task.grade is not None, "Task refuses a generation task without one"
    grades = task.grade(items, texts)
    return [{"answers": list(t), "grades": g} for t, g in zip(texts, grades, strict=True)]
