"""NumPy and lists: which of three differences makes the sum of n floats fast.

A full factorial design of three factors, each measured with and without the others (2 x 2 x 2 cells):

    loop      an interpreted `for`      or a loop in C
    type      boxed float objects       or native float64
    layout    scattered in memory       or contiguous

The change from the slowest cell to the fastest multiplies the speed by `total`. The three factors can be changed in six
orders. The contribution of a factor is the mean over the orders of the logarithm of its speedup (its Shapley value), so
the three contributions sum to log(total) and no order is preferred.
"""

import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import permutations
from math import exp, log
from typing import NamedTuple

import numpy as np

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, names_in, number, where
from bagu.lab.parts.interleaved import best_times
from bagu.lab.plot import Bars, Line, Mark, Note, Panel, Rule

FACTORS = ("loop", "type", "layout")
SLOW, FAST = ("Python", "boxed", "scattered"), ("C", "native", "in order")
LINE = 8  # float64 per cache line of 64 bytes: a view with this step uses one value of each line
ELEMENTS_PER_SAMPLE = 50_000  # shorter calls are repeated, so that a sample is long compared to the clock's 0.1 µs


class Variant(NamedTuple):
    """One implementation of the sum, and its cell in the design (None: for comparison only)."""

    name: str
    corner: tuple[str, str, str] | None
    call: Callable[[], object]


