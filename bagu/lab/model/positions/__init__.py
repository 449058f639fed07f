"""Positions: does a relative encoding work past the length it was trained at?

shift.py      RoPE's inner product if both positions are shifted, in several precisions
lengths.py    models of each encoding, trained at L tokens and evaluated at 4 L
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import fmean
from typing import Literal, get_args

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, names_in, number, where
from bagu.lab.model.positions import lengths, shift
from bagu.lab.model.positions.lengths import ABSOLUTE, AS_TRAINED, RELATIVE
from bagu.lab.parts.confidence import interval
from bagu.lab.plot import Band, Line, Mark, Note, Panel, Rule

OFF = 1.0  # percent of the loss: a model within this margin past L extrapolates
EXACT = 1e-3  # percent of |q||k|: a product that changes less than this depends on the distance only

Standing = Literal["extrapolates", "open", "breaks", "refuses"]


def run(setting: Setting) -> list[Row]:
    quick = setting.quick
    text = lengths.Text.read(every=16 if quick else 4, pieces=4 if quick else 64)
    shifts = (1, 2**10, 2**20) if quick else tuple(2**power for power in range(21))
    seeds, steps = ((1, 2), 2) if quick else ((1, 2, 3), 300)
    points: list[Callable[[], list[Row]]] = []
    points += [partial(shift.measure, name, shifts, setting.device) for name in shift.ARITHMETIC]
    for seed, encoding in product(seeds, lengths.TRAINED):
        points.append(partial(lengths.measure, encoding, seed, steps, text, setting.device))
    return [row for point in setting.track(points) for row in point()]


@dataclass(frozen=True, kw_only=True)
class Excess:
    """The increase of the loss past L, relative to the same tokens in windows of L; None: the model refuses."""

    percent: float | None
    half_width: float

    @property
    def standing(self) -> Standing:
        if self.percent is None:
            return "refuses"
        if self.percent + self.half_width <= OFF:
            return "extrapolates"
        return "breaks" if self.percent - self.half_width > OFF else "open"

    def __str__(self) -> str:
        return "" if self.percent is None else f"{self.percent:+.1f} ± {self.half_width:.1f} %"


def excess(rows: Sequence[Row], encoding: str, reading: str) -> Excess | None:
    """Over all positions past L, one number per seed; None if this encoding is not evaluated this way."""
    past = [
        r
        for r in rows
        if (r.get("encoding"), r.get("reading")) == (encoding, reading)
        and number(r, "position_from_tokens") >= number(r, "train_length_tokens")
    ]
    if not past:
        return None
    if any(r["loss_nats"] is None for r in past):
        return Excess(percent=None, half_width=0.0)
    by_seed = [[r for r in past if r["seed"] == seed] for seed in dict.fromkeys(r["seed"] for r in past)]
    percents = [
        100 * (fmean(number(r, "loss_nats") for r in own) / fmean(number(r, "short_loss_nats") for r in own) - 1)
        for own in by_seed
    ]
    mean, half = interval(percents)
    return Excess(percent=mean, half_width=half)


def excesses(rows: Sequence[Row], reading: str) -> dict[str, Excess]:
    names = dict.fromkeys(str(r["encoding"]) for r in rows if r["part"] == "length")
    found = {name: excess(rows, name, reading) for name in names}
    return {name: e for name, e in found.items() if e is not None}


def drift(rows: Sequence[Row], arithmetic: str) -> float:
    """The largest change of a product, in percent of |q||k|."""
    return max(number(r, "drift_max_percent") for r in rows if r.get("arithmetic") == arithmetic)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if RoPE's product depends on the distance only, every relative encoding extrapolates and no absolute one
    does. An encoding for which the seeds are not conclusive does not count as extrapolating."""
    trained = excesses(rows, AS_TRAINED)
    sorts = {str(r["encoding"]): r["sort"] for r in rows if r["part"] == "length"}
    reads_on = [name for name, e in trained.items() if e.standing == "extrapolates"]
    relative = [name for name in trained if sorts[name] == RELATIVE]
    unclear = [name for name in relative if trained[name].standing == "open"]
    good = [name for name in relative if name in reads_on]
    wrong = [name for name in reads_on if sorts[name] == ABSOLUTE]
    kind: Kind = "holds only where"
    if not good or not exact(rows):
        kind = "did not hold"
    elif good == relative and not wrong:
        kind = "held"
    found = Verdict(kind=kind, sentence_en=english(rows, trained), sentence_zh=chinese(rows, trained))
    if good or not unclear or not exact(rows):
        return found
    return found.undecided(
        f"more seeds, until the interval of {', '.join(unclear)} is on one side of {OFF:g} %.",
        f"更多种子，直到 {'、'.join(unclear)} 的区间落在 {OFF:g} % 的一侧。",
    )


