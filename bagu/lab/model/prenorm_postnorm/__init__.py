"""Pre-norm and post-norm: the gradients of each layer before the first step, and whether Adam needs warmup.

    post   x ← norm(x + f(x))          pre        x ← x + f(norm(x))
    none   x ← x + 0.2 f(x / β)        sandwich   x ← x + norm(f(norm(x)))

Two initializations: "plain" as in the first Transformers, standard deviation 1/√D for every matrix; "scaled" as in
GPT-2, where the output projections are divided by √(2 · layers). A model without norms has its own initialization.
Theory of the gradients: https://arxiv.org/abs/2002.04745.

The learning rates depend on depth and number of steps. A longer run recovers from a bad start: after 16 to 20 steps (6
and 8 layers) pre-norm too is stable at 2.4 to 3.7 times the learning rate with warmup, after 50 steps no longer. In a
shallower model post-norm gains less: ×1.5 at 4 layers. A quick run therefore shows the gradients, and only a hint of
the rest.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, numbers_in, where
from bagu.lab.model.prenorm_postnorm.measure import (
    CONTEXT,
    LEARNED,
    LOWEST,
    VOCAB,
    D,
    Variant,
    batches,
    build,
    gradient_rows,
    largest_stable,
)
from bagu.lab.plot import Line, Panel

NEEDS = 2.0  # a placement needs warmup if it raises the largest stable learning rate by this factor
LARGER = 2.0  # post-norm's last gradient counts as larger from this multiple of pre-norm's
VARIANTS = (
    Variant("post", "plain"),
    Variant("pre", "plain"),
    Variant("post", "scaled"),
    Variant("pre", "scaled"),
    Variant("sandwich", "scaled"),
    Variant("none", "own"),
)
RATED = tuple(v for v in VARIANTS if v.placement != "sandwich")


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    data = batches((0,) if quick else (0, 1, 2))
    depths, layers, steps, halvings = ((4, 8), 2, 4, 1) if quick else ((8, 16, 32, 64, 128), 8, 50, 4)
    gradients = [("gradient", v, depth, 0) for v, depth in product(VARIANTS, depths)]
    rates = [("rate", v, warmup, seed) for v, warmup, seed in product(RATED, (0, 2 * steps // 5), data)]
    size = sum(p.numel() for p in build(VARIANTS[0], layers, 0).parameters())
    for part, variant, value, seed in setting.track([*gradients, *rates]):
        if part == "gradient":
            yield from gradient_rows(variant, value, data)
        else:
            found = largest_stable(variant, layers, data[seed], seed, warmup=value, steps=steps, halvings=halvings)
            yield {
                "measured": "learning rate",
                "placement": variant.placement,
                "init": variant.init,
                "depth_layers": layers,
                "steps": steps,
                "warmup_steps": value,
                "seed": seed,
                "largest_stable_lr": found,
                "parameters": size,
            }


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The measurements of one variant."""

    last_gradient: dict[int, float]  # of the last layer, by depth
    without: list[float]  # largest stable learning rate per seed; LOWEST if none was stable
    with_warmup: list[float]

    @property
    def gain(self) -> float:
        """The factor by which warmup raises the largest stable learning rate, from the medians over seeds."""
        return statistics.median(self.with_warmup) / statistics.median(self.without)

    @property
    def needs_warmup(self) -> bool:
        """Whether the gain is large, and larger than the effect of the seed: their ranges do not overlap."""
        return self.gain >= NEEDS and min(self.with_warmup) > max(self.without)


def findings(rows: Sequence[Row]) -> dict[Variant, Finding]:
    return {
        v: Finding(
            last_gradient={
                int(number(row, "depth_layers")): number(row, "gradient_norm")
                for row in of(rows, v, "gradient")
                if row["layer"] == number(row, "depth_layers") - 1
            },
            without=[stable(row) for row in of(rows, v, "learning rate") if row["warmup_steps"] == 0],
            with_warmup=[stable(row) for row in of(rows, v, "learning rate") if row["warmup_steps"] != 0],
        )
        for v in RATED
    }


def of(rows: Sequence[Row], variant: Variant, measured: str) -> list[Row]:
    names = (variant.placement, variant.init, measured)
    return [row for row in rows if (row["placement"], row["init"], row["measured"]) == names]


