"""Autotuning: how far the defaults are from the best, what a search gains, and how well a cost model ranks.

On a GPU the search is `bagu tune ops`: five kernels, every point of their tuning spaces. On a CPU there are no such
kernels; the same selection (bench/selection.py) chooses the tile of a fused norm that runs torch calls tile by tile.

The cost model of the CPU, made before any measurement: calls x overhead + bytes / bandwidth, both measured before on
other calls. The bytes are those of the fused norm, and those of the intermediates of a tile that does not fit in the L2
cache: all of them if it exceeds the last-level cache too, else a third.

On a GPU there is no model. `bagu tune ops` had one (bytes over the bandwidth that the bytes in flight allow, in whole
waves of programs, from the registers and shared memory of the compiled kernels); what it was worth is in GPU_MODEL.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import NamedTuple

import torch

from bagu.bench import tune_ops
from bagu.bench.selection import select
from bagu.bench.tune_compile import Compiler
from bagu.bench.tune_searches import searches
from bagu.bench.tune_steps import Target, space, steps
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, number
from bagu.lab.gpu import fusion
from bagu.lab.parts.confidence import Interval, interval, of_ratio, rank_correlation
from bagu.lab.plot import Line, Mark, Panel, Rule
from bagu.machine.device import this_machine
from bagu.machine.timing import flush_buffer, measure, measure_host
from bagu.ops.catalogue import spec
from bagu.ops.tuning.store import Store

KERNELS = (  # op, benchmark case, step
    ("softmax", "rows_4k", "forward"),
    ("softmax", "rows_8k", "backward"),
    ("rms_norm", "llama_8b", "backward"),
    ("cross_entropy", "llama_32k", "forward"),
    ("transpose", "weight", "forward"),
)
DEFAULT = "default"
SEARCH_S = 8.0  # of one kernel
NORMS = ((256, 256), (1024, 1024), (4096, 1024), (1024, 4096), (16384, 256))  # rows, columns of the CPU's norm
TILES = tuple(1 << i for i in range(10, 22))  # elements
L2, LAST = 1 << 20, 32 << 20  # bytes: typical of a server core, and of a last-level cache of unknown size
NEARER = 1 / 3  # the time of a byte from the last-level cache, over one from memory
CALLS = 7  # of torch per tile
# 198 searches on an H200 (bagu/ops/tuning/shipped.jsonl): the gain of the search, the model's rank correlation, and how
# often the fastest point was in the model's first quarter, which a random order reaches in a quarter of the searches
GPU_MODEL = {"searches": 198, "gain": 1.012, "correlation": 0.38, "first_quarter": 0.27}
FAR, RANKS = 1.1, 0.5  # "far": the best is this times as fast; "ranks well": a rank correlation of this or more


def run(setting: Setting) -> list[Row]:
    rows: list[Row] = []
    if setting.device == "cpu":
        rates = cpu_rates()
        for M, N in setting.track(NORMS[:2] if setting.quick else NORMS):
            rows += norm_rows(M, N, rates, quick=setting.quick)
        return rows
    scrub, arch = flush_buffer(setting.device), tune_ops.arch_of(torch.device(setting.device))
    for op, case, step in setting.track(KERNELS[:2] if setting.quick else KERNELS):
        rows += kernel_rows(op, case, step, scrub, arch)
    return rows


def norm_rows(M: int, N: int, rates: Rates, *, quick: bool) -> list[Row]:
    """The tiles of one norm, by the tuner's selection. The default is that of the lab `fusion`."""
    b = fusion.Buffers.make(M, N, device="cpu", dtype=torch.float32)
    default = min(fusion.TILE_ELEMENTS, M * N)
    others = [size for size in TILES[:: 4 if quick else 1] if N <= size <= M * N and size != default]
    points = {size: partial(fusion.tiled, list(fusion.tiles(b, size))) for size in (default, *others)}

    def timed(size: int) -> float:
        """The 20th percentile of a few calls: other load on the machine only makes a call slower."""
        return measure(points[size], "cpu", warmup=1, min_samples=5, seconds=0.005, flush_l2=False).low_s

    began = time.monotonic()
    found = select(default, others, timed, deadline=began + (0 if quick else SEARCH_S))
    seconds = time.monotonic() - began
    return [
        {
            "kernel": f"norm {M} × {N}",
            "point": DEFAULT if size == default else f"{size:,} elements",
            "time_us": 1e6 * median(samples),
            "predicted_us": 1e6 * tile_model(M, N, size, rates),
            "samples": len(samples),
            "found_speedup": found.speedup,
            "search_s": seconds,
        }
        for size, samples in found.samples.items()
    ]


class Rates(NamedTuple):
    """Seconds of a torch call on few numbers, and bytes/s of a copy."""

    call_s: float
    bandwidth: float


