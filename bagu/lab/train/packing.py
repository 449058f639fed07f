"""Packing and padding: tokens per second, and the loss after the same number of useful tokens.

    padded    one document per row, the rest of the row is padding; the row is one segment
    whole     best fit: a document that fits in a row is not split; each document is a segment
    stream    concatenated documents, split at the end of a row; each piece is a segment
    joined    like stream, but a row is one segment: its documents attend to each other

All use `bagu.data.Loader` and `bagu.train`, for one epoch: each way uses the same tokens once. A step has the same
number of targets in each (padded has more rows for it), so the number of updates is equal too. Every model is then
measured on the same held-out documents, each alone, and in rows after unrelated documents.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch

from bagu.data import (
    BpeTokenizer,
    DataConfig,
    Document,
    Loader,
    StdlibSource,
    TokenStore,
    evaluation_batches,
    hold_out,
    in_memory,
    tokenize,
)
from bagu.data.order import shuffled
from bagu.data.pack import Packing
from bagu.data.stdlib import functions, parsed
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, number
from bagu.lab.parts.confidence import interval
from bagu.lab.parts.interleaved import best_times
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import INK, Line, Mark, Panel, Rule
from bagu.nn import Transformer, init_weights
from bagu.train import OptimizerConfig, ScheduleConfig, TrainConfig, TrainState, fit, step
from bagu.train.cross_entropy import held_out_loss
from bagu.types import Batch

Way = Literal["padded", "whole", "stream", "joined"]
WAYS: tuple[Way, ...] = get_args(Way)
MASKED: tuple[Way, ...] = ("whole", "stream")  # packed, and documents do not attend to each other
PLACES: dict[str, Packing] = {"alone": "whole", "behind_others": "joined"}  # placement of a held-out document
VOCAB, CONTEXT, ROWS = 1024, 256, 8
SAME = 1.0  # percent of the loss: a smaller difference is not relevant
FASTER = 1.05  # a smaller speedup does not count


class Padded(Loader):
    """Rows as segments: the padding after the document is computed, but does not affect the document."""

    def batch(self, step: int) -> tuple[Batch, ...]:
        context, tokens = self.config.context, self.config.rows * self.config.context
        cu_seqlens = torch.arange(0, tokens + 1, context, dtype=torch.int32)
        positions = torch.arange(context).repeat(self.config.rows)
        return tuple(replace(b, cu_seqlens=cu_seqlens, positions=positions) for b in super().batch(step))


def loader(store: TokenStore, way: Way, *, context: int, seed: int) -> Loader:
    """Batches of this way; a step has about ROWS · context useful tokens in each."""
    if way != "padded":
        return Loader({"text": store}, DataConfig(context=context, rows=ROWS, seed=seed, packing=way))
    config = DataConfig(context=context, rows=ROWS, seed=seed, packing="whole")
    alone = replace(config, max_segments_per_row=1)
    packed, padded = (Loader({"text": store}, c).layouts["text"].rows_per_epoch for c in (config, alone))
    return Padded({"text": store}, replace(alone, rows=round(ROWS * padded / packed)))


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Functions and full modules of the standard library as documents; functions of other modules are held out."""

    functions: TokenStore
    modules: TokenStore
    held: TokenStore

    @classmethod
    def read(cls, every: int, held_every: int) -> Texts:
        """Read every n-th module. The held-out functions are shuffled, so neighbours come from different modules."""
        split = hold_out(StdlibSource().documents(), fraction=0.1)
        split = split._replace(train=split.train[::every], validation=split.validation[::held_every])
        train, held = ([f for module in part for f in of_module(module)] for part in split)
        held = [held[i] for i in shuffled(0, "held")(0, len(held))]
        tokenizer = BpeTokenizer.train((d.text for d in train), vocab_size=VOCAB)
        made = (
            in_memory(tokenize(d, tokenizer), token_bytes=tokenizer.token_bytes) for d in (train, split.train, held)
        )
        return cls(**dict(zip(("functions", "modules", "held"), made, strict=True)))


def of_module(module: Document) -> list[Document]:
    """The functions and methods of a module; a nested function belongs to the outer one."""
    found, lines, end = [], module.text.split("\n"), 0
    for f in functions(parsed(module.text)):
        if f.lineno > end:
            end = f.end_lineno or f.lineno
            found.append(Document(id=f"{module.id}:{f.lineno}", text="\n".join(lines[f.lineno - 1 : end])))
    return found


def model(device: str, context: int, seed: int) -> Transformer:
    config = tiny(VOCAB, 64, heads=2, ffn=192, max_len=context, tie_embeddings=True)
    return init_weights(Transformer(config, device=device), seed)