def english(rows: Sequence[Row], trained: dict[str, Excess]) -> str:
    words = {
        "extrapolates": "Extrapolates",
        "open": "Inconclusive",
        "breaks": "Gets worse",
        "refuses": "Refuses longer inputs",
    }
    groups = {words[s]: listed(found) for s, found in by_standing(trained).items()}
    first = next(r for r in rows if r["part"] == "length")
    same = "the absolute position has no effect" if exact(rows) else "it depends on more than the distance"
    return (
        f"Trained at {first['train_length_tokens']} tokens for {first['steps']} steps and evaluated at "
        f"{lengths.LONGER} times that length, by the loss past the training length. "
        f"{' '.join(f'{word}: {names}.' for word, names in groups.items())} "
        f"RoPE's products change by at most {drift(rows, 'fp64 angles'):.1g} % of |q||k| if both positions are shifted "
        f"by up to {furthest(rows):,} ({drift(rows, 'fp32 angles'):.1g} % with angles in fp32, "
        f"{drift(rows, 'bf16 angles'):.2g} % in bf16): {same}. With a window of the training length: "
        f"{listed(excesses(rows, 'window'))}. With YaRN, without further training: {listed(excesses(rows, 'YaRN'))}."
    )


def chinese(rows: Sequence[Row], trained: dict[str, Excess]) -> str:
    words = {"extrapolates": "能外推", "open": "尚无定论", "breaks": "变差", "refuses": "拒绝更长的输入"}
    groups = {words[s]: listed(found) for s, found in by_standing(trained).items()}
    first = next(r for r in rows if r["part"] == "length")
    same = "绝对位置没有影响" if exact(rows) else "它并非只依赖距离"
    return (
        f"以 {first['train_length_tokens']} 个 token 训练 {first['steps']} 步，在 {lengths.LONGER} 倍长度上评测，"
        f"看训练长度之外的损失。{''.join(f'{word}：{names}。' for word, names in groups.items())}"
        f"两个位置同时平移至多 {furthest(rows):,} 时，RoPE 内积的变化不超过 |q||k| 的 "
        f"{drift(rows, 'fp64 angles'):.1g} %（角度用 fp32 时 {drift(rows, 'fp32 angles'):.1g} %，用 bf16 时 "
        f"{drift(rows, 'bf16 angles'):.2g} %）：{same}。加上训练长度的窗口：{listed(excesses(rows, 'window'))}。"
        f"用 YaRN（不再训练）：{listed(excesses(rows, 'YaRN'))}。"
    )


def by_standing(found: dict[str, Excess]) -> dict[Standing, dict[str, Excess]]:
    every = {s: {name: e for name, e in found.items() if e.standing == s} for s in get_args(Standing)}
    return {s: members for s, members in every.items() if members}


def listed(found: dict[str, Excess]) -> str:
    return ", ".join(f"{name} {e}".strip() for name, e in found.items())


def exact(rows: Sequence[Row]) -> bool:
    """Whether RoPE's products, with the model's tables, depend on the distance only."""
    return drift(rows, "fp64 angles") <= EXACT


def furthest(rows: Sequence[Row]) -> int:
    return int(max(number(r, "shift_tokens") for r in rows if r["part"] == "shift"))


