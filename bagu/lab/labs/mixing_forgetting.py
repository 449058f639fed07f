"""Mixing and forgetting: what continued pretraining on new text does to the old, by the share of old text in it.

    old     code: modules of the standard library with docstrings and comments taken out
    new     prose: the docstrings of the same modules
    forgetting       rise of the loss on held-out old text over what it was before
    left of it       that rise as a share of the rise without any old text

A model is trained on old text until its learning rate is 0. It then goes on, with a new optimizer, on a mixture that
`bagu.data` makes row by row; text of both kinds is held out by module, so neither has seen the other's modules.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bagu.data import (
    BpeTokenizer,
    DataConfig,
    Document,
    Loader,
    MixConfig,
    StdlibSource,
    TokenStore,
    evaluation_batches,
    hold_out,
    in_memory,
    tokenize,
)
from bagu.data.stdlib import parsed
from bagu.lab.core import Kind, Lab, Row, Setting, Verdict, number
from bagu.lab.plot import COLOURS
from bagu.lab.seeds import interval
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.train import OptimizerConfig, ScheduleConfig, TrainConfig, fit
from bagu.train.evaluate import held_out_loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOCAB, CONTEXT, ROWS = 1024, 128, 16
PEAK = 4e-3  # learning rate of the first training; continued training takes all of it, or a quarter
SHARES = (0, 5, 10, 25, 50, 100)  # percent of old text; 100 is the control: the same steps, nothing new
CLAIMED = (5, 10)
STOPPED = 10.0  # percent of the forgetting: when no more is left, it counts as stopped


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Both kinds of text, to train on and held out."""

    train: dict[str, TokenStore]
    held: dict[str, TokenStore]

    @classmethod
    def read(cls, every: int) -> Texts:
        """Of every n-th module."""
        split = hold_out(itertools.islice(StdlibSource().documents(), 0, None, every), fraction=0.1)
        train, held = (separate(part) for part in split)
        tokenizer = BpeTokenizer.train((d.text for part in train.values() for d in part), vocab_size=VOCAB)
        stores = (
            {name: in_memory(tokenize(d, tokenizer), token_bytes=tokenizer.token_bytes) for name, d in part.items()}
            for part in (train, held)
        )
        return cls(**dict(zip(("train", "held"), stores, strict=True)))


def separate(modules: Sequence[Document]) -> dict[str, list[Document]]:
    """Code and prose of modules; one that does not parse has neither."""
    old, new = [], []
    for module in modules:
        tree = parsed(module.text)
        if tree is not None:
            prose = "\n\n".join(take_docstrings(tree))
            old.append(Document(id=module.id, text=ast.unparse(tree)))  # which writes no comments either
            new += [Document(id=module.id, text=prose)] if prose else []
    return {"old": old, "new": new}


def take_docstrings(tree: ast.Module) -> list[str]:
    """The docstrings of a module, its classes and functions, in this order; the tree is left without them."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                found.append(text)
                node.body = node.body[1:] or [ast.Pass()]
    return found


def train(model: Transformer, texts: Texts, *, share: float, lr: float, steps: int, seed: int) -> None:
    """`share` percent of the rows are old text."""
    mix = MixConfig(weights={"old": share, "new": 100 - share})
    config = TrainConfig(
        steps=steps, seed=seed, optimizer=OptimizerConfig(kind="adamw", lr=lr),
        schedule=ScheduleConfig(kind="linear", warmup_steps=max(steps // 10, 1)),
    )  # fmt: skip
    fit(config, model, Loader(texts.train, DataConfig(context=CONTEXT, rows=ROWS, seed=seed, mix=mix)))


def losses(model: Transformer, texts: Texts, *, batches: int) -> dict[str, float]:
    """In nats a token, on held-out text of each kind."""
    model.eval()
    shape = DataConfig(context=CONTEXT, rows=ROWS)
    found = {}
    for name, store in texts.held.items():
        evaluate = held_out_loss(partial(evaluation_batches, store, shape, limit=batches))
        found[name] = evaluate(model)["val_loss_nats"]
    return found


def run(setting: Setting) -> list[Row]:
    texts = Texts.read(24 if setting.quick else 2)
    seeds = (1, 2) if setting.quick else (1, 2, 3)
    starts = {seed: Start.make(texts, seed, setting) for seed in seeds}
    shares = (0, 5, 10, 50) if setting.quick else SHARES
    rates = (PEAK,) if setting.quick else (PEAK, PEAK / 4)
    points = list(itertools.product(seeds, rates, shares))
    return [starts[seed].go_on(texts, share, lr, setting) for seed, lr, share in setting.track(points)]
