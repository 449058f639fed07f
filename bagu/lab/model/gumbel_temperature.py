"""The temperature of a Gumbel softmax: how near to 0 or 1 its samples are, and the bias and variance of its gradient.

    wanted      ∇ Σ_k p_k f(e_k), p = softmax(logits)      the sum over all one-hots e_k: exact
    soft        ∇ f(y), y = softmax((logits + g) / τ)
    hard        the one-hot of the same sample, with the gradient of the soft one (straight-through)
    REINFORCE   (f(e_k) - E f) ∇ log p_k                   unbiased; its variance is a sum over k, exact too

f is the cross-entropy of a linear readout of the sample. Where y is near a corner its gradient is near 0: a share of
about τ of the samples carries all of it, each with a factor 1 / τ, so that the variance grows as 1 / τ.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch

from bagu import ops
from bagu.lab.core import Claim, Row, Setting, Verdict, column, listed, number, numbers_in, share_met, where
from bagu.lab.parts.confidence import of_ratio
from bagu.lab.plot import Line, Panel, Rule

CATEGORIES, WIDTH = 8, 5
TAUS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
SHARP = 0.95  # mean largest coefficient that counts as 0 or 1
NEAR = 0.1  # bias, in lengths of the wanted gradient
DRAWS = (1, 100, 10_000)  # samples in a mean; the middle one decides
STILL = 0.01  # of the wanted gradient: a sample with less moves nothing


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits[K] and a readout[K, W]."""
    stream = torch.Generator().manual_seed(seed)
    logits = torch.randn(CATEGORIES, generator=stream, dtype=torch.float64)
    return logits, 2 * torch.randn(CATEGORIES, WIDTH, generator=stream, dtype=torch.float64)


def loss(y: torch.Tensor, readout: torch.Tensor) -> torch.Tensor:
    return -torch.log_softmax(y @ readout, -1)[..., 0]


def wanted(logits: torch.Tensor, readout: torch.Tensor) -> torch.Tensor:
    """The gradient of the expected loss."""
    logits = logits.clone().requires_grad_()
    each = loss(torch.eye(CATEGORIES, dtype=logits.dtype), readout)
    return torch.autograd.grad((torch.softmax(logits, -1) * each).sum(), logits)[0]


def reinforce_variance(logits: torch.Tensor, readout: torch.Tensor) -> float:
    """Of one sample with the expected loss as its baseline, in squared lengths of the wanted gradient."""
    p, hot, g = torch.softmax(logits, -1), torch.eye(CATEGORIES, dtype=logits.dtype), wanted(logits, readout)
    each = loss(hot, readout)
    found = (each - (p * each).sum()).unsqueeze(1) * (hot - p)
    return float((p * (found - g).square().sum(1)).sum() / g.square().sum())


def measured(seed: int, tau: float, hard: bool, samples: int) -> Row:
    logits, readout = problem(seed)
    g = wanted(logits, readout)
    size = g.square().sum()
    many = logits.expand(samples, -1).clone().requires_grad_()  # the noise of a row depends on its number
    y = ops.gumbel_softmax(many, tau, hard, seed)
    found = torch.autograd.grad(loss(y, readout).sum(), many)[0]
    variance = (found - found.mean(0)).square().sum(1).mean()
    y = y.detach()
    return {
        "largest": float(y.amax(1).mean()),
        "entropy_nats": float(-torch.xlogy(y, y).sum(1).mean()),
        "still_share": float((found.square().sum(1) < STILL**2 * size).double().mean()),
        # without the part that the noise of the mean adds, so that it may be below 0
        "bias_squared": float(((found.mean(0) - g).square().sum() - variance / samples) / size),
        "variance": float(variance / size),
    }


def run(setting: Setting) -> Iterator[Row]:
    problems, samples = (3, 2000) if setting.quick else (10, 100_000)
    for tau in setting.track(TAUS):
        for hard in (False, True):
            for seed in range(problems):
                way = "hard" if hard else "soft"
                yield {"way": way, "tau": tau, "problem": seed, **measured(seed, tau, hard, samples)}
    for seed in range(problems):
        variance = reinforce_variance(*problem(seed))
        yield {"way": "REINFORCE", "tau": None, "problem": seed, "bias_squared": 0.0, "variance": variance}


def mean(rows: Sequence[Row], key: str) -> float:
    return fmean(column(rows, key))


def bias(rows: Sequence[Row]) -> float:
    """The root of the mean over problems, in lengths of the wanted gradient."""
    return max(mean(rows, "bias_squared"), 0.0) ** 0.5


def error(row: Row, draws: int) -> float:
    """The distance of a mean of so many samples from the wanted gradient, in its lengths: root mean square."""
    return (max(number(row, "bias_squared"), 0.0) + number(row, "variance") / draws) ** 0.5