def plot(rows: Sequence[Row]) -> list[Panel]:
    shifts = [
        Line.of(where(rows, arithmetic=name), "shift_tokens", "drift_max_percent", name, "-")
        for name in names_in(where(rows, part="shift"), "arithmetic")
    ]
    x, y = "shift of both positions, tokens", "change of <q, k>, % of |q||k|"
    return [
        Panel(shifts, "RoPE: effect of a shift", x, y, "log", "log"),
        plot_lengths(where(rows, part="length", reading=AS_TRAINED)),
        plot_readings(rows),
    ]


def plot_lengths(rows: Sequence[Row]) -> Panel:
    """The loss past the training length, relative to the same tokens in windows of that length; mean over seeds."""
    marks: list[Mark] = [Rule(1, axis="x")]
    span = number(rows[0], "train_length_tokens")
    for i, name in enumerate(names_in(rows, "encoding")):
        points: dict[float, list[float]] = {}
        for r in where(rows, encoding=name):
            if r["loss_nats"] is not None:
                at = (number(r, "position_from_tokens") + number(r, "position_to_tokens")) / 2 / span
                points.setdefault(at, []).append(100 * (number(r, "loss_nats") / number(r, "short_loss_nats") - 1))
        x, found = list(points), list(points.values())
        marks += [Line(x, [fmean(v) for v in found], name, "-", i), Band(x, [*map(min, found)], [*map(max, found)], i)]
        if where(rows, encoding=name, loss_nats=None):
            marks += [Line([1], [0], "", "X", i, size=8), Note(1, 0, "refuses", i, (4, -12))]
    y = "loss relative to windows of the training length, %"
    return Panel(marks, "Past the training length", "position, in training lengths", y, ylim=(-4, None), width=1.3)


def plot_readings(rows: Sequence[Row]) -> Panel:
    """The excess of each encoding past L, for each way to read it."""
    trained = excesses(rows, AS_TRAINED)
    names, marks = list(trained), list[Mark]([Rule(0, axis="x")])
    for i, (reading, style) in enumerate({AS_TRAINED: "o", "window": "s", "YaRN": "^"}.items()):
        found = {n: e for n, e in excesses(rows, reading).items() if e.percent is not None}
        ends = [((e.percent or 0) - e.half_width, (e.percent or 0) + e.half_width) for e in found.values()]
        y = [names.index(name) + 0.2 * (i - 1) for name in found]
        marks.append(Line([e.percent or 0 for e in found.values()], y, reading, style, i))
        marks += [Line(end, [at, at], "", "-", i) for end, at in zip(ends, y, strict=True)]
    marks += [Note(0, names.index(n), "refuses", shift=(0, -3)) for n, e in trained.items() if e.percent is None]
    return Panel(marks, "By reading", "loss past the training length, %", ynames=names)


LAB = Claim(
    title_en="Position encodings",
    title_zh="位置编码",
    claim_en="Relative encodings depend on distances only, so they extrapolate past the training length; absolute ones "
    "do not.",
    claim_zh="相对位置编码只依赖距离，因此能外推到训练长度之外；绝对位置编码不能。",
    regime=f"A model of 2 layers, width 64, on the bytes of the standard library, trained at {lengths.L} tokens and "
    f"evaluated at {lengths.LONGER * lengths.L}; held-out modules; 3 seeds. RoPE's products: heads of {shift.HEAD}.",
    varies="The encoding (learned, sinusoidal, RoPE, ALiBi, T5, none); evaluation: as trained, with a window of "
    "the training length, with YaRN. For RoPE's products the shift (to 1,048,576) and the precision of the angles.",
    measures="The loss of the same tokens with the same weights, with all of the text before them and with only the "
    "last half to full training length of it; the change of <R(m + s) q, R(n + s) k> with s.",
    evidence="training",
    published_en="A 1.3B model with ALiBi trained at 1,024 tokens has at 2,048 the perplexity of a sinusoidal one "
    "trained at 2,048 (Press et al. 2021, arXiv:2108.12409).",
    published_zh="1.3B 的 ALiBi 模型以 1,024 token 训练，在 2,048 时的困惑度与以 2,048 训练的正弦编码模型相同"
    "（Press 等，2021，arXiv:2108.12409）。",
)
