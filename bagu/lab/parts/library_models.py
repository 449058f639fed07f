"""Small language models of the standard library, trained inside a lab and scored on the serving engine."""

import copy
import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from bagu.data import (
    BpeTokenizer,
    DataConfig,
    Document,
    Loader,
    Packing,
    StdlibSource,
    TokenStore,
    hold_out,
    in_memory,
    tokenize,
)
from bagu.eval.task import Item, Task
from bagu.eval.tasks.library import in_fair_order
from bagu.lab.core import Row
from bagu.lab.parts.tiny import tiny
from bagu.nn import Transformer, init_weights
from bagu.recipes.eval_models import EngineModel
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.train import OptimizerConfig, ScheduleConfig, TrainConfig, fit

VOCAB, CONTEXT, ROWS = 1024, 512, 2
STEP_TOKENS = CONTEXT * ROWS
HELD_SHARE = 0.3  # more than a usual run holds out: the labs need many items, and their models read little text
KV_MEMORY = 64 << 20  # bytes: the models are small


@dataclass(frozen=True, kw_only=True)
class Library:
    """Modules for training, held-out modules, and a tokenizer trained on the former."""

    train: tuple[Document, ...]
    held: tuple[Document, ...]
    tokenizer: BpeTokenizer

    def store(self, documents: Iterable[Document]) -> TokenStore:
        return in_memory(tokenize(documents, self.tokenizer), token_bytes=self.tokenizer.token_bytes)

    @cached_property
    def train_tokens(self) -> TokenStore:
        return self.store(self.train)

    @cached_property
    def held_tokens(self) -> TokenStore:
        return self.store(self.held)


@cache
def read_library(*, quick: bool) -> Library:
    """All modules, or a twelfth of them, without the tables of `encodings`. Read once per process."""
    every, held_share = (12, 0.6) if quick else (1, HELD_SHARE)  # a quick run, too, needs some items of every task
    modules = (d for d in StdlibSource().documents() if not d.id.startswith("encodings/"))
    split = hold_out(itertools.islice(modules, 0, None, every), fraction=held_share)
    tokenizer = BpeTokenizer.train((d.text for d in split.train), vocab_size=VOCAB)
    return Library(train=tuple(split.train), held=tuple(split.validation), tokenizer=tokenizer)


def new_model(*, width: int, layers: int = 2, seed: int, device: str) -> Transformer:
    config = tiny(VOCAB, width, layers=layers, heads=width // 32, ffn=3 * width, max_len=CONTEXT, tie_embeddings=True)
    return init_weights(Transformer(config, device=device), seed)


def train(
    model: Transformer,
    tokens: TokenStore,
    *,
    steps: int | None = None,
    seed: int,
    packing: Packing = "whole",
    checkpoints: Collection[int] = (),
) -> list[Transformer]:
    """Train in place, by default for one epoch, and return copies of the model after the steps in `checkpoints`. The
    learning rate ends at 0; with checkpoints it is constant, so that they are comparable.

    Packing "whole" shuffles rows, "stream" documents: use "stream" for short documents, because it does not put copies
    of a document in the same row.
    """
    loader = Loader({"library": tokens}, DataConfig(context=CONTEXT, rows=ROWS, seed=seed, packing=packing))
    steps = epoch_steps(loader) if steps is None else steps
    kind: Literal["constant", "linear"] = "constant" if checkpoints else "linear"
    config = TrainConfig(
        steps=steps,
        seed=seed,
        optimizer=OptimizerConfig(kind="muon", lr=0.02),
        schedule=ScheduleConfig(kind=kind, warmup_steps=max(min(steps // 10, 20), 1)),
        eval_every=1 if checkpoints else None,
    )
    copies: list[Transformer] = []
    step = itertools.count(1)

    def keep(model: Transformer) -> dict[str, float | None]:
        if next(step) in checkpoints:
            copies.append(copy.deepcopy(model))
        return {}

    done = fit(config, model, loader, evaluate=keep if checkpoints else None)
    if done.interrupted:  # Ctrl-C ends the lab, not only this training
        raise KeyboardInterrupt
    return copies


def epoch_steps(loader: Loader) -> int:
    """The steps that use every row once."""
    return math.ceil(sum(layout.rows_per_epoch for layout in loader.layouts.values()) / loader.config.rows_per_step)


def sized(rows: Iterable[Row], model: Transformer, steps: int) -> list[Row]:
    """The rows with the size of the model that they are about."""
    parameters = sum(p.numel() for p in model.parameters())
    return [row | {"parameters": parameters, "steps": steps} for row in rows]


def on_engine(model: Transformer, library: Library) -> EngineModel:
    engine = Engine(model.eval(), library.tokenizer, EngineConfig(kv_memory=KV_MEMORY, cuda_graphs=False))
    return EngineModel(engine, library.tokenizer, None, "lab")


BEFORE, PER_FILE = 160, 6  # characters before the line, items of a file at most
SHORTEST, LONGEST = 6, 70  # characters of a line, without its indentation


def next_line(modules: Sequence[Document]) -> Task:
    """Which of four lines follows. The wrong lines are from other modules, with their own indentation: built-in tasks
    take them from the same file (`continue4`), and a model trained for a minute answers those at chance."""
    return Task(
        name="next_line",
        kind="choice",
        items=lambda: in_fair_order(_items(modules)),
        delimiter="\n",
        normalization="characters",
        limits="Indentation and topic of the next line. Chance is 25 %.",
    )


def _items(modules: Sequence[Document]) -> Iterator[Item]:
    lines = {module.id: module.text.split("\n") for module in modules}
    places = {name: [i for i in range(8, len(own)) if _usable(own[i])] for name, own in lines.items()}
    names = [name for name, own in places.items() if own]
    for name in names:
        rng = random.Random(f"next_line:{name}")
        others = [other for other in names if other != name]
        for at in sorted(rng.sample(places[name], min(PER_FILE, len(places[name])))):
            right = lines[name][at]
            wrong = {lines[other][rng.choice(places[other])] for other in rng.sample(others, min(6, len(others)))}
            choices = [right, *sorted(wrong - {right})[:3]]
            before = "\n".join(lines[name][:at])[-BEFORE:]
            if len(choices) < 4 or not before.isascii() or not before.strip():
                continue
            rng.shuffle(choices)
            yield Item(
                id=f"{name}:{at + 1}",
                prompt=before[before.find("\n") + 1 :],
                choices=tuple(choices),
                answer=choices.index(right),
                cluster=name,
            )


def _usable(line: str) -> bool:
    return line.isascii() and SHORTEST <= len(line.strip()) <= LONGEST