def stable(row: Row) -> float:
    return LOWEST if row["largest_stable_lr"] is None else number(row, "largest_stable_lr")


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if for both initializations post-norm needs warmup, pre-norm does not, and post-norm's last gradient is
    larger in the deepest model."""
    found = findings(rows)
    deepest = max(found[RATED[0]].last_gradient)
    agree, parts_en, parts_zh = [], [], []
    for init, zh in (("plain", "普通"), ("scaled", "按深度缩放")):
        post, pre = found[Variant("post", init)], found[Variant("pre", init)]
        ratio = post.last_gradient[deepest] / pre.last_gradient[deepest]
        if post.needs_warmup and not pre.needs_warmup and ratio >= LARGER:
            agree.append((init, zh))
        parts_en.append(
            f"{init.capitalize()} initialization: post-norm's last gradient is ×{ratio:.2g} pre-norm's at {deepest} "
            f"layers; the largest stable learning rate is {shown(post)} for post-norm and {shown(pre)} for pre-norm"
        )
        parts_zh.append(
            f"{zh}初始化：{deepest} 层时 post-norm 末层梯度是 pre-norm 的 {ratio:.2g} 倍；最大稳定学习率（→ 预热后）"
            f"post-norm 为 {shown(post)}，pre-norm 为 {shown(pre)}"
        )
    none = found[Variant("none", "own")]
    kind: Kind = ("did not hold", "holds only where", "held")[len(agree)]
    where_en = (
        f"Only with the {agree[0][0]} initialization" if len(agree) == 1 else "With both" if agree else "With neither"
    )
    where_zh = (
        "两种初始化都成立" if len(agree) == 2 else f"仅{agree[0][1]}初始化下成立" if agree else "两种初始化下都不成立"
    )
    return Verdict(
        kind=kind,
        sentence_en=f"{where_en}. {'. '.join(parts_en)}. Without norms it is {shown(none)} (→: with warmup; "
        "medians and ranges over the seeds).",
        sentence_zh=f"{where_zh}。{'；'.join(parts_zh)}；无归一化时为 {shown(none)}（中位数与各种子的范围）。",
    )


def shown(found: Finding) -> str:
    """Without → with warmup: the medians, and the ranges over seeds if there are several."""
    each = []
    for rates in (found.without, found.with_warmup):
        low, high = f"{min(rates):.2g}", f"{max(rates):.2g}"
        each.append(f"{statistics.median(rates):.2g}" + ("" if low == high else f" [{low}–{high}]"))
    return " → ".join(each)


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Gradients of the last layer by depth and of each layer; the stable learning rates: medians and ranges."""
    deepest = numbers_in(where(rows, measured="gradient"), "depth_layers")[-1]
    last, each, rates = [], [], []
    for i, variant in enumerate(VARIANTS):
        own, style = of(rows, variant, "gradient"), "osD^vP"[i] + "-"
        ends = [r for r in own if r["layer"] == number(r, "depth_layers") - 1]
        last.append(Line.of(ends, "depth_layers", "gradient_norm", variant.label, style, i))
        deep = where(own, depth_layers=deepest)
        each.append(Line.of(deep, lambda r: number(r, "layer") + 1, "gradient_norm", variant.label, style, i))
    for at, (variant, found) in enumerate(findings(rows).items()):
        i = VARIANTS.index(variant)
        for lrs, offset, hollow in ((found.without, -0.12, True), (found.with_warmup, 0.12, False)):
            rates.append(Line([min(lrs), max(lrs)], [at + offset] * 2, "", "-", i))
            rates.append(Line([statistics.median(lrs)], [at + offset], "", "o", i, hollow=hollow))
    labels, hint = [variant.label for variant in RATED], "hollow: no warmup; filled: warmup"
    return [
        Panel(last, "Last layer, before training", "layers", "gradient norm", "log2", "log", legend="below"),
        Panel(each, f"Each of {deepest:g} layers", "layer", "gradient norm", yscale="log", legend="below"),
        Panel(rates, "Largest stable learning rate", hint, xscale="log", ynames=labels),
    ]


LAB = Claim(
    title_en="Pre-norm and post-norm",
    title_zh="Pre-norm 与 post-norm",
    claim_en="Post-norm needs learning-rate warmup and pre-norm does not, because post-norm's gradients near the "
    "output stay large at any depth.",
    claim_zh="Post-norm 必须预热学习率而 pre-norm 不必：post-norm 靠近输出层的梯度不随深度减小，始终很大。",
    regime=f"LayerNorm, D = {D}, vocabulary {VOCAB}, fp32, one batch of {CONTEXT} tokens of the standard library. Adam "
    "(0.9, 0.98), no clipping, no decay. Learning rates: 8 layers (quick: 2), 50 steps (4) after a warmup of 20 (1).",
    varies="Placement of the norm (post, pre, sandwich, none with scaled residuals); output projections "
    "at 1/√D (plain) or divided by √(2 · layers) as in GPT-2 (scaled); depth, 8 to 128; with and without warmup.",
    measures="Gradient norm of each layer before the first step; the largest learning rate (bisection from 1e-3 to 1) "
    f"with which the last five losses are below {LEARNED:.0%} of the entropy of the token frequencies. "
    f"Three seeds (quick: one). Warmup is needed if it raises the median at least ×{NEEDS:g} and "
    "the ranges over seeds do not overlap.",
    evidence="training",
    published_en="Pre-norm trains without warm-up on IWSLT14, WMT14 and BERT with results like those of post-norm with "
    "it (Xiong et al. 2020, arXiv:2002.04745).",
    published_zh="在 IWSLT14、WMT14 和 BERT 上，pre-norm 不预热也能训练，结果与预热的 post-norm 相当"
    "（Xiong 等，2020，arXiv:2002.04745）。",
)
