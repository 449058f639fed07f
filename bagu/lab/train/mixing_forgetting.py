"""Mixing and forgetting: the effect of continued pretraining on the loss of old text, by the fraction of old text.

    old     code: functions of the standard library, without docstrings and comments
    new     prose: their docstrings
    forgetting       the increase of the loss on held-out old text
    left of it       that increase as a fraction of the increase without any old text

A model is trained on old text until its learning rate is 0. Training then continues, with a new optimizer, on a mixture
of rows from `bagu.data`. Text of both kinds is held out by module.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

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
from bagu.data.stdlib import functions, parsed
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, numbers_in
from bagu.lab.parts.confidence import interval
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import INK, Line, Mark, Note, Panel, Rule
from bagu.nn import Transformer, init_weights
from bagu.train import OptimizerConfig, ScheduleConfig, TrainConfig, fit
from bagu.train.cross_entropy import held_out_loss

VOCAB, CONTEXT, ROWS = 1024, 128, 8
FIRST_STEPS, MORE_STEPS = 300, 75
PEAK = 0.02  # learning rate of the first training; continued training starts with all of it, or with a quarter
SHARES = (0, 5, 10, 25, 50, 100)  # percent of old text; 100 is the control: the same steps without new text
CLAIMED = (5, 10)
STOPPED = 10.0  # percent: forgetting counts as stopped if at most this much is left


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Both kinds of text, for training and held out."""

    train: dict[str, TokenStore]
    held: dict[str, TokenStore]

    @classmethod
    def read(cls, every: int) -> Texts:
        """Read every n-th module."""
        split = hold_out(itertools.islice(StdlibSource().documents(), 0, None, every), fraction=0.1)
        train, held = (separate(part) for part in split)
        tokenizer = BpeTokenizer.train((d.text for part in train.values() for d in part), vocab_size=VOCAB)
        stores = (
            {name: in_memory(tokenize(d, tokenizer), token_bytes=tokenizer.token_bytes) for name, d in part.items()}
            for part in (train, held)
        )
        return cls(**dict(zip(("train", "held"), stores, strict=True)))


def separate(modules: Sequence[Document]) -> dict[str, list[Document]]:
    """Code and prose of the functions and methods of modules. Documents are short, so a step has text of many."""
    old, new = [], []
    for module in modules:
        for function in functions(parsed(module.text)):
            name, prose = f"{module.id}:{function.lineno}", ast.get_docstring(function)
            if prose:
                new.append(Document(id=name, text=prose))
                function.body = function.body[1:] or [ast.Pass()]
            if not any(isinstance(node, ast.FunctionDef) for node in ast.walk(function) if node is not function):
                old.append(Document(id=name, text=ast.unparse(function)))  # unparse drops comments
    return {"old": old, "new": new}


