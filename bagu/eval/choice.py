"""Multiple choice by log-likelihood.

The model's answer is the choice with the highest of

    raw          log p(choice | prompt)
    characters   the same per character of the choice, as most leaderboards report ("acc_norm")
    tokens       the same per token
    pmi          log p(choice | prompt) - log p(choice | "Answer:"): how much the prompt raises it

Long choices have low likelihoods, so `raw` favours short ones; which normalisation ranks models best depends on the
task (the lab `normalization` measures it). All but `pmi` come from the same scores.
"""

from collections.abc import Sequence
from typing import Any

from bagu.eval.model import Model
from bagu.eval.task import Item, Normalization, Task, TaskError


def continuation(model: Model, context: str, text: str) -> tuple[list[int], int]:
    """Tokens of context and text together, and where the text begins.

    They are tokenized together, as the model read text in training; white space at the end of the context belongs to
    the text's first token. Where a token crosses the border, it counts as the text's.
    """
    return continuations(model, context, [text])[0]


def continuations(model: Model, context: str, texts: Sequence[str]) -> list[tuple[list[int], int]]:
    """`continuation` of each text; the context, which may hold long examples, is tokenized by itself once."""
    kept = context.rstrip()
    before, found = model.encode(kept), []
    for text in texts:
        both = model.encode(context + text)
        start = min(len(before), len(both) - 1)
        while both[:start] != before[:start]:
            start -= 1
        found.append((both, max(start, 1)))
    return found


def score_choices(model: Model, task: Task, items: Sequence[Item], prefix: str) -> list[dict[str, Any]]:
    """For each item, the log-likelihoods of its choices and their divisors. `prefix` holds the few-shot examples."""
    sequences, starts = [], []
    for item in items:
        contexts = [prefix + item.prompt, *([task.unconditional] if task.normalization == "pmi" else [])]
        for context in contexts:
            if not context.strip() and not model.encode(""):
                raise TaskError(
                    f"{task.where(item)}: the prompt is empty",
                    hint="the first token of a choice needs a token before it, and this model adds none",
                )
            for ids, start in continuations(model, context, [task.delimiter + choice for choice in item.choices]):
                if len(ids) > model.max_len:
                    raise TaskError(
                        f"{task.where(item)}: prompt and choice have {len(ids)} tokens, and the model takes "
                        f"{model.max_len}",
                        hint="use fewer examples (--few-shot), or a model with a longer context",
                    )
                sequences.append(ids)
                starts.append(start)
    logprobs = iter(zip(model.score(sequences, starts), sequences, starts, strict=True))
    rows = []
    for item in items:
        found = [next(logprobs) for _ in item.choices]
        row: dict[str, Any] = {
            "loglikelihood": [sum(values) for values, _, _ in found],
            "tokens": [len(ids) - start for _, ids, start in found],
            "characters": [len(choice) for choice in item.choices],
            "answer": item.answer,
        }
        if task.normalization == "pmi":
            row["unconditional"] = [sum(next(logprobs)[0]) for _ in item.choices]
        rows.append(row)
    return rows


def answers(row: dict[str, Any]) -> dict[Normalization, int]:
    """The choice that each normalisation selects; in a tie, the first."""
    raw = row["loglikelihood"]
    scores: dict[Normalization, list[float]] = {
        "raw": raw,
        "characters": [value / max(n, 1) for value, n in zip(raw, row["characters"], strict=True)],
        "tokens": [value / n for value, n in zip(raw, row["tokens"], strict=True)],
    }
    if "unconditional" in row:
        scores["pmi"] = [value - other for value, other in zip(raw, row["unconditional"], strict=True)]
    return {name: max(range(len(raw)), key=values.__getitem__) for name, values in scores.items()}
