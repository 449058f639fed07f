"""The prefix cache: its cost if nothing is shared, and its savings if much is.

Two engines on one model, one with a prefix cache and one without, alternate on the same prompts. A part of each prompt
is common to all, the rest is unique. The ratio of a pair is the time of one engine over the time of the other right
before or after it, so that other load on the machine affects both. The median over many pairs resolves one percent,
although the times themselves vary by twenty.

If nothing is shared the cache still hashes each block of a prompt, looks it up, and keeps it. Freed blocks are reused
last, not first, so prompts go through the full pool; without a cache they stay in a few blocks, which fit in the
processor's caches.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, numbers_in, where
from bagu.lab.plot import INK, Line, Panel, Rule
from bagu.nn import Transformer, init_weights, preset
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling

MODEL = preset("cpu_8m")
PROMPT, REQUESTS = 512, 2  # tokens of a prompt, and prompts of a pair
BLOCK, BLOCKS = 16, 4096  # tokens per block, and blocks: 1 GiB, more than any processor cache
SHARED = (0, 128, 256, 384, 496)  # leading tokens that all prompts share; not all, because one must be computed
FREE = 1.01  # the cache counts as free up to this ratio of times
GAIN = 1.5  # required speedup if half of each prompt is shared; the maximum is 2
BOOTSTRAPS = 1000
PAIRS = 250  # with nothing shared: resolving one percent needs many


def prompts(shared: Sequence[int], stream: np.random.Generator) -> list[tuple[int, ...]]:
    return [(*shared, *stream.integers(MODEL.vocab_size, size=PROMPT - len(shared)).tolist()) for _ in range(REQUESTS)]


def prefill(engine: Engine, work: Sequence[tuple[int, ...]], name: str) -> float:
    """Seconds until each prompt has its first token."""
    began = time.perf_counter()
    for i, prompt in enumerate(work):
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.submit(Request(id=f"{name}-{i}", prompt=prompt, sampling=sampling, arrival=0.0))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


def run(setting: Setting) -> Iterator[Row]:
    config = replace(MODEL, num_layers=2) if setting.quick else MODEL
    model = init_weights(Transformer(config, device=setting.device), 0).eval()
    for shared in setting.track(SHARED[::2] if setting.quick else SHARED):
        pairs = 2 if setting.quick else 30 if shared else PAIRS
        warmup, blocks = (1, 512) if setting.quick else (3, BLOCKS)
        found = measure(model, shared, pairs, warmup=warmup, blocks=blocks)
        yield from [{"shared_tokens": shared, **row} for row in found]


def measure(model: Transformer, shared: int, pairs: int, *, warmup: int, blocks: int) -> list[Row]:
    """The pairs of one number of shared tokens, after `warmup` others, which also fill the cache."""
    stream = np.random.default_rng(shared)
    common = stream.integers(MODEL.vocab_size, size=shared).tolist()
    engines = {
        on: Engine(
            model, None, EngineConfig(num_blocks=blocks, block_size=BLOCK, max_num_seqs=REQUESTS, prefix_cache=on)
        )
        for on in (True, False)
    }
    rows: list[Row] = []
    for pair in range(-warmup, pairs):
        work, ms = prompts(common, stream), {}
        for on in (True, False) if pair % 2 else (False, True):
            ms[on] = 1e3 * prefill(engines[on], work, str(pair))
        if pair >= 0:
            rows.append({"pair": pair, "with_ms": ms[True], "without_ms": ms[False]})
    hits = engines[True].stats().prefix_hits
    assert hits >= shared * REQUESTS * pairs // BLOCK * BLOCK and (hits == 0) == (shared == 0), f"{hits} hits"
    return rows


def ratio(rows: Sequence[Row], shared: int) -> tuple[float, float, float]:
    """Time with the cache over time without: the median over pairs, and its 95 % bootstrap interval."""
    found = np.array(
        [number(row, "with_ms") / number(row, "without_ms") for row in rows if row["shared_tokens"] == shared]
    )
    draws = np.random.default_rng(0).choice(found, size=(BOOTSTRAPS, len(found)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return float(np.median(found)), float(low), float(high)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Both parts of the claim: the cost if nothing is shared, and the gain if half is."""
    middle, low, high = ratio(rows, 0)
    gains = {int(s): 1 / ratio(rows, int(s))[0] for s in numbers_in(rows, "shared_tokens") if s > 0}
    free, helps = middle <= FREE, gains[PROMPT // 2] >= GAIN
    kind: Kind = "held" if free and helps else "holds only where" if free or helps else "did not hold"
    listed = ", ".join(f"{100 * s // PROMPT} % ×{gain:.1f}" for s, gain in gains.items())
    found = Verdict(
        kind=kind,
        sentence_en=f"Nothing shared: {100 * (middle - 1):+.1f} % (95 % interval {100 * (low - 1):+.1f} to "
        f"{100 * (high - 1):+.1f}); prompts per second by shared fraction: {listed}.",
        sentence_zh=f"无共享：{100 * (middle - 1):+.1f} %（95 % 在 {100 * (low - 1):+.1f} 与 {100 * (high - 1):+.1f} "
        f"之间）；共享比例与提示吞吐：{listed}。",
    )
    if low <= FREE < high and len(where(rows, shared_tokens=0)) < PAIRS:  # too few to tell one percent
        return found.undecided(
            f"{PAIRS} pairs with nothing shared (a full run).", f"无共享时测 {PAIRS} 对（完整运行）。"
        )
    return found


def plot(rows: Sequence[Row]) -> list[Panel]:
    """The pairs without sharing, and the gain by the shared fraction."""
    found = [100 * (number(r, "with_ms") / number(r, "without_ms") - 1) for r in where(rows, shared_tokens=0)]
    middle, low, high = (100 * (v - 1) for v in ratio(rows, 0))
    spread, shared = float(np.percentile(np.abs(found), 90)) * 1.5, [int(s) for s in numbers_in(rows, "shared_tokens")]
    pairs = [
        Line(range(len(found)), found, "", ".", 0, size=3),
        Rule(low, upto=high, colour=1),
        Rule(0, style="-"),
        Rule(middle, f"median {middle:+.1f} %, 95 % band", style="-", colour=1),
    ]
    x = [100 * s / PROMPT for s in shared]
    gains = [
        Line(x, [1 / ratio(rows, s)[0] for s in shared], "measured"),
        Line(x, [PROMPT / (PROMPT - s) for s in shared], "1 / (1 - shared)", "--", INK),
    ]
    unit, y = "shared part of a prompt, %", "prompts/s, relative to no cache"
    return [
        Panel(pairs, "Nothing shared", "pair", "time with over without the cache, %", ylim=(-spread, spread)),
        Panel(gains, "Much shared", unit, y, yscale="log"),
    ]


LAB = Claim(
    title_en="Prefix cache",
    title_zh="前缀缓存",
    claim_en="A prefix cache costs nothing if nothing is shared, and saves the shared part.",
    claim_zh="没有共享时前缀缓存不花代价；有共享时省下共享的部分。",
    regime=f"The engine on a Llama of 8 layers and 256 features, prompts of {PROMPT} tokens, blocks of {BLOCK}; a pool "
    "of 1 GiB that the prompts fill and then reuse.",
    varies="The number of leading tokens that all prompts share.",
    measures="Time to the first tokens of two prompts, with over without the cache, alternating; median over pairs. "
    f"Met if it is at most {FREE:.2f} with nothing shared, and prompts/s at least ×{GAIN} with half of each shared.",
    evidence="timing",
)
