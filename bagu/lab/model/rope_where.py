"""Where to rotate: how much of an attention score depends on the distance m − n alone.

    q and k      <R(m) W_q x, R(n) W_k y>               RoPE as it is used
    embedding    <W_q R(m) x, W_k R(n) y>               the embedding rotated before the projections
    sinusoids    <P(m), P(n)>                           the encodings alone
    projected    <W_q P(m), W_k P(n)>                   the encodings after the projections

For one pair (x, y) the scores of all positions m, n are a matrix. The share of its variance that the means along the
diagonals explain is 1 if a score depends on the distance alone.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch

from bagu import ops
from bagu.lab.core import Claim, Row, Setting, Verdict, column, listed, names_in, share_met, where
from bagu.lab.plot import Bars, Panel
from bagu.nn.config import Rope
from bagu.nn.positions import rope_speeds

WAYS = ("q and k", "embedding", "sinusoids", "projected sinusoids")
RELATIVE = 0.999  # of the variance


def explained(scores: torch.Tensor) -> float:
    """The share of the variance of scores[L, L] that the means of its diagonals explain."""
    L = scores.shape[0]
    distance = (torch.arange(L)[:, None] - torch.arange(L)[None, :]).add(L - 1).flatten()
    counts = torch.bincount(distance).double()
    means = torch.bincount(distance, weights=scores.flatten()) / counts
    return float((counts * (means - scores.mean()).square()).sum() / (scores - scores.mean()).square().sum())


def run(setting: Setting) -> Iterator[Row]:
    L, width, seeds = (32, 32, 3) if setting.quick else (256, 128, 20)
    speeds, _ = rope_speeds(Rope(), width)
    angles = torch.arange(L, dtype=torch.float64).outer(speeds.double())
    cos, sin = angles.cos().float(), angles.sin().float()
    encoding = torch.cat([sin, cos], 1).double()
    for seed in setting.track(range(seeds)):
        draw = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, width, generator=draw).unbind()
        wq, wk = (torch.randn(2, width, width, generator=draw, dtype=torch.float64) / width**0.5).unbind()

        def turned(v: torch.Tensor) -> torch.Tensor:
            return ops.rope(v.float().expand(L, 1, -1).contiguous(), cos, sin)[:, 0].double()

        pairs = {
            "q and k": (turned(wq @ x.double()), turned(wk @ y.double())),
            "embedding": (turned(x) @ wq.T, turned(y) @ wk.T),
            "sinusoids": (encoding, encoding),
            "projected sinusoids": (encoding @ wq.T, encoding @ wk.T),
        }
        for way, (q, k) in pairs.items():
            yield {"way": way, "seed": seed, "width": width, "positions": L, "explained_share": explained(q @ k.T)}


def shares(rows: Sequence[Row]) -> dict[str, float]:
    return {way: fmean(column(where(rows, way=way), "explained_share")) for way in names_in(rows, "way")}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if every way gives scores that depend on the distance alone."""
    found = shares(rows)
    return Verdict.say(
        share_met(share >= RELATIVE for share in found.values()),
        "Share of a score's variance over the positions that the distance explains: {each}.",
        "分数随位置变化的方差中，由距离解释的比例：{each}。",
        each=listed(f"{way} {share:.1%}" for way, share in found.items()),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    found = shares(rows)
    bars = Bars([100 * share for share in found.values()], colour="each", text="{:.0f}")
    return [Panel([bars], "Variance explained by m − n", y="%", ylim=(0, 108), xnames=list(found))]


LAB = Claim(
    title_en="Where to rotate",
    title_zh="旋转加在哪里",
    claim_en="RoPE rotates the token embedding, and sinusoids contain the relative position: both make attention "
    "depend on the distance.",
    claim_zh="RoPE 旋转的是词向量，正弦编码也含有相对位置：两者都使注意力只依赖距离。",
    regime="Random tokens and projections of width 128, 256 positions (quick: 32 of each), one head of the full width.",
    varies="What is rotated or encoded: q and k, the embedding before the projections, sinusoids with and without "
    "projections.",
    measures=f"Share of the variance of the scores over all pairs of positions that the distance explains, mean over "
    f"20 draws. Relative: {RELATIVE:.1%} or more.",
)
