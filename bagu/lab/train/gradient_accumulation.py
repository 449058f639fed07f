"""Gradient accumulation: does the sum over micro-batches give the gradient of one large batch?

    per micro-batch   each loss is the mean over its own targets, and the losses are divided by their number: a target
                      in a micro-batch with few targets counts more than one in a micro-batch with many
    per step          each loss is divided by the targets of the whole step, as bagu's trainer does

Answers of unequal length are packed into micro-batches; only their tokens are targets, as in fine-tuning. The gradient
of one batch with all documents is the truth, in fp64. (The fault was in transformers until October 2024.)
"""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, numbers_in, where
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel
from bagu.nn import Transformer, init_weights
from bagu.train.cross_entropy import CrossEntropy
from bagu.types import IGNORE, Batch

WAYS = ("per micro-batch", "per step")
IN_CHINESE = dict(zip(WAYS, ("按微批归一", "按整步归一"), strict=True))
EQUAL = 1e-10  # of fp64 sums in another order
VOCAB, PROMPT = 128, 8
LONGEST = 48  # tokens of an answer
DOCUMENTS = 16


def run(setting: Setting) -> Iterator[Row]:
    size = 32 if setting.quick else 128
    config = tiny(VOCAB, size, heads=size // 16, ffn=3 * size, max_len=PROMPT + LONGEST)
    spreads = (1, 16) if setting.quick else (1, 2, 4, 16, 48)  # longest answer over shortest
    counts = (2, 8) if setting.quick else (2, 4, 8, 16)
    for spread, count in setting.track(list(product(spreads, counts))):
        model = init_weights(Transformer(config, dtype=torch.float64), seed=0)
        answers = lengths(spread)
        truth = gradient(model, packed(answers, 1), "per step")
        batches = packed(answers, count)
        targets = [batch.num_targets for batch in batches]
        for way in WAYS:
            loss, found = gradient(model, batches, way)
            yield {
                "normalisation": way,
                "spread": spread,
                "micro_batches": count,
                "targets_largest_over_smallest": max(targets) / min(targets),
                "gradient_error": float((found - truth[1]).norm() / truth[1].norm()),
                "loss_error_nats": abs(loss - truth[0]),
            }


def lengths(spread: int) -> list[int]:
    """The lengths of the answers, from LONGEST / spread to LONGEST, the extremes included."""
    drawn = np.random.default_rng(0).uniform(np.log(LONGEST / spread), np.log(LONGEST), DOCUMENTS - 2)
    return [LONGEST // spread, LONGEST, *np.exp(drawn).round().astype(int).tolist()]


def packed(answers: Sequence[int], micro_batches: int) -> list[Batch]:
    """The same documents in this many micro-batches: random tokens, of which the answers are targets."""
    stream = np.random.default_rng(1)
    documents = [stream.integers(VOCAB, size=PROMPT + n + 1) for n in answers]
    each = len(documents) // micro_batches
    return [_batch(documents[i : i + each]) for i in range(0, len(documents), each)]


def _batch(documents: Sequence[np.ndarray]) -> Batch:
    sizes = [len(d) - 1 for d in documents]
    targets = [np.where(np.arange(len(d) - 1) < PROMPT, IGNORE, d[1:]) for d in documents]
    return Batch(
        ids=torch.from_numpy(np.concatenate([d[:-1] for d in documents])),
        targets=torch.from_numpy(np.concatenate(targets)),
        positions=torch.cat([torch.arange(n) for n in sizes]),
        cu_seqlens=torch.tensor([0, *sizes]).cumsum(0).to(torch.int32),
        max_len=max(sizes),
        num_targets=sum(n - PROMPT for n in sizes),
        target_bytes=0,
    )


def gradient(model: Transformer, batches: Sequence[Batch], way: str) -> tuple[float, torch.Tensor]:
    """The accumulated loss, and the accumulated gradient of all parameters."""
    objective = CrossEntropy()
    model.zero_grad()
    loss = 0.0
    for batch in batches:
        totals = objective.totals(batches if way == "per step" else [batch])
        part = objective(model, batch, totals).loss / (1 if way == "per step" else len(batches))
        part.backward()
        loss += float(part.detach())
    return loss, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if accumulation gives the gradient of the large batch with both normalisations."""
    equal = {
        way: [r for r in rows if r["normalisation"] == way and number(r, "gradient_error") <= EQUAL] for way in WAYS
    }
    total = {way: sum(r["normalisation"] == way for r in rows) for way in WAYS}
    good = sum(map(len, equal.values()))
    kind: Kind = "held" if good == len(rows) else "holds only where" if good else "did not hold"
    worst = max(rows, key=lambda r: number(r, "gradient_error"))
    counts = ", ".join(f"{way}: {len(equal[way])} of {total[way]}" for way in WAYS)
    zh = "，".join(f"{IN_CHINESE[way]} {len(equal[way])}/{total[way]}" for way in WAYS)
    return Verdict(
        kind=kind,
        sentence_en=f"Cases with the gradient of the large batch, by what losses are divided: {counts}. The largest "
        f"error is {100 * number(worst, 'gradient_error'):.1f} % of the gradient ({worst['normalisation']}, answers up "
        f"to ×{worst['spread']} as long as others, {worst['micro_batches']} micro-batches).",
        sentence_zh=f"与大批次梯度相同的情形：{zh}。最大误差为梯度的 {100 * number(worst, 'gradient_error'):.1f} %"
        f"（{IN_CHINESE[str(worst['normalisation'])]}，答案长度相差至 {worst['spread']} 倍，"
        f"{worst['micro_batches']} 个微批）。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    marks = []
    for (i, count), (way, style) in product(
        enumerate(numbers_in(rows, "micro_batches")), zip(WAYS, ("o-", "s--"), strict=True)
    ):
        own, label = where(rows, normalisation=way, micro_batches=count), f"divided {way}, {count:g} micro-batches"
        marks.append(Line.of(own, "spread", lambda r: max(number(r, "gradient_error"), 1e-18), label, style, i))
    return [Panel(marks, "", "longest answer over shortest", "relative error of the gradient", "log", "log")]


LAB = Claim(
    title_en="Gradient accumulation",
    title_zh="梯度累积",
    claim_en="Accumulating gradients over micro-batches gives the gradient of one large batch.",
    claim_zh="在多个微批上累积梯度，等于一个大批次的梯度。",
    regime=f"A Llama of 2 layers in fp64, {DOCUMENTS} documents with prompts of {PROMPT} tokens that are no targets.",
    varies="What a loss is divided by (targets of its micro-batch, of the step), spread of the answers' lengths, "
    "number of micro-batches.",
    measures="Relative error of the gradient, and error of the loss, against one batch with all documents.",
)
