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
from collections.abc import Sequence
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

VOCAB, CONTEXT, ROWS = 1024, 128, 8
PEAK = 0.02  # learning rate of the first training; continued training begins with all of it, or with a quarter
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
        steps=steps, seed=seed, optimizer=OptimizerConfig(kind="muon", lr=lr),
        schedule=ScheduleConfig(kind="linear", warmup_steps=max(steps // 10, 1)),
    )  # fmt: skip
    fit(config, model, Loader(texts.train, DataConfig(context=CONTEXT, rows=ROWS, seed=seed, mix=mix)))


def losses(model: Transformer, texts: Texts, setting: Setting) -> dict[str, float]:
    """In nats a token, on held-out text of each kind."""
    shape, batches = DataConfig(context=CONTEXT, rows=ROWS), 4 if setting.quick else 50
    model.eval()
    found = {}
    for name, store in texts.held.items():
        evaluate = held_out_loss(partial(evaluation_batches, store, shape, limit=batches))
        found[name] = evaluate(model)["val_loss_nats"]
    return found


@dataclass(frozen=True, kw_only=True)
class Start:
    """A model that has learned the old text, and its losses."""

    model: Transformer
    seed: int
    before: dict[str, float]

    @classmethod
    def make(cls, texts: Texts, seed: int, setting: Setting) -> Start:
        config = ModelConfig(
            vocab_size=VOCAB, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32,
            intermediate_size=192, max_len=CONTEXT, tie_embeddings=True,
        )  # fmt: skip
        model = init_weights(Transformer(config, device=setting.device), seed)
        train(model, texts, share=100, lr=PEAK, steps=30 if setting.quick else 400, seed=seed)
        return cls(model=model, seed=seed, before=losses(model, texts, setting))

    def go_on(self, texts: Texts, share: int, lr: float, setting: Setting) -> Row:
        """Continued pretraining from here, `share` percent of it on old text."""
        model, steps = copy.deepcopy(self.model), 10 if setting.quick else 100
        # other rows than the first training began with: a seed of its own
        train(model, texts, share=share, lr=lr, steps=steps, seed=self.seed + 1000)
        after = losses(model, texts, setting)
        return {
            "seed": self.seed,
            "lr": lr,
            "lr_of_first_percent": 100 * lr / PEAK,
            "old_text_percent": share,
            "tokens": steps * ROWS * CONTEXT,
            "old_before_nats": self.before["old"],
            "old_after_nats": after["old"],
            "new_before_nats": self.before["new"],
            "new_after_nats": after["new"],
            "forgetting_nats": after["old"] - self.before["old"],
            "gain_nats": self.before["new"] - after["new"],
        }


def run(setting: Setting) -> list[Row]:
    texts = Texts.read(24 if setting.quick else 2)
    shares, rates, seeds = SHARES, (PEAK, PEAK / 4), (1, 2, 3)
    if setting.quick:
        shares, rates, seeds = (0, 5, 10, 100), (PEAK,), (1, 2)
    rows = []
    for seed, number_of in setting.track([(seed, i) for seed in seeds for i in range(len(rates) * len(shares))]):
        if number_of == 0:
            start = Start.make(texts, seed, setting)
        lr, share = list(itertools.product(rates, shares))[number_of]
        rows.append(start.go_on(texts, share, lr, setting))
    return rows