def train(model: Transformer, texts: Texts, *, share: float, lr: float, steps: int, seed: int) -> None:
    """Train with `share` percent of the rows from old text."""
    mix = MixConfig(weights={"old": share, "new": 100 - share})
    config = TrainConfig(
        steps=steps,
        seed=seed,
        optimizer=OptimizerConfig(kind="muon", lr=lr),
        schedule=ScheduleConfig(kind="linear", warmup_steps=max(steps // 10, 1)),
    )
    done = fit(config, model, Loader(texts.train, DataConfig(context=CONTEXT, rows=ROWS, seed=seed, mix=mix)))
    if done.interrupted:  # Ctrl-C ends the lab, not only this training
        raise KeyboardInterrupt


def losses(model: Transformer, texts: Texts, setting: Setting) -> dict[str, float]:
    """Loss in nats per token on held-out text of each kind."""
    shape, batches = DataConfig(context=CONTEXT, rows=ROWS), 2 if setting.quick else 30
    model.eval()
    found = {}
    for name, store in texts.held.items():
        evaluate = held_out_loss(partial(evaluation_batches, store, shape, limit=batches))
        found[name] = evaluate(model)["val_loss_nats"]
    return found


@dataclass(frozen=True, kw_only=True)
class Start:
    """A model trained on the old text, and its losses."""

    model: Transformer
    seed: int
    before: dict[str, float]

    @classmethod
    def make(cls, texts: Texts, seed: int, setting: Setting) -> Start:
        config = tiny(VOCAB, 64, heads=2, ffn=192, max_len=CONTEXT, tie_embeddings=True)
        model = init_weights(Transformer(config, device=setting.device), seed)
        train(model, texts, share=100, lr=PEAK, steps=4 if setting.quick else FIRST_STEPS, seed=seed)
        return cls(model=model, seed=seed, before=losses(model, texts, setting))

    def continue_training(self, texts: Texts, share: int, lr: float, setting: Setting) -> Row:
        """Continue pretraining from here, with `share` percent of old text."""
        model, steps = copy.deepcopy(self.model), 2 if setting.quick else MORE_STEPS
        # a different seed, so that the rows differ from the start of the first training
        train(model, texts, share=share, lr=lr, steps=steps, seed=self.seed + 1000)
        after = losses(model, texts, setting)
        return {
            "seed": self.seed,
            "lr": lr,
            "lr_of_first_percent": 100 * lr / PEAK,
            "old_text_percent": share,
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": steps,
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
    shares = (0, 5, 10, 100) if setting.quick else SHARES
    rates = (PEAK,) if setting.quick else (PEAK, PEAK / 4)
    seeds = (1, 2) if setting.quick else (1, 2, 3)
    start = cache(lambda seed: Start.make(texts, seed, setting))
    points = list(itertools.product(seeds, rates, shares))
    return [start(seed).continue_training(texts, share, lr, setting) for seed, lr, share in setting.track(points)]


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if each claimed fraction stops forgetting at every learning rate; did not hold if none does at any."""
    rates = sorted({number(row, "lr_of_first_percent") for row in rows}, reverse=True)
    stops = {(rate, share): left(rows, rate, share) <= STOPPED for rate in rates for share in CLAIMED}
    kind: Kind = "held" if all(stops.values()) else "holds only where" if any(stops.values()) else "did not hold"
    parts, parts_zh = [], []
    for rate in rates:
        rise, half = mean(rows, rate, 0, "forgetting_nats")
        control = mean(rows, rate, 100, "forgetting_nats")[0]
        listed = ", ".join(f"{left(rows, rate, share):.0f} % at {share} %" for share in shares_of(rows, rate)[1:])
        price = 100 * (1 - mean(rows, rate, 10, "gain_nats")[0] / mean(rows, rate, 0, "gain_nats")[0])
        parts.append(
            f"with {rate:g} % of the first learning rate the old loss rises by {rise:.2f} ± {half:.2f} nats without "
            f"old text (on old text alone it changes by {control:+.2f}); left of this rise: {listed}; "
            f"10 % of old text reduces the gain on new text by {price:.0f} %"
        )
        listed = "，".join(
            f"旧数据 {share} % 时剩 {left(rows, rate, share):.0f} %" for share in shares_of(rows, rate)[1:]
        )
        parts_zh.append(
            f"学习率为初次训练的 {rate:g} % 时，不掺旧数据，旧损失上升 {rise:.2f} ± {half:.2f} nats"
            f"（只用旧数据时变化 {control:+.2f}）；{listed}；"
            f"掺 10 % 旧数据使新数据的收益减少 {price:.0f} %"
        )
    text = "; ".join(parts)
    return Verdict(kind=kind, sentence_en=f"{text[0].upper()}{text[1:]}.", sentence_zh=f"{'；'.join(parts_zh)}。")


def at(rows: Sequence[Row], rate: float, share: float) -> list[Row]:
    return [row for row in rows if (row["lr_of_first_percent"], row["old_text_percent"]) == (rate, share)]


def shares_of(rows: Sequence[Row], rate: float) -> list[int]:
    """The fractions tested at this learning rate, without the control."""
    found = {int(number(row, "old_text_percent")) for row in rows if row["lr_of_first_percent"] == rate}
    return sorted(found - {100})


def mean(rows: Sequence[Row], rate: float, share: float, key: str) -> tuple[float, float]:
    """The mean over the seeds, and the half width of its 95 % interval."""
    return interval([number(row, key) for row in at(rows, rate, share)])


def left(rows: Sequence[Row], rate: float, share: float) -> float:
    """The forgetting that is left, in percent; 0 if nothing was forgotten."""
    rise, all_of_it = (mean(rows, rate, s, "forgetting_nats")[0] for s in (share, 0))
    return 100 * max(rise, 0.0) / all_of_it if all_of_it > 0 else 0.0


def plot(rows: Sequence[Row]) -> list[Panel]:
    rates = numbers_in(rows, "lr_of_first_percent")[::-1]
    rises: list[Mark] = [Rule(0, style="-")]
    start = [mean(rows, rates[0], 0, key)[0] for key in ("old_before_nats", "new_before_nats")]
    trade: list[Mark] = [Line(start[:1], start[1:], "before", "*", INK, size=10)]
    for i, rate in enumerate(rates):
        shares, style, label = shares_of(rows, rate), "os"[i] + "-", f"{rate:g} % of the first learning rate"
        found = [mean(rows, rate, share, "forgetting_nats") for share in shares]
        ends = [(m - h, m + h) for m, h in found]
        rises.append(Line(range(len(shares)), [m for m, _ in found], label, style, i, ends))
        control = mean(rows, rate, 100, "forgetting_nats")[0]
        rises.append(Rule(control, "old text only, same number of steps", colour=i))
        old, new = ([mean(rows, rate, share, f"{kind}_after_nats")[0] for share in shares] for kind in ("old", "new"))
        trade.append(Line(old, new, label, style, i))
        lift = (0, 6 if i else -13)
        trade += [Note(x, y, f"{s} %", i, lift) for s, x, y in zip(shares, old, new, strict=True)]
    names, x = [str(share) for share in shares_of(rows, rates[0])], "old text in the mixture, %"
    return [
        Panel(rises, "Forgetting", x, "increase of the old loss, nats", xnames=names),
        Panel(trade, "Old and new", "loss on old text, nats", "loss on new text, nats"),
    ]


LAB = Claim(
    title_en="Mixing and forgetting",
    title_zh="数据混合与遗忘",
    claim_en="5 to 10 % of old data is enough to stop forgetting in continued pretraining.",
    claim_zh="继续预训练时，掺入 5 % 至 10 % 的旧数据就足以防止遗忘。",
    regime=f"A decoder of width 64 with 2 layers, vocabulary {VOCAB:,}, fp32, Muon; first "
    f"{FIRST_STEPS * ROWS * CONTEXT:,} tokens of code, with the learning rate decayed to 0, then "
    f"{MORE_STEPS * ROWS * CONTEXT:,} tokens of the mixture. The model could still learn more from the code.",
    varies="Fraction of old text in the mixture (0 to 50 %, and 100 % as control), learning rate of the continued "
    "training (equal to the first, and a quarter), seed.",
    measures=f"Loss on held-out code and held-out docstrings, before and after; at most {STOPPED:g} % of the rise "
    "without old text counts as stopped.",
    evidence="training",
)