def train_config(steps: int, seed: int) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        seed=seed,
        optimizer=OptimizerConfig(kind="muon", lr=0.02),
        schedule=ScheduleConfig(kind="linear", warmup_steps=steps // 10),
    )


def context_of(setting: Setting) -> int:
    """The context that losses are measured at."""
    return 64 if setting.quick else CONTEXT


def run(setting: Setting) -> list[Row]:
    texts = Texts.read(120, 60) if setting.quick else Texts.read(12, 3)
    contexts = (context_of(setting),) if setting.quick else (128, 256, 512)
    seeds = (1, 2) if setting.quick else (1, 2, 3)
    points: list[Callable[[], list[Row]]] = []
    for name, context in itertools.product(("functions", "modules"), contexts):
        points.append(partial(speed, name, getattr(texts, name), context, setting))
    points += [partial(loss, way, seed, texts, setting) for seed, way in itertools.product(seeds, WAYS)]
    return [row for point in setting.track(points) for row in point()]


def speed(name: str, store: TokenStore, context: int, setting: Setting) -> list[Row]:
    """A step of each way, with interleaved timing, each on a few batches of its own."""
    loaders: dict[str, Loader] = {way: loader(store, way, context=context, seed=0) for way in WAYS}
    batches = {way: [made.batch(i) for i in range(4)] for way, made in loaders.items()}

    def stepper(way: str) -> Callable[[], object]:
        state = TrainState(model(setting.device, context, 0), train_config(1000, 0))
        turns = itertools.cycle(batches[way])
        return lambda: step(state, next(turns))

    steppers, rounds = {way: stepper(way) for way in loaders}, 1 if setting.quick else 3
    times = best_times(steppers, setting.device, seconds=0.1 if setting.quick else 0.3, rounds=rounds)
    useful = {way: sum(b.num_targets for s in some for b in s) / len(some) for way, some in batches.items()}
    return [
        {
            "kind": "speed",
            "documents": name,
            "document_median_tokens": statistics.median(store.lengths.tolist()),
            "context_tokens": context,
            "way": way,
            "rows": made.config.rows,
            "padding_percent": made.report()["sources"]["text"]["padding_percent"],
            "useful_tokens_per_step": useful[way],
            "step_ms": times[way] * 1e3,
            "useful_tokens_per_s": useful[way] / times[way],
        }
        for way, made in loaders.items()
    ]


