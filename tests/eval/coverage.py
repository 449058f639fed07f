"""How often the 95 % intervals cover the truth, by simulation.

>>> python tests/eval/coverage.py 1000    # the table of docs/journal/007
"""

from __future__ import annotations

import sys

import numpy as np

from bagu.eval.intervals import compare, estimate, estimate_ratio

SIZES = ("1", "5", "20", "unequal", "one of half")  # items of a cluster
CLUSTERS = (3, 4, 5, 8, 10, 15, 20, 30, 50)
RATES = (0.1, 0.3, 0.5, 0.7, 0.9)
CORRELATIONS = (0.0, 0.1, 0.3)  # of two items of a cluster


def sizes(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    """Unequal: lognormal, where the largest of 20 has about a quarter of the items."""
    if kind == "unequal":
        return np.maximum(1, np.rint(rng.lognormal(1.6, 1.0, n))).astype(int)
    if kind == "one of half":
        return np.array([4 * (n - 1)] + [4] * (n - 1))
    return np.full(n, int(kind))


def rates(rng: np.random.Generator, rate: float, correlation: float, n: int) -> np.ndarray:
    """The rates of n clusters."""
    if correlation == 0:
        return np.full(n, rate)
    k = 1 / correlation - 1
    return rng.beta(rate * k, (1 - rate) * k, n)


def score_coverage(runs: int, n: int, kind: str, rate: float, correlation: float) -> float:
    rng, hits = np.random.default_rng([n, SIZES.index(kind), int(100 * rate), int(100 * correlation)]), 0
    for _ in range(runs):
        names = np.repeat(np.arange(n), sizes(rng, kind, n))
        found = estimate((rng.random(len(names)) < rates(rng, rate, correlation, n)[names]).tolist(), names.tolist())
        hits += found.low <= rate <= found.high
    return hits / runs


def difference_coverage(runs: int, n: int, kind: str, change: float, correlation: float) -> float:
    """b answers another 10 % of the items right than a, and `change` more."""
    rng, hits = np.random.default_rng([n, SIZES.index(kind), int(100 * change), int(100 * correlation)]), 0
    for _ in range(runs):
        names = np.repeat(np.arange(n), sizes(rng, kind, n))
        gain, loss = (rates(rng, r, correlation, n)[names] for r in (0.1 + change, 0.1))
        drawn = rng.random(len(names))
        lost, gained = drawn < loss * (1 - gain), drawn > 1 - gain
        found = compare(lost.tolist(), gained.tolist(), names.tolist())
        truth = 0.1 + change - 0.1 * (1 - 0.1 - change)
        hits += found.low <= truth <= found.high
    return hits / runs


def ratio_coverage(runs: int, n: int, documents: int, spread: float) -> float:
    """Bits per byte of n clusters of documents. Their bytes are lognormal with this spread, long ones are easier, and
    clusters and documents differ by 0.3 bits each."""
    rng, hits = np.random.default_rng([n, documents, int(10 * spread)]), 0
    truth = 1.5 - 0.1 * spread**2  # the mean logarithm of the bytes, weighted by bytes, is spread^2 above the plain one
    for _ in range(runs):
        names, size = np.repeat(np.arange(n), documents), rng.normal(7, spread, n * documents)
        rate = 1.5 - 0.1 * (size - 7) + 0.3 * rng.normal(size=n)[names] + 0.3 * rng.normal(size=len(names))
        found = estimate_ratio((rate * np.exp(size)).tolist(), np.exp(size).tolist(), names.tolist())
        hits += found.low <= truth <= found.high
    return hits / runs


def main(runs: int) -> None:
    print("| clusters | items of each | scores: lowest | mean | differences: lowest | mean |\n|" + "---|" * 6)
    for n in CLUSTERS:
        for kind in SIZES:
            of = [c for c in CORRELATIONS if c == 0 or kind != "1"]
            scores = [score_coverage(runs, n, kind, p, c) for p in RATES for c in of]
            changes = [difference_coverage(runs // 5, n, kind, d, c) for d in (0.0, 0.1, 0.3) for c in of]
            cells = (f"{f(x):.3f}" for x in (scores, changes) for f in (min, np.mean))
            print(f"| {n} | {kind} | {' | '.join(cells)} |", flush=True)
    print("\n| clusters | bits per byte: lowest | mean |\n|---|---|---|")
    for n in CLUSTERS:
        ratios = [ratio_coverage(runs, n, d, s) for d in (1, 4, 20) for s in (0.3, 1.0, 1.5)]
        print(f"| {n} | {min(ratios):.3f} | {np.mean(ratios):.3f} |", flush=True)
    alone = score_coverage(runs, 64, "1", 0.95, 0.0)
    print(f"\n64 items at 95 % right: {alone:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
