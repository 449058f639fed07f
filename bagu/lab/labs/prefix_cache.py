"""The prefix cache: what it costs where nothing is shared, and what it saves where much is.

Two engines on one model, one with a prefix cache and one without, are given the same prompts in turns; a part of each
prompt is common to all, the rest its own. A pair's ratio is what one engine took over what the other took a moment
earlier or later, so that what else the machine does falls on both, and the median of many pairs shows a percent where
the times themselves vary by twenty.

Where nothing is shared the cache still hashes each block of a prompt, looks it up, and keeps it: freed blocks are used
again last, not first, so that prompts walk through the whole pool, where without a cache they stay in the blocks that
the processor's caches hold.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bagu.lab.core import Kind, Lab, Row, Setting, Verdict, number
from bagu.lab.plot import INK, log_ticks
from bagu.nn import Transformer, init_weights
from bagu.nn.presets import preset
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = preset("cpu_8m")
PROMPT, REQUESTS = 512, 2  # tokens of a prompt, and prompts of a pair
BLOCK, BLOCKS = 16, 4096  # tokens of a block, and blocks: 1 GiB, which no processor's caches hold
SHARED = (0, 128, 256, 384, 496)  # tokens of a prompt that all have in common; never all of it: one must be computed
FREE = 1.01  # times as long, up to which the cache counts as free
GAIN = 1.5  # times the prompts where half of each is shared, from which sharing counts as saved; 2 is all of it
BOOTSTRAPS = 1000


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


def run(setting: Setting) -> list[Row]:
    model = init_weights(Transformer(MODEL, device=setting.device), 0).eval()
    rows: list[Row] = []
    for shared in setting.track(SHARED):
        pairs = 3 if setting.quick else 30 if shared else 250  # to see a percent takes more than to see a half
        rows += [
            {"shared_tokens": shared, **row} for row in measure(model, shared, pairs, 512 if setting.quick else BLOCKS)
        ]
    return rows


def measure(model: Transformer, shared: int, pairs: int, blocks: int) -> list[Row]:
    """The pairs of one number of shared tokens, after three that warm up and put what is shared into the cache."""
    stream = np.random.default_rng(shared)
    common = stream.integers(MODEL.vocab_size, size=shared).tolist()
    engines = {
        on: Engine(model, None, EngineConfig(
            num_blocks=blocks, block_size=BLOCK, max_num_seqs=REQUESTS, prefix_cache=on
        ))
        for on in (True, False)
    }  # fmt: skip
    rows: list[Row] = []
    for pair in range(-3, pairs):
        work, ms = prompts(common, stream), {}
        for on in (True, False) if pair % 2 else (False, True):
            ms[on] = 1e3 * prefill(engines[on], work, str(pair))
        if pair >= 0:
            rows.append({"pair": pair, "with_ms": ms[True], "without_ms": ms[False]})
    hits = engines[True].stats().prefix_hits
    assert hits >= shared * REQUESTS * pairs // BLOCK * BLOCK and (hits == 0) == (shared == 0), f"{hits} hits"
    return rows


def ratio(rows: Sequence[Row], shared: int) -> tuple[float, float, float]:
    """With the cache over without it: the median over pairs, and where 95 % of its bootstraps lie."""
    found = np.array(
        [number(row, "with_ms") / number(row, "without_ms") for row in rows if row["shared_tokens"] == shared]
    )
    draws = np.random.default_rng(0).choice(found, size=(BOOTSTRAPS, len(found)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return float(np.median(found)), float(low), float(high)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Both halves of the claim: the cost where nothing is shared, and the gain where half is."""
    middle, low, high = ratio(rows, 0)
    gains = {s: 1 / ratio(rows, s)[0] for s in SHARED[1:]}
    free, helps = middle <= FREE, gains[PROMPT // 2] >= GAIN
    kind: Kind = "held" if free and helps else "holds only where" if free or helps else "did not hold"
    listed = ", ".join(f"{100 * s // PROMPT} % ×{gain:.1f}" for s, gain in gains.items())
    return Verdict(
        kind=kind,
        sentence_en=f"Nothing shared: {100 * (middle - 1):+.1f} % (95 % between {100 * (low - 1):+.1f} and "
        f"{100 * (high - 1):+.1f}); shared part of a prompt, and prompts a second: {listed}.",
        sentence_zh=f"无共享：{100 * (middle - 1):+.1f} %（95 % 在 {100 * (low - 1):+.1f} 与 {100 * (high - 1):+.1f} "
        f"之间）；共享比例与提示吞吐：{listed}。",
    )


def plot(fig: Figure, rows: Sequence[Row]) -> None:
    """The pairs where nothing is shared, and the gain by what is."""
    left, right = fig.subplots(1, 2)
    found = [100 * (number(r, "with_ms") / number(r, "without_ms") - 1) for r in rows if r["shared_tokens"] == 0]
    middle, low, high = (100 * (v - 1) for v in ratio(rows, 0))
    left.plot(range(len(found)), found, ".", color="C0", markersize=3)
    left.axhspan(low, high, color="C1", alpha=0.35, linewidth=0)
    left.axhline(middle, color="C1", label=f"median {middle:+.1f} %, 95 % band")
    left.axhline(0, color=INK, linewidth=0.6)
    spread = float(np.percentile(np.abs(found), 90)) * 1.5
    left.set(
        xlabel="pair", ylabel="time with the cache over without, %", title="Nothing shared", ylim=(-spread, spread)
    )
    left.legend(loc="upper right")
    shares = [100 * s / PROMPT for s in SHARED]
    right.plot(shares, [1 / ratio(rows, s)[0] for s in SHARED], "o-", color="C0", label="measured")
    right.plot(shares, [PROMPT / (PROMPT - s) for s in SHARED], "--", color=INK, linewidth=1, label="1 / (1 - shared)")
    right.set(xlabel="shared part of a prompt, %", ylabel="prompts/s, times those without", yscale="log")
    right.set_title("Much shared")
    log_ticks(right.yaxis)
    right.legend(loc="upper left")


LAB = Lab(
    name="prefix_cache",
    title_en="Prefix cache",
    title_zh="前缀缓存",
    claim_en="A prefix cache costs nothing where nothing is shared, and saves what is shared.",
    claim_zh="没有共享时前缀缓存不花代价；有共享时省下共享的部分。",
    regime=f"The engine on a Llama of 8 layers and 256 features, prompts of {PROMPT} tokens, blocks of {BLOCK}; a pool "
    "of 1 GiB that the prompts fill and then use again.",
    varies="The tokens at the start of each prompt that all prompts share.",
    measures="Time to the first tokens of two prompts, with the cache over without it, in turns; median over pairs. "
    f"Met where it is at most {FREE:.2f} with nothing shared, and there are ×{GAIN} as many with half of each shared.",
    needs_gpu=False,
    run=run,
    verdict=verdict,
    plot=plot,
)