def loss(way: Way, seed: int, texts: Texts, setting: Setting) -> list[Row]:
    """Train on all functions once, then measure on held-out functions: each alone, and in rows shared with others."""
    context = context_of(setting)
    trained, feed = model(setting.device, context, seed), loader(texts.functions, way, context=context, seed=seed)
    steps = int(feed.layouts["text"].rows_per_epoch) // feed.config.rows
    if setting.quick:
        steps = 1
    if fit(train_config(steps, seed), trained, feed).interrupted:  # Ctrl-C ends the lab, not only this training
        raise KeyboardInterrupt
    trained.eval()
    useful = sum(b.num_targets for s in range(steps) for b in feed.batch(s))
    row: Row = {"kind": "loss", "way": way, "seed": seed, "steps": steps, "useful_tokens": useful}
    row["parameters"] = sum(p.numel() for p in trained.parameters())
    for place, packing in PLACES.items():
        shape = DataConfig(context=context, rows=ROWS, packing=packing)
        batches = partial(evaluation_batches, texts.held, shape, limit=2 if setting.quick else 40)
        row[f"val_{place}_loss_nats"] = held_out_loss(batches)(trained)["val_loss_nats"]
    return [row]


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if both masked ways are faster everywhere without a higher loss; did not hold if neither is faster, or both
    have a higher loss."""
    gains: dict[str, dict[Point, float]] = {way: speedups(rows, way) for way in WAYS[1:]}
    best = {point: max(gains[way][point] for way in MASKED) for point in gains["whole"]}
    faster = [point for point, gain in best.items() if gain >= FASTER]
    losses = {way: differences(rows, way, "padded", "alone") for way in MASKED}
    base = sum(number(row, "val_alone_loss_nats") for row in of_way(rows, "padded")) / len(of_way(rows, "padded"))
    worse = [way for way, (mean, _) in losses.items() if 100 * mean / base > SAME]
    kind: Kind = (
        "did not hold"
        if not faster or len(worse) == len(MASKED)
        else "held"
        if len(faster) == len(best) and not worse
        else "holds only where"
    )
    words, words_zh = (
        "; ".join(f"{documents} {min(g):.2f} to {max(g):.2f}" for documents, g in ranges(best).items()),
        "；".join(f"{documents} {min(g):.2f} 至 {max(g):.2f}" for documents, g in ranges(best).items()),
    )
    changes = ", ".join(f"{way} {mean:+.3f} ± {half:.3f}" for way, (mean, half) in losses.items())
    alone, behind = (differences(rows, "joined", "stream", place) for place in PLACES)
    mask = sum(gains["joined"][p] / gains["stream"][p] for p in best) / len(best)
    return Verdict(
        kind=kind,
        sentence_en=f"Useful tokens per second of packing relative to padding, over the contexts: {words}. "
        f"Change of the loss after one epoch relative to padding ({base:.2f} nats): {changes} nats (95 % interval of "
        f"the mean over seeds). Letting documents attend to each other: {alone[0]:+.3f} ± {alone[1]:.3f} nats on "
        f"single documents, {behind[0]:+.3f} ± {behind[1]:.3f} after unrelated ones, and {mask:.2f} times the speed.",
        sentence_zh=f"打包后每秒有效 token 数与填充相比的倍数（随上下文长度）：{words_zh}。训练一轮"
        f"后，与填充（{base:.2f} nats）相比损失变化：{changes} nats（种子均值的 95 % 区间）。让文档互相可见："
        f"单独 {alone[0]:+.3f} ± {alone[1]:.3f} nats，接在无关文档之后 {behind[0]:+.3f} ± {behind[1]:.3f} nats，"
        f"速度为 {mask:.2f} 倍。",
    )


Point = tuple[str, int]  # documents, context


def speedups(rows: Sequence[Row], way: str) -> dict[Point, float]:
    """Useful tokens per second, as a multiple of padding."""
    found: dict[str, dict[Point, float]] = {"padded": {}, way: {}}
    for row in rows:
        if row["kind"] == "speed" and row["way"] in found:
            point = str(row["documents"]), int(number(row, "context_tokens"))
            found[str(row["way"])][point] = number(row, "useful_tokens_per_s")
    return {point: rate / found["padded"][point] for point, rate in found[way].items()}


def ranges(gains: dict[Point, float]) -> dict[str, list[float]]:
    return {d: [gain for (of, _), gain in gains.items() if of == d] for d in dict.fromkeys(d for d, _ in gains)}


def of_way(rows: Sequence[Row], way: str) -> list[Row]:
    return [row for row in rows if row["kind"] == "loss" and row["way"] == way]


def differences(rows: Sequence[Row], way: str, base: str, place: str) -> tuple[float, float]:
    """The difference of the loss of `way` and `base` with the same seed: mean and half width, in nats."""
    first, second = (
        {row["seed"]: number(row, f"val_{place}_loss_nats") for row in of_way(rows, name)} for name in (way, base)
    )
    return interval([first[seed] - second[seed] for seed in first])


def plot(rows: Sequence[Row]) -> list[Panel]:
    marks: list[Mark] = [Rule(1, style="-")]
    for (documents, dash), (i, way) in itertools.product((("functions", "o-"), ("modules", "o:")), enumerate(WAYS[1:])):
        gains = {context: gain for (d, context), gain in speedups(rows, way).items() if d == documents}
        marks.append(Line([*gains], [*gains.values()], f"{way}, {documents}", dash, i))
    title, y = "Useful tokens per second", "relative to padding, ×"
    panels = [Panel(marks, title, "context, tokens", y, "log2", ylim=(0, None), width=1.2)]
    for place, title in (("alone", "Loss, single documents"), ("behind_others", "Loss, after unrelated ones")):
        dots: list[Mark] = []
        for x, way in enumerate(WAYS):
            found, colour = column(of_way(rows, way), f"val_{place}_loss_nats"), x - 1 if x else INK
            average = [sum(found) / len(found)] * 2
            dots += [Line([x] * len(found), found, "", "o", colour, alpha=0.5)]
            dots += [Line([x - 0.3, x + 0.3], average, "", "-", colour)]
        panels.append(Panel(dots, title, y="nats per token" if place == "alone" else "", xnames=WAYS))
    return panels


LAB = Claim(
    title_en="Packing and padding",
    title_zh="打包与填充",
    claim_en="Packing is free: the same loss, more tokens per second.",
    claim_zh="打包是免费的：损失不变，每秒处理的 token 更多。",
    regime=f"A decoder of width 64 with 2 layers and a vocabulary of {VOCAB:,}, fp32, Muon; functions of the standard "
    f"library as documents (many shorter than a row) and full modules (most longer). Losses at context {CONTEXT}.",
    varies="How rows are filled (padded, full documents packed, a stream split at row ends, the same with documents "
    "that attend to each other), documents, context, seed.",
    measures="Padding, time of an optimizer step, useful tokens per second; loss on held-out functions after one "
    "epoch, each function alone or after unrelated ones in one row.",
    evidence="training",
)
