"""BatchNorm and LayerNorm on text: the effect of padding and small batches on batch statistics.

Sequences of different lengths L_b are padded with zeros to T. Features have a population mean µ_c and deviation σ_c. A
fraction RHO of the variance is common to a sequence (its topic), so tokens of one sequence are not independent samples,
and the effective batch size is little more than the number of sequences:

    x[b, t, c] = µ_c + σ_c (√RHO u[b, c] + √(1 - RHO) v[b, t, c])        u, v ~ N(0, 1)

BatchNorm's statistics come from bagu.ops.batch_norm, with the padding included (B x T positions) or masked (the real
tokens only). Dims: B sequences, T positions, C features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, where
from bagu.lab.plot import Line, Panel

T, C = 64, 64
RHO = 0.25
SHORTEST = 8
GOOD = 0.05  # a mean within this many σ of the population counts as correct
SAME = 1e-5  # LayerNorm's outputs are fp32 of size 1; this is about 100 times their spacing


@dataclass(frozen=True, kw_only=True)
class Population:
    """The true mean and standard deviation of the features."""

    mean_C: torch.Tensor
    std_C: torch.Tensor

    def draw(self, B: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """A padded batch x[B, T, C], and a mask real[B, T] of its real positions."""
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
    """Errors at one batch size: root mean squares over many batches and features."""
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
    # Evaluation uses running averages instead of batch statistics; over many steps they converge to these means.
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
    """The training outputs y[tokens, C] of the real tokens, and the mean and variance of the batch."""
    if padding == "masked":
        return ops.batch_norm(x[real])
    y, mean, var = ops.batch_norm(x.transpose(1, 2))  # the op has features in dim 1: [B, C, T]
    return y.transpose(1, 2)[real], mean, var


def layer_norm_change(x: torch.Tensor, real: torch.Tensor) -> float:
    """The change of LayerNorm's output for the first sequence if it is alone and without padding."""
    w = x.new_ones(C)
    together, alone = ops.layer_norm(x, w)[0, real[0]], ops.layer_norm(x[0, real[0]], w)
    return (together - alone).abs().max().item()


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the statistics are wrong with and without masking, at every batch size, and LayerNorm does not change."""
    counted, masked = by_padding(rows, "counted"), by_padding(rows, "masked")
    worst = max(number(row, "layer_norm_max_change") for row in rows)
    floor = min(counted.values())
    good = [B for B, error in masked.items() if error <= GOOD]
    kind: Kind
    if worst > SAME:
        kind, head_en, head_zh = "did not hold", "LayerNorm's outputs change too", "LayerNorm 的输出同样会变化"
    elif floor <= GOOD:
        kind, head_en, head_zh = "did not hold", "Including the padding has no effect", "计入填充并无影响"
    elif not good:
        kind, head_en, head_zh = "held", "Both break the statistics at every batch size", "在所有批量下两者都破坏统计量"
    else:
        kind = "holds only where"
        head_en = f"The statistics break only with padding included or fewer than {min(good)} sequences"
        head_zh = f"填充被计入统计，或批量小于 {min(good)} 条序列时，统计量才被破坏"
    large, small = max(masked), min(masked)
    return Verdict(
        kind=kind,
        sentence_en=f"{head_en}: with padding included the error of the mean is at least {floor:.2f} σ at any batch "
        f"size; masked, it is {masked[small]:.2f} σ at {small} and {masked[large]:.3f} σ at {large} sequences. "
        f"LayerNorm's outputs change by at most {worst:.1g}.",
        sentence_zh=f"{head_zh}：计入填充时，均值误差在任何批量下都不低于 {floor:.2f} σ；去掉填充后，"
        f"{small} 条序列时为 {masked[small]:.2f} σ，{large} 条时为 {masked[large]:.3f} σ。"
        f"LayerNorm 的输出最多变化 {worst:.1g}。",
    )


def by_padding(rows: Sequence[Row], padding: str) -> dict[int, float]:
    """The error of the mean in σ, by batch size."""
    chosen = [row for row in rows if row["padding"] == padding]
    return {int(number(row, "batch_sequences")): number(row, "mean_error_sigma") for row in chosen}


def plot(rows: Sequence[Row]) -> list[Panel]:
    texts = {
        "mean_error_sigma": ("Error of the mean", "σ of the population"),
        "variance_error_percent": ("Error of the variance", "% of the population variance"),
        "train_eval_gap_rms": ("Training and evaluation", "difference of outputs, root mean square"),
    }
    panels: list[Panel] = []
    for key, (title, unit) in texts.items():
        lines = [
            Line.of(where(rows, padding=padding), "batch_sequences", key, f"padding {padding}", style)
            for padding, style in (("counted", "s-"), ("masked", "o-"))
        ]
        panels.append(
            Panel(lines, title, "sequences in the batch", unit, "log2", "log", legend="none" if panels else "inside")
        )
    return panels


LAB = Claim(
    title_en="BatchNorm and LayerNorm",
    title_zh="BatchNorm 与 LayerNorm",
    claim_en="BatchNorm does not suit text: padding and small batches break its statistics; LayerNorm is not affected.",
    claim_zh="BatchNorm 不适合文本：填充和小批量会破坏它的统计量，而 LayerNorm 完全不受影响。",
    regime=f"Sequences of {SHORTEST} to {T} tokens padded with zeros to {T}, {C} features, fp32; {RHO:.0%} of the "
    "variance is common to a sequence.",
    varies="Sequences in a batch, 1 to 256; padding included in the statistics or masked.",
    measures="Error of the batch mean (in σ) and variance (in %) relative to the population; difference between "
    "training and evaluation outputs; change of LayerNorm's outputs if a sequence is alone and without padding.",
)
