"""Speculative decoding: the speed-up by acceptance, number of drafts and batch, and where it stops paying.

The model is set so that its text is known (bench/known_text.py), and the proposer knows it too: each of its guesses is
right with a chosen probability. So acceptance is exact, and costs nothing to make: what is measured is verification. An
engine that verifies every draft takes turns with one that has none, and the ratio of a pair is one measurement.

A step with k drafts computes k + 1 tokens of each sequence. Where a step's time is that of reading the weights, they
are free; where it is arithmetic, they cost k + 1 times as much. A batch moves a step from the first to the second.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from bagu.bench.known_text import counts_upwards, known_workload
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, numbers_in, where
from bagu.lab.plot import Line, Mark, Panel, Rule
from bagu.nn import Transformer, init_weights, preset
from bagu.serve import plan
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling

MODEL = replace(preset("cpu_8m"), tie_embeddings=False)
RATES = (0.3, 0.6, 0.8, 0.95)  # probability that a guess is right
DRAFTS = (3, 7)
BATCHES = (1, 4, 16)
PROMPT, NEW = 32, 96  # tokens of a stream
ROUNDS = 3
LIKELY = 0.8  # the claim is judged at this rate


class Knows:
    """A proposer that is right with probability `rate`: token t is followed by t + 1."""

    free = True

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def propose(self, sequences: Sequence[plan.Sequence], count: int) -> list[list[int]]:
        return [self._guess(s, count) for s in sequences]

    def _guess(self, sequence: plan.Sequence, count: int) -> list[int]:
        V, last, at = MODEL.vocab_size, sequence.tokens[-1], len(sequence.tokens)
        right = [random.Random(at + i).random() < self.rate for i in range(count)]
        return [(last + 1 + i + (0 if ok else 1)) % V for i, ok in enumerate(right)]

    def forget(self, sequence: plan.Sequence) -> None:
        pass


def run(setting: Setting) -> Iterator[Row]:
    model = counts_upwards(init_weights(Transformer(MODEL, device=setting.device), 0)).eval()
    rates, batches, counts = ((LIKELY,), (1, 2), DRAFTS[:1]) if setting.quick else (RATES, BATCHES, DRAFTS)
    new, rounds = (8, 1) if setting.quick else (NEW, ROUNDS)
    for batch, drafts in setting.track(list(product(batches, counts))):
        plain = engine(model, batch, None)
        decode(plain, batch, new, "warmup")
        for rate in rates:
            drafted = engine(model, batch, drafts)
            assert drafted.speculator is not None
            drafted.speculator.proposer = Knows(rate)
            decode(drafted, batch, new, "warmup")
            pairs = [
                (decode(plain, batch, new, f"{rate}-{i}"), decode(drafted, batch, new, f"{i}")) for i in range(rounds)
            ]
            stats = drafted.stats()
            yield {
                "batch": batch,
                "drafts": drafts,
                "rate": rate,
                "accepted_share": stats.accepted_tokens / stats.draft_tokens,
                "tokens_per_verification": 1 + stats.accepted_tokens / stats.drafts,
                "plain_tokens_per_s": batch * new / float(np.median([a for a, _ in pairs])),
                "speedup": float(np.median([a / b for a, b in pairs])),
            }


def engine(model: Transformer, batch: int, drafts: int | None) -> Engine:
    settings = EngineConfig(num_blocks=16 * batch, max_num_seqs=batch, max_model_len=256, prefix_cache=False)
    if drafts is not None:
        settings = replace(settings, speculative="ngram", speculative_tokens=drafts, speculative_always=True)
    return Engine(model, None, settings)


def decode(engine: Engine, batch: int, new: int, name: str) -> float:
    """Seconds of the steps after the prompts."""
    work = known_workload("new", batch, PROMPT, new, vocab_size=MODEL.vocab_size)
    for i, prompt in enumerate(work.prompts):
        sampling = Sampling(max_tokens=new + 1, temperature=0.0, ignore_eos=True)
        engine.submit(Request(id=f"{name}-{i}", prompt=prompt, sampling=sampling, arrival=float(i)))
    while engine.stats().waiting or any(len(s.tokens) == s.num_prompt for s in engine.scheduler.queues.running):
        engine.step()
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


def breaks_even(rows: Sequence[Row], batch: int, drafts: int) -> float | None:
    """The smallest measured rate from which on drafts are at least as fast as none."""
    found = sorted(
        (number(r, "rate"), number(r, "speedup")) for r in rows if (r["batch"], r["drafts"]) == (batch, drafts)
    )
    paying: float | None = None
    for rate, speedup in reversed(found):
        if speedup < 1:
            break
        paying = rate
    return paying


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if at the likely rate speculation is faster at every batch, with some number of drafts."""
    batches = sorted({int(number(r, "batch")) for r in rows})
    best = {b: max(number(r, "speedup") for r in rows if (r["batch"], r["rate"]) == (b, LIKELY)) for b in batches}
    good = [b for b, gain in best.items() if gain > 1]
    kind: Kind = "held" if len(good) == len(batches) else "holds only where" if good else "did not hold"
    drafts = sorted({int(number(r, "drafts")) for r in rows})
    points = {(b, k): breaks_even(rows, b, k) for b in batches for k in drafts}
    en = "; ".join(
        f"batch {b}, {k} drafts: " + ("never" if rate is None else f"from {rate:g}") for (b, k), rate in points.items()
    )
    zh = "；".join(
        f"批 {b}、{k} 个草稿：" + ("从不" if rate is None else f"自 {rate:g} 起") for (b, k), rate in points.items()
    )
    listed = ", ".join(f"×{gain:.2f} at batch {b}" for b, gain in best.items())
    return Verdict(
        kind=kind,
        sentence_en=f"With {LIKELY:g} of the guesses right: {listed}. Share of right guesses from which drafts pay: "
        f"{en}.",
        sentence_zh=f"猜中率 {LIKELY:g} 时：{'，'.join(f'批 {b} 为 ×{gain:.2f}' for b, gain in best.items())}。"
        f"值得推测的猜中率：{zh}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Speed-up by acceptance, a line for each batch, a panel for each number of drafts."""
    panels: list[Panel] = []
    for drafts in numbers_in(rows, "drafts"):
        marks: list[Mark] = [Rule(1.0)]
        for batch in numbers_in(rows, "batch"):
            own = sorted(where(rows, batch=batch, drafts=drafts), key=lambda r: number(r, "rate"))
            marks.append(Line.of(own, "rate", "speedup", f"batch {batch:g}"))
        y, x = "" if panels else "tokens/s with drafts, over without", "share of guesses that are right"
        panels.append(Panel(marks, f"{drafts:g} drafts", x, y, legend="below", share_y=True))
    return panels


LAB = Claim(
    title_en="Speculative decoding",
    title_zh="推测解码",
    claim_en="Speculative decoding is faster than plain decoding, also in a batch.",
    claim_zh="推测解码比逐个解码更快，批处理时也是如此。",
    regime=f"The engine on the cpu_8m shape (8M parameters), greedy, {NEW} tokens after a prompt of {PROMPT}, drafts "
    "that cost nothing to make, every draft verified.",
    varies="Share of guesses that are right; drafts per sequence and step; sequences in the batch.",
    measures="Tokens per second with drafts over without, in turn; the median of pairs. Held if, with "
    f"{LIKELY:g} of the guesses right, some number of drafts is faster at every batch.",
    evidence="timing",
)