def cpu_rates() -> Rates:
    few, many = torch.zeros(2, 64), torch.zeros(2, 8 << 20)
    call_s = measure_host(lambda: torch.add(few[0], few[1], out=few[1]), torch.device("cpu"))
    copy = measure(lambda: many[1].copy_(many[0]), "cpu", min_samples=3, seconds=0.05, flush_l2=False)
    return Rates(call_s, many.nbytes / copy.median_s)


def tile_model(M: int, N: int, elements: int, rates: Rates) -> float:
    rows, last = min(max(1, elements // N), M), this_machine().cache_bytes or LAST
    fused = spec("add_rms_norm").cost({"M": M, "N": N}, 4).bytes
    more = 4 * M * N * sum(reads + writes for reads, writes in fusion.STEPS.values()) - fused
    tile = 6 * 4 * rows * N  # x, residual, s, y and the two intermediates
    slowed = 0.0 if tile <= L2 else NEARER if tile <= last else 1.0
    return math.ceil(M / rows) * CALLS * rates.call_s + (fused + slowed * more) / rates.bandwidth


def kernel_rows(op: str, case_name: str, step_name: str, scrub: torch.Tensor, arch: str) -> list[Row]:
    """Every point of a kernel's space, by `bagu tune ops`, in a store of its own."""
    op_spec = spec(op)
    case = next(c for c in op_spec.cases if c.name == case_name)
    step = next(s for s in steps(op_spec, case, torch.bfloat16, "cuda") if s.step == step_name)
    points = [(), *space(op_spec, step_name)]
    with tempfile.TemporaryDirectory() as folder, Compiler(torch.bfloat16, arch) as compiler:
        store = Store(Path(folder) / "tuning.jsonl")
        builds = compiler.begin(Target(spec=op_spec, case=case, step=step_name), points)
        timer = tune_ops.gpu_timer(scrub)(step)
        tune_ops.tune(step, store, seconds=SEARCH_S, timer=timer, builds=builds)
        (search,) = searches(store.records())
    return [
        {
            "kernel": f"{op} {step_name}",
            "point": ", ".join(f"{k}={v}" for k, v in point.options) or DEFAULT,
            "time_us": 1e6 * point.median_s,
            "predicted_us": None,
            "samples": point.samples,
            "found_speedup": search.winner.speedup,
            "search_s": search.winner.seconds,
        }
        for point in search.timed
    ]


def kernels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row["kernel"]), []).append(row)
    return found


def best_us(points: Sequence[Row]) -> float:
    return min(number(r, "time_us") for r in points)


def default_us(points: Sequence[Row]) -> float:
    return next(number(r, "time_us") for r in points if r["point"] == DEFAULT)


def expected_best(times: Sequence[float], count: int) -> float:
    """The expected minimum of `count` of the times, drawn without order."""
    ordered, n = sorted(times), len(times)
    return sum(t * math.comb(n - i - 1, count - 1) for i, t in enumerate(ordered)) / math.comb(n, count)


def ranked_best(points: Sequence[Row], count: int) -> float:
    """The minimum of the `count` points that the model predicts to be fastest."""
    return best_us(sorted(points, key=lambda r: number(r, "predicted_us"))[:count])


def curve(rows: Sequence[Row], share: float, *, by_model: bool) -> float:
    """The mean time over the best, after a share of the points was measured: by the model, or in random order."""
    ratios = []
    for points in kernels(rows).values():
        count, times = max(1, round(share * len(points))), [number(r, "time_us") for r in points]
        ratios.append((ranked_best(points, count) if by_model else expected_best(times, count)) / best_us(points))
    return geometric_mean(ratios)


def gap(rows: Sequence[Row]) -> Interval:
    """The default's time over the best point's, over the kernels."""
    found = kernels(rows).values()
    return of_ratio([default_us(points) for points in found], [best_us(points) for points in found])


def correlations(rows: Sequence[Row]) -> dict[str, float]:
    """By kernel: the rank correlation of predicted and measured times."""
    return {
        name: rank_correlation([number(r, "predicted_us") for r in points], [number(r, "time_us") for r in points]).mean
        for name, points in kernels(rows).items()
    }


def has_model(rows: Sequence[Row]) -> bool:
    return all(r["predicted_us"] is not None for r in rows)