def verdict(rows: Sequence[Row]) -> Verdict:
    """Three parts at the lowest temperature: samples near 0 or 1, a gradient near the wanted one in the mean, and a
    mean of 100 samples no further from it than at temperature 1."""
    soft = where(rows, way="soft")
    taus = numbers_in(soft, "tau")
    cold, warm = (where(soft, tau=tau) for tau in (taus[0], 1.0))
    ratio = of_ratio(*([error(row, DRAWS[1]) for row in part] for part in (cold, warm)))
    sharp, off = mean(cold, "largest"), bias(cold)
    best = [min(taus, key=lambda tau: fmean(error(r, n) for r in where(soft, tau=tau))) for n in DRAWS]
    said = Verdict.say(
        share_met([sharp >= SHARP, off <= NEAR, ratio.mean <= 1]),
        "At temperature {tau:g} the largest coefficient is {sharp:.2f} on average and the gradient's bias {off:.2f} of "
        "its length, {warm:.2f} at temperature 1. Its variance is {cold:.0f}, {at_one:.1f} at 1, and {plain:.1f} for "
        "REINFORCE, which has no bias: a mean of {draws} samples is {ratio:.1f} ({low:.1f} to {high:.1f}) times as far "
        "from the true gradient as at 1. Means of {each} samples are nearest to it at {best}.",
        "温度 {tau:g} 时最大系数平均 {sharp:.2f}，梯度的偏差为其长度的 {off:.2f}，温度 1 时为 {warm:.2f}。方差为 "
        "{cold:.0f}，温度 1 时 {at_one:.1f}，无偏的 REINFORCE 为 {plain:.1f}：{draws} 个样本的平均到真实梯度的距离是"
        "温度 1 时的 {ratio:.1f} 倍（{low:.1f} 至 {high:.1f}）。{each} 个样本的平均分别在 {best} 时最接近。",
        tau=taus[0],
        sharp=sharp,
        off=off,
        warm=bias(warm),
        cold=mean(cold, "variance"),
        at_one=mean(warm, "variance"),
        plain=mean(where(rows, way="REINFORCE"), "variance"),
        draws=DRAWS[1],
        ratio=ratio.mean,
        low=ratio.low,
        high=ratio.high,
        each=listed((f"{n:,}" for n in DRAWS), zh="、"),
        best=listed((f"{tau:g}" for tau in best), zh="、"),
    )
    if ratio.low > 1 or ratio.high <= 1:
        return said
    return said.undecided(
        "more problems, until the interval of the ratio is on one side of 1.", "更多问题，直到比值的区间落在 1 的一侧。"
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    taus = numbers_in(rows, "tau")
    ways = {way: [where(rows, way=way, tau=tau) for tau in taus] for way in ("soft", "hard")}
    plain = mean(where(rows, way="REINFORCE"), "variance")
    soft, x = ways["soft"], "temperature"
    samples = [
        Line(taus, [mean(part, "largest") for part in soft], "largest coefficient"),
        Line(taus, [mean(part, "entropy_nats") for part in soft], "entropy, nats"),
        Line(taus, [mean(part, "still_share") for part in soft], "share without a gradient"),
    ]
    biases = [Line(taus, [bias(part) for part in parts], way) for way, parts in ways.items()]
    spreads = [Line(taus, [mean(part, "variance") for part in parts], way) for way, parts in ways.items()]
    errors = [Line(taus, [fmean(error(r, n) for r in part) for part in soft], f"mean of {n:,}") for n in DRAWS]
    of, of_squared = "of the gradient's length", "of its squared length"
    return [
        Panel(samples, "Soft samples", x, "", "log", legend="below"),
        Panel(biases, "Bias", x, of, "log"),
        Panel([Rule(plain, "REINFORCE"), *spreads], "Variance", x, of_squared, "log", "log"),
        Panel(errors, "Error of a mean, soft", x, of, "log", "log", legend="below"),
    ]


LAB = Claim(
    title_en="Temperature of a Gumbel softmax",
    title_zh="Gumbel softmax 的温度",
    claim_en="The lower the temperature of a Gumbel softmax the better: its samples become 0 or 1 and stay "
    "differentiable, with the right gradient.",
    claim_zh="Gumbel softmax 的温度越低越好：样本变为 0 或 1，仍然可微，梯度也正确。",
    regime=f"{CATEGORIES} categories, the cross-entropy of a linear readout of the sample, fp64; the true gradient is "
    "a sum over the categories. 10 problems of 100,000 samples (quick: 3 of 2,000), fixed seeds. No training.",
    varies=f"Temperature, {TAUS[0]:g} to {TAUS[-1]:g}; soft samples, hard ones with a straight-through gradient, and "
    "REINFORCE with the expected loss as baseline.",
    measures="Largest coefficient and entropy of a sample; bias and variance of the gradient, in lengths of the true "
    f"one. At the lowest temperature: 0 or 1 from a mean largest of {SHARP} on, right with a bias of at most {NEAR}; "
    f"better if a mean of {DRAWS[1]} samples is no further from the true gradient than at temperature 1.",
    published_en="Jang et al. 2017 (arXiv:1611.01144) name the same trade: at small temperatures samples are close to "
    "one-hot but the variance of the gradients is large; they start high and anneal to a small one that is not 0.",
    published_zh="Jang 等（2017，arXiv:1611.01144）指出同样的取舍：低温时样本接近 one-hot，但梯度方差大；他们从高温"
    "开始，退火到一个不为 0 的低温。",
)
