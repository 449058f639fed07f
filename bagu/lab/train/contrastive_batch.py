"""Does a contrastive loss need a large batch? Its negatives are the other pictures of the batch.

The recipe `clip` on glyphs, with batches of 16, 64 and 256 and the same number of pictures in all: a small batch has
more steps. Each size has the better of two learning rates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from bagu import config as configs
from bagu.lab.core import Claim, Row, Setting, Verdict, column, number, where
from bagu.lab.parts.confidence import interval
from bagu.lab.parts.names import names_found, trained
from bagu.lab.plot import Line, Panel
from bagu.recipes.vision.run import VisionRun, clip, with_steps

BATCHES = (16, 64, 256)
RATES = (0.002, 0.005)
PICTURES, SEEDS = 25_600, 3


def recipe(rows: int, lr: float, seed: int, *, quick: bool) -> VisionRun:
    run = configs.override(clip(), [f"rows={rows // 4 if quick else rows}", f"train.optimizer.lr={lr}"])
    run = with_steps(run, 1 if quick else PICTURES // rows)
    return replace(run, train=replace(run.train, seed=seed, save_every=None))


def run(setting: Setting) -> Iterator[Row]:
    seeds, rates = range(2 if setting.quick else SEEDS), RATES[:1] if setting.quick else RATES
    for rows, lr, seed in setting.track(list(product(BATCHES, rates, seeds))):
        seeing = trained(recipe(rows, lr, seed, quick=setting.quick), setting.device)
        found = names_found(seeing, 20 if setting.quick else None)
        size = sum(p.numel() for p in seeing.model.parameters())
        yield {
            "batch": rows,
            "learning_rate": lr,
            "seed": seed,
            "found_share": found,
            "steps": seeing.run.train.steps,
            "parameters": size,
        }


def best(rows: Sequence[Row], batch: int) -> list[Row]:
    """The rows of a batch size at its better learning rate."""
    rates = {number(row, "learning_rate") for row in where(rows, batch=batch)}
    each = [where(rows, batch=batch, learning_rate=rate) for rate in sorted(rates)]
    return max(each, key=lambda part: sum(column(part, "found_share")))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Whether the largest batch finds more names than the smallest, by more than the interval over the seeds."""
    small, large = (column(best(rows, b), "found_share") for b in (BATCHES[0], BATCHES[-1]))
    mean, half = interval([b - a for a, b in zip(small, large, strict=True)])
    middle = column(best(rows, BATCHES[1]), "found_share")
    shares = ", ".join(f"{sum(part) / len(part):.3f}" for part in (small, middle, large))
    return Verdict.say(
        "held" if mean - half > 0 else "did not hold",
        "After {pictures:,} pictures, batches of 16, 64 and 256 find {shares} of the names: 256 against 16 "
        "{mean:+.3f} ± {half:.3f}.",
        "看过 {pictures:,} 张图后，批大小 16、64、256 找对 {shares} 的名称：256 比 16 {mean:+.3f} ± {half:.3f}。",
        pictures=PICTURES,
        shares=shares,
        mean=mean,
        half=half,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = []
    for rate in sorted({number(row, "learning_rate") for row in rows}):
        means: list[Row] = []
        for batch in BATCHES:
            part = column(where(rows, batch=batch, learning_rate=rate), "found_share")
            means.append({"batch": batch, "found_share": sum(part) / len(part)})
        lines.append(Line.of(means, "batch", "found_share", f"learning rate {rate:g}"))
    return [Panel(lines, "Names found after as many pictures", "pictures of a batch", "share", "log2")]


LAB = Claim(
    title_en="Batch size of a contrastive loss",
    title_zh="对比学习的批大小",
    claim_en="A contrastive loss needs large batches: with more negatives in each, the same pictures teach more.",
    claim_zh="对比损失需要大批次：每批负例更多，同样的图片学到更多。",
    regime=f"Two towers of 1.4 M parameters on glyphs of 32 × 32 pixels, {PICTURES:,} pictures in all, Muon at the "
    f"better of two learning rates, {SEEDS} seeds; pictures of a font that was never trained on. 1,434 names in all, "
    "so a batch of 256 has a sixth of them.",
    varies="Pictures of a batch: 16, 64, 256; the number of steps falls with it. Learning rate.",
    measures="The share of pictures whose name comes first among all names of the font. Met if the largest batch "
    "exceeds the smallest by more than the 95 % interval over the seeds.",
    evidence="training",
)