def ranking(rows: Sequence[Row]) -> tuple[bool, str, str]:
    """Whether a cost model ranks well, and the figures in English and 中文; where there is none, those of GPU_MODEL."""
    g = GPU_MODEL
    en = (
        f"The cost model that `bagu tune ops` once had: over {g['searches']} searches on an H200 (gain ×{g['gain']}) "
        f"its rank correlation was {g['correlation']}, and the fastest was in its first quarter in "
        f"{g['first_quarter']:.0%}, which is chance."
    )
    zh = (
        f"`bagu tune ops` 曾有的代价模型：在 H200 的 {g['searches']} 次搜索中（收益 ×{g['gain']}）秩相关为 "
        f"{g['correlation']}，最快点落在其前四分之一的只有 {g['first_quarter']:.0%}，与随机无异。"
    )
    if not has_model(rows):
        return g["correlation"] >= RANKS, en, zh
    rho, half = interval(list(correlations(rows).values()))
    low, high = max(rho - half, -1.0), min(rho + half, 1.0)
    random, by_model = (curve(rows, 0.25, by_model=m) - 1 for m in (False, True))
    en = (
        f"The model's rank correlation is {rho:.2f} ({low:.2f}–{high:.2f}); after a quarter of the points, the best is "
        f"{random:.1%} off in random order and {by_model:.1%} in the model's. {en}"
    )
    zh = (
        f"模型的秩相关为 {rho:.2f}（{low:.2f}–{high:.2f}）；测完四分之一的点后，随机顺序离最优 {random:.1%}，"
        f"按模型顺序 {by_model:.1%}。{zh}"
    )
    return low >= RANKS, en, zh


def verdict(rows: Sequence[Row]) -> Verdict:
    """Two parts, each by the lower end of its interval over the kernels: defaults are far off, and the model ranks."""
    off, (ranks, model_en, model_zh) = gap(rows), ranking(rows)
    far = off.low >= FAR
    kind: Kind = "held" if far and ranks else "holds only where" if far or ranks else "did not hold"
    each = ", ".join(f"{name} ×{default_us(points) / best_us(points):.2f}" for name, points in kernels(rows).items())
    first = {name: points[0] for name, points in kernels(rows).items()}
    found = ", ".join(f"{name} ×{number(r, 'found_speedup'):.2f}" for name, r in first.items())
    spent = sum(number(r, "search_s") for r in first.values())
    return Verdict(
        kind=kind,
        sentence_en=f"The best point is faster than the default by {each}: ×{off.mean:.2f} ({off.low:.2f}–"
        f"{off.high:.2f}). The search ({spent:.0f} s) is sure of {found}. {model_en}",
        sentence_zh=f"最优点比默认快：{each}，平均 ×{off.mean:.2f}（{off.low:.2f}–{off.high:.2f}）。"
        f"搜索（{spent:.0f} 秒）能确定的加速：{found}。{model_zh}",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Left: every point, by the model's time, or by its number where there is no model. Right: what a search gains."""
    marks: list[Mark] = []
    lines: list[Mark] = []
    model = has_model(rows)
    for i, (name, points) in enumerate(kernels(rows).items()):
        guesses = column(points, "predicted_us") if model else [1.0 + at for at in range(len(points))]
        x, y = [g / min(guesses) for g in guesses], [t / best_us(points) for t in column(points, "time_us")]
        start = [r["point"] for r in points].index(DEFAULT)
        marks += [Line(x, y, name, "o", i), Line([x[start]], [y[start]], "", "o", i, size=10, hollow=True)]
    shares = [i / 20 for i in range(1, 21)]
    for words, by_model in (("random order", False), *([("order of the model", True)] if model else [])):
        slower = [100 * (curve(rows, share, by_model=by_model) - 1) for share in shares]
        lines.append(Line([100 * s for s in shares], slower, words, "-"))
    lines.append(Rule(100 * (gap(rows).mean - 1), "default"))
    title, predicted = "Every point; the defaults are circled", "predicted time, times the least" if model else "point"
    return [
        Panel(marks, title, predicted, "time, times the best", "log", "log"),
        Panel(lines, "What a search gains", "points measured, %", "slower than the best, %", ylim=(0, None)),
    ]


LAB = Claim(
    title_en="Autotuning",
    title_zh="自动调优",
    claim_en="Default tile sizes are far from the best, and a cost model ranks the candidates well enough to skip most "
    "of the measurements.",
    claim_zh="默认的分块离最优很远；而代价模型对候选的排序足够好，大部分测量都可以省去。",
    regime="On a GPU the tuning spaces of four ops in bf16, searched by `bagu tune ops` with its check against fp64; "
    "on a CPU the tile of a fused add and norm in fp32, by the same selection.",
    varies="The kernel or the size; every point of its space (tile, warps, programs per multiprocessor).",
    measures="Median time of each point, interleaved, in 5 to 40 rounds; the speedup that the search is sure of "
    "(99 %); on a CPU the rank correlation of predicted and measured times. Intervals are over kernels or sizes. "
    f"Far: ×{FAR} or more. Ranks well: {RANKS} or more.",
    evidence="timing",
)
