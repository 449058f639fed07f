"""BatchNorm against LayerNorm on text: what padding and small batches do to batch statistics.

Sequences of unequal length L_b are padded with zeros to T. Features have a population mean µ_c and deviation σ_c, and
a share RHO of the variance belongs to the sequence as a whole (its topic), so tokens of one sequence are no independent
samples and a batch is worth little more than its number of sequences:

    x[b, t, c] = µ_c + σ_c (√RHO u[b, c] + √(1 - RHO) v[b, t, c])        u, v ~ N(0, 1)

BatchNorm's statistics come from bagu.ops.batch_norm, with the padding counted (B x T positions) or masked (the real
tokens only). Dims: B sequences, T positions, C features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch

from bagu import ops
from bagu.lab.core import Kind, Lab, Row, Setting, Verdict, number
from bagu.lab.plot import log_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T, C = 64, 64
RHO = 0.25
SHORTEST = 8
GOOD = 0.05  # a mean within this many σ of the population's counts as unspoiled
SAME = 1e-5  # LayerNorm's outputs are fp32 of size 1, and this is about 100 of their spacings


@dataclass(frozen=True, kw_only=True)
class Population:
    """The features' true mean and standard deviation."""

    mean_C: torch.Tensor
    std_C: torch.Tensor

    def draw(self, B: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """A padded batch x[B, T, C] and which of its positions are real, real[B, T]."""
        lengths = torch.randint(SHORTEST, T + 1, (B,), generator=generator)
        topic, token = torch.randn(B, 1, C, generator=generator), torch.randn(B, T, C, generator=generator)
        x = self.mean_C + self.std_C * (RHO**0.5 * topic + (1 - RHO) ** 0.5 * token)
        real = torch.arange(T) < lengths[:, None]
        return x * real[..., None], real


def run(setting: Setting) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.randn(C, generator=generator), 0.5 + torch.rand(C, generator=generator)
    population = Population(mean_C=mean, std_C=std)
    sizes = (1, 4, 16, 64, 256) if setting.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    points = list(product(sizes, ("counted", "masked")))
    return [point(population, B, padding, setting) for B, padding in setting.track(points)]


def point(population: Population, B: int, padding: str, setting: Setting) -> Row:
    """Errors at one batch size, over many batches: root mean squares over batches and features."""
    generator = torch.Generator().manual_seed(B)
    batches = [population.draw(B, generator) for _ in range(8 if setting.quick else 40)]
    mean_C, std_C = population.mean_C.to(setting.device), population.std_C.to(setting.device)
    means, variances, outputs, changes, padded = [], [], [], [], 0.0
    for x, real in ((x.to(setting.device), real.to(setting.device)) for x, real in batches):
        y, mean, var = batch_stats(x, real, padding)
        means.append(mean)
        variances.append(var)
        outputs.append((x[real], y))
        changes.append(layer_norm_change(x, real))
        padded += 100 * (~real).double().mean().item() / len(batches)
    # In evaluation the running averages stand in for the batch's statistics; over many steps they are these means.
    mean, var = torch.stack(means).mean(0), torch.stack(variances).mean(0)
    gaps = [
        rms(y - ops.batch_norm(tokens, running_mean=mean, running_var=var, training=False)[0]) for tokens, y in outputs
    ]
    return {
        "batch_sequences": B,
        "padding": padding,
        "padded_percent": padded,
        "mean_error_sigma": rms((torch.stack(means) - mean_C) / std_C),
        "variance_error_percent": 100 * rms(torch.stack(variances) / std_C**2 - 1),
        "train_eval_gap_rms": sum(gaps) / len(gaps),
        "layer_norm_max_change": max(changes),
    }


def batch_stats(x: torch.Tensor, real: torch.Tensor, padding: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The training outputs y[tokens, C] of the real tokens, and the batch's mean and variance."""
    if padding == "masked":
        return ops.batch_norm(x[real])
    y, mean, var = ops.batch_norm(x.transpose(1, 2))  # the op's features are dim 1: [B, C, T]
    return y.transpose(1, 2)[real], mean, var


def layer_norm_change(x: torch.Tensor, real: torch.Tensor) -> float:
    """How much LayerNorm's output for the first sequence moves when it leaves the batch and its padding is cut off."""
    w = x.new_ones(C)
    together, alone = ops.layer_norm(x, w)[0, real[0]], ops.layer_norm(x[0, real[0]], w)
    return (together - alone).abs().max().item()


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held when the statistics are bad whether padding is counted or not, at every batch, and LayerNorm stays put."""
    counted, masked = by_padding(rows, "counted"), by_padding(rows, "masked")
    worst = max(number(row, "layer_norm_max_change") for row in rows)
    floor = min(counted.values())
    good = [B for B, error in masked.items() if error <= GOOD]
    kind: Kind
    if worst > SAME:
        kind, head_en, head_zh = "did not hold", "LayerNorm's outputs move as well", "LayerNorm 的输出同样会变化"
    elif floor <= GOOD:
        kind, head_en, head_zh = "did not hold", "Counted padding does no harm", "计入填充并无影响"
    elif not good:
        kind, head_en, head_zh = "held", "Both spoil the statistics at every batch size", "在所有批量下两者都破坏统计量"
    else:
        kind = "holds only where"
        head_en = f"It takes counted padding or fewer than {min(good)} sequences to spoil them"
        head_zh = f"填充被计入统计，或批量小于 {min(good)} 条序列时，统计量才被破坏"
    large, small = max(masked), min(masked)
    return Verdict(
        kind=kind,
        sentence_en=f"{head_en}: with padding counted the mean is off by at least {floor:.2f} σ at any batch; masked, "
        f"it is off by {masked[small]:.2f} σ at {small} and {masked[large]:.3f} σ at {large} sequences. "
        f"LayerNorm's outputs move by at most {worst:.1g}.",
        sentence_zh=f"{head_zh}：计入填充时，均值误差在任何批量下都不低于 {floor:.2f} σ；去掉填充后，"
        f"{small} 条序列时为 {masked[small]:.2f} σ，{large} 条时为 {masked[large]:.3f} σ。"
        f"LayerNorm 的输出最多变化 {worst:.1g}。",
    )


def by_padding(rows: Sequence[Row], padding: str) -> dict[int, float]:
    """The error of the mean by batch size, in σ."""
    chosen = [row for row in rows if row["padding"] == padding]
    return {int(number(row, "batch_sequences")): number(row, "mean_error_sigma") for row in chosen}


def plot(fig: Figure, rows: Sequence[Row]) -> None:
    panels = {
        "mean_error_sigma": ("Error of the mean", "σ of the population"),
        "variance_error_percent": ("Error of the variance", "% of the population's"),
        "train_eval_gap_rms": ("Training against evaluation", "difference of outputs, root mean square"),
    }
    for axes, (key, (title, unit)) in zip(fig.subplots(1, 3), panels.items(), strict=True):
        for padding, marker in (("counted", "s"), ("masked", "o")):
            chosen = [row for row in rows if row["padding"] == padding]
            batches = [number(row, "batch_sequences") for row in chosen]
            axes.plot(batches, [number(row, key) for row in chosen], marker=marker, label=f"padding {padding}")
        axes.set(xscale="log", yscale="log", xlabel="sequences in the batch", ylabel=unit, title=title)
        axes.set_xticks((1, 4, 16, 64, 256), ("1", "4", "16", "64", "256"))
        axes.xaxis.minorticks_off()
        log_ticks(axes.yaxis)
    fig.axes[0].legend()


LAB = Lab(
    name="batchnorm_layernorm",
    title_en="BatchNorm against LayerNorm",
    title_zh="BatchNorm 与 LayerNorm",
    claim_en="BatchNorm does not suit text: padding and small batches spoil its statistics; LayerNorm is untouched.",
    claim_zh="BatchNorm 不适合文本：填充和小批量会破坏它的统计量，而 LayerNorm 完全不受影响。",
    regime=f"Sequences of {SHORTEST} to {T} tokens padded with zeros to {T}, {C} features, fp32; {RHO:.0%} of the "
    "variance is common to a sequence.",
    varies="Sequences in a batch, 1 to 256; padding counted in the statistics or masked.",
    measures="Error of the batch's mean (in σ) and variance (in %) against the population; distance of training "
    "outputs from evaluation outputs; change of LayerNorm's outputs when a sequence leaves its batch and padding.",
    needs_gpu=False,
    run=run,
    verdict=verdict,
    plot=plot,
)
