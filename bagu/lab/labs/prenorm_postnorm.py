"""Pre-norm and post-norm: how large the gradients of each layer are before the first step, and what that asks of Adam.

    post   x ← norm(x + f(x))          pre        x ← x + f(norm(x))
    none   x ← x + 0.2 f(x / β)        sandwich   x ← x + norm(f(norm(x)))

Two initialisations: "plain" as in the first Transformers, deviation 1/√D for every matrix; "scaled" as in GPT-2, where
the matrices that write to the stream are divided by √(2 · layers). A model without norms has one of its own.

A learning rate is stable when a model learns one batch by heart with it. One that fails ends with the same prediction
for every token, at the entropy of the batch's token frequencies, which is why LEARNED is a share of that entropy. One
batch makes a run short and free of noise; nothing is clipped, since clipping would be another cure.
Theory of the gradients: https://arxiv.org/abs/2002.04745.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING

import torch

from bagu.data import BpeTokenizer, DataConfig, Loader, StdlibSource, in_memory, tokenize
from bagu.lab.core import Kind, Lab, Row, Setting, Verdict, number
from bagu.lab.plot import COLOURS, log_ticks
from bagu.nn.choices import NormConfig, Placement
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.train import OptimizerConfig, ScheduleConfig, StabilityConfig, TrainConfig, TrainState, step
from bagu.train.objective import LanguageModelling, Totals
from bagu.types import Batch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

D, VOCAB, CONTEXT = 32, 512, 64
LOWEST, HIGHEST = 3e-4, 1.0  # learning rates to bisect between
LEARNED = 0.9  # of the entropy of the token frequencies: less than this is more than frequencies
NEEDS = 2.0  # a placement needs warm-up when its largest stable learning rate is so many times larger with it
LARGER = 2.0  # post-norm's last gradient counts as larger from so many times pre-norm's on


@dataclass(frozen=True)
class Variant:
    placement: Placement
    init: str

    @property
    def label(self) -> str:
        return self.placement if self.placement == "none" else f"{self.placement}, {self.init}"


VARIANTS = (
    Variant("post", "plain"), Variant("pre", "plain"), Variant("post", "scaled"), Variant("pre", "scaled"),
    Variant("sandwich", "scaled"), Variant("none", "own"),
)  # fmt: skip


def build(variant: Variant, layers: int, seed: int) -> Transformer:
    alpha = 0.2 if variant.placement == "none" else None
    model = Transformer(
        ModelConfig(
            vocab_size=VOCAB, hidden_size=D, num_layers=layers, num_heads=2, num_kv_heads=2, head_dim=D // 2,
            intermediate_size=4 * D, max_len=CONTEXT, ffn="gelu", init_std=D**-0.5,
            norm=NormConfig(kind="layer", placement=variant.placement, alpha=alpha),
        )
    )  # fmt: skip
    init_weights(model, seed)
    if variant.init == "plain":  # undo the division of nn/init.py
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith((".attention.out.weight", ".ffn.down.weight")):
                    p.mul_(math.sqrt(2 * layers))
    return model


def batches(seeds: Sequence[int]) -> dict[int, tuple[Batch, ...]]:
    """A batch of 128 tokens of the built-in corpus for each seed."""
    documents = list(islice(StdlibSource().documents(), 10))
    tokenizer = BpeTokenizer.train([document.text for document in documents], vocab_size=VOCAB)
    store = in_memory(tokenize(documents, tokenizer), token_bytes=tokenizer.token_bytes)
    return {s: Loader({"stdlib": store}, DataConfig(context=CONTEXT, rows=2, seed=s)).batch(0) for s in seeds}


def run(setting: Setting) -> list[Row]:
    quick = setting.quick
    data = batches((0,) if quick else (0, 1, 2))
    depths, layers, steps, halvings = ((8, 32), 6, 24, 3) if quick else ((8, 16, 32, 64, 128), 12, 40, 4)
    gradients = [("gradient", v, depth, 0) for v, depth in product(VARIANTS, depths)]
    rates = [("rate", v, warmup, seed) for v, warmup, seed in product(VARIANTS, (0, 2 * steps // 5), data)]
    rows: list[Row] = []
    for part, variant, value, seed in setting.track([*gradients, *rates]):
        if part == "gradient":
            rows += gradient_rows(variant, value, data)
        else:
            found = largest_stable(variant, layers, data[seed], seed, warmup=value, steps=steps, halvings=halvings)
            rows.append(
                {
                    "measured": "learning rate", "placement": variant.placement, "init": variant.init,
                    "depth_layers": layers, "steps": steps, "warmup_steps": value, "seed": seed, "largest_stable_lr": found,
                }
            )  # fmt: skip
    return rows


def gradient_rows(variant: Variant, depth: int, data: Mapping[int, tuple[Batch, ...]]) -> list[Row]:
    """The norm of the gradient of all parameters of a layer, for eight layers from the first to the last: the mean
    over seeds."""
    norms = []
    for seed, batch in data.items():
        model = build(variant, depth, seed)
        LanguageModelling()(model, batch[0], Totals.of(batch)).loss.backward()
        norms.append([torch.nn.utils.get_total_norm([p.grad for p in b.parameters()]).item() for b in model.blocks])
    return [
        {
            "measured": "gradient", "placement": variant.placement, "init": variant.init, "depth_layers": depth,
            "layer": layer, "gradient_norm": statistics.fmean(each[layer] for each in norms), "seeds": len(norms),
        }
        for layer in (i * (depth - 1) // 7 for i in range(8))
    ]  # fmt: skip


def largest_stable(
    variant: Variant, layers: int, batch: tuple[Batch, ...], seed: int, *, warmup: int, steps: int, halvings: int
) -> float | None:
    """By bisection of the logarithm; None where no learning rate that was tried is stable."""
    low, high, found = math.log(LOWEST), math.log(HIGHEST), None
    for _ in range(halvings):
        lr = math.exp((low + high) / 2)
        if learns(build(variant, layers, seed), batch, lr, warmup=warmup, steps=steps, seed=seed):
            low, found = math.log(lr), lr
        else:
            high = math.log(lr)
    return found


def learns(model: Transformer, batch: tuple[Batch, ...], lr: float, *, warmup: int, steps: int, seed: int) -> bool:
    """Whether the mean loss of the last five steps on one batch is below LEARNED of its frequencies' entropy."""
    config = TrainConfig(
        steps=steps, seed=seed, clip=None, stability=StabilityConfig(spike_threshold=None),
        optimizer=OptimizerConfig(kind="adam", lr=lr, betas=(0.9, 0.98)),
        schedule=ScheduleConfig(kind="constant", warmup_steps=warmup),
    )  # fmt: skip
    state = TrainState(model, config)
    losses = []
    for _ in range(steps):
        result = step(state, batch)
        if result.skipped is not None:  # not finite
            break
        losses.append(result.loss)
    state.close()
    return len(losses) == steps and statistics.fmean(losses[-5:]) < LEARNED * entropy(batch[0].targets)


def entropy(targets: torch.Tensor) -> float:
    """Of the frequencies of the tokens to predict, in nats."""
    counts = targets[targets >= 0].unique(return_counts=True)[1].double()
    return torch.special.entr(counts / counts.sum()).sum().item()