def loop(values: Iterable[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


def variants(n: int) -> list[Variant]:
    rng = np.random.default_rng(0)
    x, order = rng.standard_normal(n), rng.permutation(n)
    wide = np.zeros(n * LINE)
    wide[::LINE] = x
    boxed = x.tolist()
    shuffled = [boxed[i] for i in order]
    typed, x32, objects = array.array("d", boxed), x.astype(np.float32), np.array(boxed, dtype=object)
    ascending, taken = np.arange(n), np.empty(n)
    view, wide_view = x.data, wide[::LINE].data
    return [
        Variant("for over a list, shuffled", ("Python", "boxed", "scattered"), lambda: loop(shuffled)),
        Variant("for over a list, in order", ("Python", "boxed", "in order"), lambda: loop(boxed)),
        Variant("for over a memoryview, one per line", ("Python", "native", "scattered"), lambda: loop(wide_view)),
        Variant("for over a memoryview, contiguous", ("Python", "native", "in order"), lambda: loop(view)),
        Variant("sum(list), shuffled", ("C", "boxed", "scattered"), lambda: sum(shuffled)),
        Variant("sum(list), in order", ("C", "boxed", "in order"), lambda: sum(boxed)),
        Variant("np.sum(float64), one per line", ("C", "native", "scattered"), lambda: np.sum(wide[::LINE])),
        Variant("np.sum(float64), contiguous", ("C", "native", "in order"), lambda: np.sum(x)),
        Variant("for over an ndarray", None, lambda: loop(x)),
        Variant("for over an array.array", None, lambda: loop(typed)),
        Variant("sum(array.array)", None, lambda: sum(typed)),
        Variant("np.sum(object)", None, lambda: np.sum(objects)),
        Variant("np.sum(float32), contiguous", None, lambda: np.sum(x32)),
        Variant("np.take, in order", None, lambda: np.take(x, ascending, out=taken, mode="clip")),
        Variant("np.take, shuffled", None, lambda: np.take(x, order, out=taken, mode="clip")),
    ]


def run(setting: Setting) -> Iterator[Row]:
    sizes = (1_000, 100_000) if setting.quick else (1_000, 10_000, 100_000, 1_000_000, 4_000_000)
    for n in setting.track(sizes):
        all_variants, repeats = variants(n), max(1, ELEMENTS_PER_SAMPLE // n)
        samples = {variant.name: partial(repeat, variant.call, repeats) for variant in all_variants}
        times = best_times(samples, "cpu", seconds=0.01 if setting.quick else 0.06)
        for variant in all_variants:
            corner = dict(zip(FACTORS, variant.corner or (None, None, None), strict=True))
            time_ns = times[variant.name] / repeats / n * 1e9
            yield {"n_elements": n, "variant": variant.name, **corner, "time_ns_per_element": time_ns}


def repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def gains(rows: Sequence[Row], n: int) -> dict[str, float]:
    """The speedup of each factor at `n`, averaged over the orders; their product is the total speedup."""
    times = {
        tuple(row[factor] for factor in FACTORS): number(row, "time_ns_per_element")
        for row in rows
        if row["n_elements"] == n and row["loop"] is not None
    }
    logs, orders = [0.0] * len(FACTORS), list(permutations(range(len(FACTORS))))
    for order in orders:
        corner = list(SLOW)
        for factor in order:
            before = times[tuple(corner)]
            corner[factor] = FAST[factor]
            logs[factor] += log(before / times[tuple(corner)]) / len(orders)
    return {factor: exp(value) for factor, value in zip(FACTORS, logs, strict=True)}


def time_of(rows: Sequence[Row], n: int, variant: str) -> float:
    return next(number(r, "time_ns_per_element") for r in rows if (r["n_elements"], r["variant"]) == (n, variant))


def sizes_of(rows: Sequence[Row]) -> list[int]:
    return sorted({int(number(row, "n_elements")) for row in rows})


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if contiguity is the largest factor at every size; holds only where, if it is at some."""
    sizes = sizes_of(rows)
    by_size = {n: gains(rows, n) for n in sizes}
    wins = [n for n in sizes if max(FACTORS, key=by_size[n].__getitem__) == "layout"]
    kind: Kind
    if len(wins) == len(sizes):
        kind, head_en, head_zh = (
            "held",
            "Contiguity is the largest factor at every size",
            "各种规模下连续存放都是最大的因素",
        )
    elif not wins:
        kind, head_en, head_zh = (
            "did not hold",
            "Contiguity is the largest factor at no size",
            "任何规模下连续存放都不是最大的因素",
        )
    else:
        listed = ", ".join(f"{n:,}" for n in wins)
        kind, head_en = "holds only where", f"Contiguity is the largest factor only at {listed} elements"
        head_zh = f"只有在 {listed} 个元素时连续存放才是最大的因素"
    parts_en, parts_zh = [], []
    for n in dict.fromkeys((sizes[0], sizes[-1])):
        loop_, type_, layout = (by_size[n][factor] for factor in FACTORS)
        parts_en.append(
            f"at {n:,} the loop in C gives ×{loop_:.1f}, the native type ×{type_:.1f}, contiguity ×{layout:.1f}"
        )
        parts_zh.append(f"{n:,} 个元素时，C 循环 ×{loop_:.1f}，原生类型 ×{type_:.1f}，连续存放 ×{layout:.1f}")
    alone = time_of(rows, sizes[-1], "for over a list, in order") / time_of(rows, sizes[-1], "for over an array.array")
    return Verdict(
        kind=kind,
        sentence_en=f"{head_en}: {'; '.join(parts_en)}. "
        f"Contiguity alone (array.array with the same Python loop) has ×{alone:.2f} the speed of a list.",
        sentence_zh=f"{head_zh}：{'；'.join(parts_zh)}。"
        f"只有连续（array.array 加同样的 Python 循环）时，速度是列表的 ×{alone:.2f}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Left: the speedup of each factor, by n. Right: every variant at the largest n."""
    sizes, names = sizes_of(rows), ("loop in C", "native type", "contiguous")
    factors = [
        Bars([gains(rows, n)[factor] for n in sizes], name, bottom=1)
        for factor, name in zip(FACTORS, names, strict=True)
    ]
    last = sorted(where(rows, n_elements=sizes[-1]), key=lambda row: number(row, "time_ns_per_element"))
    dots: list[Mark] = []
    for y, row in enumerate(last):
        x, slow = number(row, "time_ns_per_element"), str(row["variant"]).startswith("for ")
        dots += [Line([x], [y], "", "o", 3 if slow else 0), Note(x, y, f"{x:.2g} ns", shift=(6, -3))]
    times, limits = "time per element, ns (orange: a Python loop)", (None, 3 * number(last[-1], "time_ns_per_element"))
    ticks, variants = [short(n) for n in sizes], names_in(last, "variant")
    return [
        Panel([*factors, Rule(1, style="-")], "Speedup, ×", "elements", yscale="log", xnames=ticks, legend="below"),
        Panel(dots, f"{sizes[-1]:,} elements", times, xscale="log", xlim=limits, ynames=variants, width=1.1),
    ]


def short(n: int) -> str:
    return f"{n // 1_000_000}M" if n >= 1_000_000 else f"{n // 1_000}k"


LAB = Claim(
    title_en="NumPy and lists",
    title_zh="NumPy 与列表",
    claim_en="NumPy is faster than lists because arrays are contiguous in memory.",
    claim_zh="NumPy 比列表快，是因为数组在内存中连续存放。",
    regime="The sum of n float64 on one core; data stay in the cache they fit in. Scattered means a shuffled list, "
    "or one value per cache line of 64 bytes.",
    varies="n from 1,000 to 4,000,000; loop (Python, C), type (boxed, native) and layout (scattered, in order) in all "
    "eight combinations; and seven other variants for comparison.",
    measures="Time per element, the best of three medians; the speedup of a factor is its mean over the six orders of "
    "the three changes.",
    evidence="timing",
)
