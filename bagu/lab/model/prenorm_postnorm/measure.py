"""Measurements of one variant: gradient norms before training, and the largest stable learning rate.

A learning rate is stable if a model can overfit one batch with it. A failed run ends with the same prediction for every
token, at the entropy of the batch's token frequencies; LEARNED is therefore a fraction of that entropy. One batch makes
a run short and free of noise. There is no clipping, because clipping is another remedy.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from bagu.data import BpeTokenizer, DataConfig, Loader, StdlibSource, in_memory, tokenize
from bagu.lab.core import Row
from bagu.lab.parts.tiny import tiny
from bagu.nn import Transformer, init_weights
from bagu.nn.choices import NormConfig, Placement
from bagu.train import OptimizerConfig, ScheduleConfig, StabilityConfig, TrainConfig, TrainState, step
from bagu.train.cross_entropy import CrossEntropy, TargetTotals
from bagu.types import Batch

D, VOCAB, CONTEXT = 32, 512, 64
LOWEST, HIGHEST = 1e-3, 1.0  # range of learning rates for the bisection
LEARNED = 0.75  # of the entropy of the token frequencies: a loss below it needs more than the frequencies


@dataclass(frozen=True)
class Variant:
    placement: Placement
    init: str

    @property
    def label(self) -> str:
        return self.placement if self.placement == "none" else f"{self.placement}, {self.init}"


def build(variant: Variant, layers: int, seed: int) -> Transformer:
    alpha = 0.2 if variant.placement == "none" else None
    norm = NormConfig(kind="layer", placement=variant.placement, alpha=alpha)
    size = {"layers": layers, "heads": 2, "ffn": 4 * D, "max_len": CONTEXT}
    model = init_weights(Transformer(replace(tiny(VOCAB, D, **size), ffn="gelu", init_std=D**-0.5, norm=norm)), seed)
    if variant.init == "plain":  # undo the scaling of nn/init.py
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith((".attention.out.weight", ".ffn.down.weight")):
                    p.mul_(math.sqrt(2 * layers))
    return model


def batches(seeds: Sequence[int]) -> dict[int, tuple[Batch, ...]]:
    """A batch of 64 tokens of the built-in corpus for each seed."""
    documents = list(islice(StdlibSource().documents(), 10))
    tokenizer = BpeTokenizer.train([document.text for document in documents], vocab_size=VOCAB)
    store = in_memory(tokenize(documents, tokenizer), token_bytes=tokenizer.token_bytes)
    return {s: Loader({"stdlib": store}, DataConfig(context=CONTEXT, rows=1, seed=s)).batch(0) for s in seeds}


def gradient_rows(variant: Variant, depth: int, data: Mapping[int, tuple[Batch, ...]]) -> list[Row]:
    """The gradient norm over all parameters of a layer, for eight layers from the first to the last: the mean over
    seeds."""
    norms = []
    for seed, batch in data.items():
        model = build(variant, depth, seed)
        CrossEntropy()(model, batch[0], TargetTotals.of(batch)).loss.backward()
        norms.append(
            [
                torch.nn.utils.get_total_norm([p.grad for p in b.parameters() if p.grad is not None]).item()
                for b in model.blocks
            ]
        )
    return [
        {
            "measured": "gradient",
            "placement": variant.placement,
            "init": variant.init,
            "depth_layers": depth,
            "layer": layer,
            "gradient_norm": statistics.fmean(each[layer] for each in norms),
            "seeds": len(norms),
        }
        for layer in (i * (depth - 1) // 7 for i in range(8))
    ]


def largest_stable(
    variant: Variant, layers: int, batch: tuple[Batch, ...], seed: int, *, warmup: int, steps: int, halvings: int
) -> float | None:
    """By bisection of the logarithm; None if no tested learning rate is stable."""
    low, high, found = math.log(LOWEST), math.log(HIGHEST), None
    for _ in range(halvings):
        lr = math.exp((low + high) / 2)
        if learns(build(variant, layers, seed), batch, lr, warmup=warmup, steps=steps, seed=seed):
            low, found = math.log(lr), lr
        else:
            high = math.log(lr)
    return found


def learns(model: Transformer, batch: tuple[Batch, ...], lr: float, *, warmup: int, steps: int, seed: int) -> bool:
    """Whether each of the last five losses on the batch is below LEARNED of the entropy of its frequencies.

    `steps` come after the warmup, so that both kinds of run have the same number at the full learning rate.
    """
    config = TrainConfig(
        steps=warmup + steps,
        seed=seed,
        clip=None,
        stability=StabilityConfig(spike_threshold=None),
        optimizer=OptimizerConfig(kind="adam", lr=lr, betas=(0.9, 0.98)),
        schedule=ScheduleConfig(kind="constant", warmup_steps=warmup),
    )
    state = TrainState(model, config)
    losses = []
    for _ in range(config.steps):
        result = step(state, batch)
        if result.skipped is not None:  # not finite
            break
        losses.append(result.loss)
    state.close()
    return len(losses) == config.steps and max(losses[-5:]) < LEARNED * entropy(batch[0].targets)


def entropy(targets: torch.Tensor) -> float:
    """Entropy of the frequencies of the target tokens, in nats."""
    counts = targets[targets >= 0].unique(return_counts=True)[1].double()
    return torch.special.entr(counts / counts.sum()).sum().item()
