"""Packing against padding: tokens a second, and the loss at the same useful tokens.

    padded    one document a row, the rest of the row padding; the row is one segment
    whole     best fit: a document that fits a row is not cut; each document a segment of its own
    stream    documents end to end, cut at the end of a row; each piece a segment of its own
    joined    as stream, but a row is one segment: documents in it see each other

All are made by `bagu.data.Loader` and trained by `bagu.train`. A step has the same number of targets whichever way (a
padded one has more rows for it), so that equal useful tokens are equal updates too. Every model is then measured on the
same held-out documents, each alone, and once more in rows where unrelated documents stand before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

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
from bagu.data.pack import shuffled
from bagu.data.stdlib import functions, parsed
from bagu.lab.core import Kind, Lab, Row, Setting, Verdict, number
from bagu.lab.plot import COLOURS
from bagu.lab.seeds import interval
from bagu.lab.turns import best_times
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.train import OptimizerConfig, ScheduleConfig, TrainConfig, TrainState, fit, step
from bagu.train.evaluate import held_out_loss
from bagu.types import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = ("padded", "whole", "stream", "joined")
MASKED = ("whole", "stream")  # packed, and no document sees another
VOCAB, CONTEXT, ROWS = 1024, 256, 8
SAME = 1.0  # percent of the loss: less is no difference worth a decision
FASTER = 1.05  # times: less is no gain


class Padded(Loader):
    """Rows as segments: what follows the document in its row is computed, and being behind it changes nothing."""

    def batch(self, step: int) -> tuple[Batch, ...]:
        context, tokens = self.config.context, self.config.rows * self.config.context
        edges = torch.arange(0, tokens + 1, context, dtype=torch.int32)
        positions = torch.arange(context).repeat(self.config.rows)
        return tuple(replace(b, cu_seqlens=edges, positions=positions) for b in super().batch(step))


def loader(store: TokenStore, way: str, *, context: int, seed: int) -> Loader:
    """Batches made this way; a step of any has about ROWS · context useful tokens."""
    config = DataConfig(context=context, rows=ROWS, seed=seed, packing="whole")
    if way in ("whole", "stream", "joined"):
        return Loader({"text": store}, replace(config, packing=way))
    alone = replace(config, max_segments_per_row=1)
    packed, padded = (Loader({"text": store}, c).layouts["text"].rows_per_epoch for c in (config, alone))
    return Padded({"text": store}, replace(alone, rows=round(ROWS * padded / packed)))


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Functions and whole modules of the standard library as documents; held out are functions of other modules."""

    functions: TokenStore
    modules: TokenStore
    held: TokenStore

    @classmethod
    def read(cls, every: int) -> Texts:
        """Of every n-th module. The held-out functions are shuffled: neighbours are of different modules."""
        split = hold_out(itertools.islice(StdlibSource().documents(), 0, None, every), fraction=0.1)
        train, held = ([f for module in part for f in of_module(module)] for part in split)
        held = [held[i] for i in shuffled(0, "held")(0, len(held))]
        tokenizer = BpeTokenizer.train((d.text for d in train), vocab_size=VOCAB)
        made = (in_memory(tokenize(d, tokenizer), token_bytes=tokenizer.token_bytes) for d in (train, split.train, held))
        return cls(**dict(zip(("functions", "modules", "held"), made, strict=True)))


def of_module(module: Document) -> list[Document]:
    """Its functions and methods; one inside another belongs to the outer."""
    found, lines, end = [], module.text.split("\n"), 0
    for f in functions(parsed(module.text)):
        if f.lineno > end:
            end = f.end_lineno or f.lineno
            found.append(Document(id=f"{module.id}:{f.lineno}", text="\n".join(lines[f.lineno - 1 : end])))
    return found


def model(device: str, context: int, seed: int) -> Transformer:
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32, intermediate_size=192,
        max_len=context, tie_embeddings=True,
    )  # fmt: skip
    return init_weights(Transformer(config, device=device), seed)


def train_config(steps: int, seed: int) -> TrainConfig:
    return TrainConfig(
        steps=steps, seed=seed, optimizer=OptimizerConfig(kind="muon", lr=0.02),
        schedule=ScheduleConfig(kind="linear", warmup_steps=steps // 10),
    )  # fmt: skip


def run(setting: Setting) -> list[Row]:
    texts = Texts.read(24 if setting.quick else 3)
    contexts = (CONTEXT,) if setting.quick else (128, 256, 512, 1024)
    seeds = (1, 2) if setting.quick else (1, 2, 3)
    points: list[Callable[[], list[Row]]] = []
    for name, context in itertools.product(("functions", "modules"), contexts):
        points.append(partial(speed, name, getattr(texts, name), context, setting))
    points += [partial(loss, way, seed, texts, setting) for seed, way in itertools.product(seeds, WAYS)]
    return [row for point in setting.track(points) for row in point()]


def speed(name: str, store: TokenStore, context: int, setting: Setting) -> list[Row]:
    """A step of each way, timed in turns, each over a few batches of its own."""
    loaders = {way: loader(store, way, context=context, seed=0) for way in WAYS}
    batches = {way: [made.batch(i) for i in range(4)] for way, made in loaders.items()}
    states = {way: TrainState(model(setting.device, context, 0), train_config(1000, 0)) for way in WAYS}
    turns = {way: itertools.cycle(b) for way, b in batches.items()}
    calls = {way: lambda way=way: step(states[way], next(turns[way])) for way in WAYS}
    times = best_times(calls, setting.device, seconds=0.1 if setting.quick else 0.3)
    rows: list[Row] = []
    for way in WAYS:
        useful = sum(b.num_targets for s in batches[way] for b in s) / len(batches[way])
        rows.append(
            {
                "kind": "speed",
                "documents": name,
                "document_median_tokens": float(sorted(store.lengths.tolist())[store.num_documents // 2]),
                "context_tokens": context,
                "way": way,
                "rows": loaders[way].config.rows,
                "padding_percent": loaders[way].layouts["text"].report()["padding_percent"],
                "useful_tokens_per_step": useful,
                "step_ms": times[way] * 1e3,
                "useful_tokens_per_s": useful / times[way],
            }
        )
    return rows


def loss(way: str, seed: int, texts: Texts, setting: Setting) -> list[Row]:
    """Train on functions, then measure on the held-out ones: each alone, and in rows shared with others."""
    steps = 12 if setting.quick else 120
    trained, feed = model(setting.device, CONTEXT, seed), loader(texts.functions, way, context=CONTEXT, seed=seed)
    fit(train_config(steps, seed), trained, feed)
    trained.eval()
    measured = {
        f"val_{place}_loss_nats": held_out_loss(partial(held_batches, texts.held, packing, setting))(trained)["val_loss_nats"]
        for place, packing in (("alone", "whole"), ("behind_others", "joined"))
    }
    useful = sum(b.num_targets for s in range(steps) for b in feed.batch(s))
    return [{"kind": "loss", "way": way, "seed": seed, "steps": steps, "useful_tokens": useful} | measured]


def held_batches(store: TokenStore, packing: str, setting: Setting) -> list[Batch]:
    config = DataConfig(context=CONTEXT, rows=ROWS, packing=packing)  # type: ignore[arg-type]
    return list(evaluation_batches(store, config, limit=4 if setting.quick else 40))
