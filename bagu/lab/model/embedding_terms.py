"""Token plus position: the score (x_m + p_m)ᵀ W (x_n + p_n) has four terms. How much does each vary over the pairs?"""

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, column, names_in, where
from bagu.lab.plot import Bars, Panel
from bagu.nn.positions import sinusoids

USELESS = 0.05  # of the variance
TERMS = ("token–token", "token–position", "position–token", "position–position")


def run(setting: Setting) -> Iterator[Row]:
    length, width, seeds = (32, 32, 3) if setting.quick else (256, 256, 20)
    for kind in ("sinusoidal", "random"):
        for seed in setting.track(range(seeds)):
            draw = torch.Generator().manual_seed(seed)
            x, p = torch.randn(2, length, width, generator=draw, dtype=torch.float64).unbind()
            wq, wk = (torch.randn(2, width, width, generator=draw, dtype=torch.float64) / width**0.5).unbind()
            if kind == "sinusoidal":
                p = sinusoids(length, width).double()
                p *= x.std() / p.std()  # the same size as the tokens
            parts = [a @ wq @ wk.T @ b.T for a in (x, p) for b in (x, p)]
            total = torch.stack([part.var() for part in parts]).sum()
            for term, part in zip(TERMS, parts, strict=True):
                yield {"kind": kind, "term": term, "seed": seed, "share": float(part.var() / total)}


def shares(rows: Sequence[Row], kind: str) -> dict[str, float]:
    return {term: fmean(column(where(rows, kind=kind, term=term), "share")) for term in TERMS}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the mixed terms have less than USELESS of the variance."""
    found = {kind: shares(rows, kind) for kind in names_in(rows, "kind")}
    mixed = {kind: sum(each[term] for term in TERMS[1:3]) for kind, each in found.items()}
    return Verdict.say(
        "held" if max(mixed.values()) < USELESS else "did not hold",
        "There are four terms, and those between token and position have {mixed} of a score's variance with random "
        "projections and positions as large as tokens.",
        "共有四项；投影随机、位置与词同样大时，词与位置之间的两项占分数方差的 {mixed}。",
        mixed=", ".join(f"{share:.0%} ({kind})" for kind, share in mixed.items()),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    bars = [
        Bars([100 * s for s in shares(rows, kind).values()], kind, text="{:.0f}") for kind in names_in(rows, "kind")
    ]
    return [Panel(bars, "Variance of a score over the pairs of positions", y="%", xnames=list(TERMS))]


LAB = Claim(
    title_en="Terms of token plus position",
    title_zh="词加位置的各项",
    claim_en="Adding positions to tokens gives a score three terms, of which those between token and position "
    "are useless.",
    claim_zh="位置加到词向量上，分数展开成三项，其中词与位置的交叉项没有用。",
    regime="Random tokens, 256 positions of width 256 (quick: 32), random projections; positions scaled to the "
    "tokens' size. "
    "No training: what a model makes of the terms is not measured.",
    varies="Sinusoidal and random positions, 20 draws (quick: 3).",
    measures=f"Share of each term in the sum of their variances over all pairs. Useless: less than {USELESS:.0%}.",
)
