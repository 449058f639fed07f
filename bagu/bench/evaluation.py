"""`bagu bench eval`: the speed of an evaluation, as a share of the engine's prefill speed.

Both sides run in turns in this process, on texts of the standard library:

    eval      `eval.score.evaluate` of four-way items, from text to written rows. Its tokens are the distinct ones: a
              prompt counts once, and so does each of its four choices.
    prefill   the same engine on texts as long as a prompt and one choice, none of which share a prefix. They are a
              quarter as many as the items: a rate needs no more.

On a CPU the time is CPU seconds, which the load of other processes changes little; on a GPU it is wall time.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bagu.bench.engine import random_model
from bagu.bench.harness import Place, Rows, table
from bagu.bench.options import BenchSetting, EvalBench
from bagu.bench.workload import Lengths
from bagu.data import BpeTokenizer, StdlibSource
from bagu.errors import ArgumentError
from bagu.eval.score import evaluate
from bagu.eval.task import Item, Task
from bagu.machine.openmp import settings
from bagu.recipes.eval_models import EngineModel, eval_engine
from bagu.serve.request import Sampling

MODULES = 60  # of the standard library, about 1 MB: the tokenizer is trained on them, and they are the texts
VOCABULARY = 4096
BAR = 0.8  # of prefill throughput
PREFILL_SHARE = 4  # one text is prefilled for so many items


@dataclass(frozen=True, kw_only=True)
class Case:
    """Four-way items. Lengths are in characters: a token has three or four. Short prompts are the harder case, because
    the fixed cost of an item weighs more: 82 % of prefill with these, 84 % with 150 to 500 characters (cpu_8m)."""

    items: int
    prompts: str = "60-240"
    choices: str = "15-60"
    seed: int = 0


class Counted(EngineModel):
    """Counts the distinct tokens of the sequences that it scores, four of each item."""

    distinct = 0

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        self.distinct += sum(starts[::4]) + sum(len(s) - start for s, start in zip(sequences, starts, strict=True))
        return super().score(sequences, starts)


def main(given: EvalBench, setting: BenchSetting) -> int:
    """Time both sides, each in `rounds` parts; print a table and append one row per round to the record."""
    place, items, rounds = Place.of(setting), given.items, given.rounds
    if rounds < 1 or items < rounds:
        raise ArgumentError(f"{items} items in {rounds} rounds", hint="1 round or more, and 1 item or more in each")
    network, shape = random_model(given.shape, place)
    case = Case(items=items // rounds)
    rows = Rows.of(setting, "eval")
    text = "\n".join(d.text for d in islice(StdlibSource().documents(), MODULES))
    tokenizer = BpeTokenizer.train([text], vocab_size=VOCABULARY)
    model = Counted(eval_engine(network, tokenizer), tokenizer, None, shape)
    common = {
        "system": "eval",
        "model": shape,
        **place.facts,
        "case": asdict(case),
        "engine": asdict(model.engine.config),
        "openmp": settings(os.environ),
    }
    for turn in range(-1, rounds):  # round -1 is a small warmup
        part = Case(items=16) if turn < 0 else case
        asked, other = (list(_items(text, part, random.Random(f"{part.seed}:{turn}:{i}"))) for i in range(2))
        row = _measured(model, asked, [f"{i.prompt} {i.choices[0]}" for i in other[::PREFILL_SHARE]], place.device)
        if turn >= 0:
            rows.add([common | {"round": turn} | row])
    heads = ("round", "items", "distinct tokens", "eval tokens/s", "prefill tokens/s", "share of prefill")
    lines = [
        (
            str(r["round"]),
            f"{r['items']:,}",
            f"{r['distinct_tokens']:,}",
            f"{r['eval_tokens_per_s']:,.0f}",
            f"{r['prefill_tokens_per_s']:,.0f}",
            f"{100 * r['share_of_prefill']:.1f} %",
        )
        for r in rows.all
    ]
    title = f"{shape}, {common['dtype']}, {place.device}: four-way items that share prompts"
    rows.finish(table(title, heads, lines), bar_words(rows.all))
    return 0


def bar_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """The share of all rounds together, beside the bar."""
    evaluated, prefilled = (
        sum(r[tokens] for r in rows) / sum(r[seconds] for r in rows)
        for tokens, seconds in (("distinct_tokens", "eval_s"), ("prefill_tokens", "prefill_s"))
    )
    share, items = evaluated / prefilled, sum(r["items"] for r in rows)
    met = "met" if share >= BAR else "not met"
    return f"{items:,} items: {100 * share:.1f} % of prefill; the bar of {100 * BAR:.0f} % is {met}."


def _items(text: str, case: Case, rng: random.Random) -> Iterator[Item]:
    prompts, choices = Lengths.parse(case.prompts), Lengths.parse(case.choices)

    def piece(lengths: Lengths) -> str:
        size = rng.randint(lengths.low, lengths.high)
        start = rng.randrange(len(text) - size)
        return text[start : start + size]

    for number in range(case.items):
        options = tuple(f"{letter} {piece(choices)}" for letter in "abcd")  # a letter: no two are equal
        yield Item(id=str(number), prompt=piece(prompts).rstrip(), choices=options, answer=number % 4)


def _measured(model: Counted, items: Sequence[Item], texts: Sequence[str], device: torch.device) -> dict[str, Any]:
    """The rates of an evaluation of these items and of a prefill of these texts."""
    prompts = [model.encode(text) for text in texts]
    prefill_s = _seconds(device, lambda: model.engine.generate(prompts, Sampling(max_tokens=1, temperature=0.0)))
    task = Task(name="bench", kind="choice", items=lambda: items, limits="none")
    model.distinct = 0
    with tempfile.TemporaryDirectory() as folder:
        eval_s = _seconds(device, lambda: evaluate(model, task, out=Path(folder)))
    prefilled = sum(map(len, prompts))
    return {
        "items": len(items),
        "distinct_tokens": model.distinct,
        "eval_s": eval_s,
        "prefill_s": prefill_s,
        "prefill_tokens": prefilled,
        "eval_tokens_per_s": model.distinct / eval_s,
        "prefill_tokens_per_s": prefilled / prefill_s,
        "share_of_prefill": model.distinct / eval_s / (prefilled / prefill_s),
    }


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began
