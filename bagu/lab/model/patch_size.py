"""The patch of a ViT: smaller ones see more and cost more tokens. How much of each?

The recipe `clip` on glyphs of 32 × 32 pixels, with patches of 16, 8 and 4: 4, 16 and 64 tokens a picture. Every size
has the same number of steps, pictures and learning rate.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

from bagu import config as configs
from bagu.lab.core import Claim, Row, Setting, Verdict, column, listed, number, say, share_met, where
from bagu.lab.parts.confidence import interval
from bagu.lab.parts.names import names_found, trained
from bagu.lab.plot import Line, Panel
from bagu.recipes.vision.run import VisionRun, clip, with_steps

PATCHES = (16, 8, 4)
STEPS, ROWS, SEEDS = 200, 128, 3
SIDE = 32


def recipe(patch: int, seed: int, *, quick: bool) -> VisionRun:
    run = configs.override(clip(), [f"model.image.patch_size={patch}", f"rows={8 if quick else ROWS}"])
    run = with_steps(run, 1 if quick else STEPS)
    return replace(run, train=replace(run.train, seed=seed, save_every=None))


def run(setting: Setting) -> Iterator[Row]:
    seeds = range(2 if setting.quick else SEEDS)
    for patch, seed in setting.track(list(product(PATCHES, seeds))):
        began = time.process_time()
        seeing = trained(recipe(patch, seed, quick=setting.quick), setting.device)
        spent = time.process_time() - began
        found = names_found(seeing, 20 if setting.quick else None)
        size = sum(p.numel() for p in seeing.model.parameters())
        yield {
            "patch_pixels": patch,
            "seed": seed,
            "tokens": (SIDE // patch) ** 2,
            "cpu_s": spent,
            "found_share": found,
            "steps": seeing.run.train.steps,
            "parameters": size,
        }


def verdict(rows: Sequence[Row]) -> Verdict:
    """A part for every halving: the share grows by more than its interval over the seeds."""
    met, texts = [], []
    for large, small in pairwise(PATCHES):
        before, after = (where(rows, patch_pixels=p) for p in (large, small))
        gains = [number(b, "found_share") - number(a, "found_share") for a, b in zip(before, after, strict=True)]
        mean, half = interval(gains)
        cost = sum(column(after, "cpu_s")) / sum(column(before, "cpu_s"))
        met.append(mean - half > 0)
        en, zh = (
            "from {large} to {small} pixels {mean:+.3f} ± {half:.3f} at {cost:.1f} times the time",
            "{large} 到 {small} 像素 {mean:+.3f} ± {half:.3f}，时间 {cost:.1f} 倍",
        )
        texts.append(say(en, zh, large=large, small=small, mean=mean, half=half, cost=cost))
    return Verdict.say(
        share_met(met), "Share of names found: {parts}.", "找对名称的比例：{parts}。", parts=listed(texts, "; ", "；")
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    names = ("tokens", "found_share", "cpu_s")
    means: list[Row] = []
    for patch in PATCHES:
        part = where(rows, patch_pixels=patch)
        means.append({name: sum(column(part, name)) / len(part) for name in names})
    x = "tokens of a picture"
    return [
        Panel([Line.of(means, "tokens", "found_share")], "Names found", x, "share", "log2"),
        Panel([Line.of(means, "tokens", "cpu_s")], "CPU time", x, "s", "log2", "log2"),
    ]


LAB = Claim(
    title_en="Patch size of a ViT",
    title_zh="ViT 的 patch 大小",
    claim_en="Smaller patches see more: every halving of the patch finds more names, at four times the tokens.",
    claim_zh="patch 越小看得越清：patch 每减半，找对的名称更多，token 数变为四倍。",
    regime=f"Two towers of 1.4 M parameters on glyphs of 32 × 32 pixels, Muon at one learning rate, {STEPS} steps of "
    f"{ROWS} pictures, {SEEDS} seeds; pictures of a font that was never trained on.",
    varies="The side of a patch: 16, 8, 4 pixels.",
    measures="The share of pictures whose name comes first among all names of the font; CPU time of the training. Met "
    "for a halving if the gain exceeds its 95 % interval over the seeds.",
    evidence="training",
)
