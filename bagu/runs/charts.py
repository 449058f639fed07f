"""Line charts as SVG text. A report must not need a plotting library or network access.

A chart is a string for an HTML page. It uses the colours of the page (classes `c0`…`c5` and `currentColor`), so it
follows light and dark mode. The readout under the pointer uses CSS only: bands over the plot, each with its own text.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bagu.runs.html import text

WIDTH, HEIGHT = 440.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 26.0, 30.0
FONT = 11.0  # with a width of 440 units, a 360 px phone shows it at 9 px
MAX_POINTS = 600  # more points than this have no effect on a screen
BANDS = 48

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A named curve; `points` ascend in x. A missing point is a gap in the data."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A horizontal line to compare with."""

    name: str
    y: float


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event at x."""

    name: str
    x: float


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One plot of lines over the same x.

    `zero` starts the y axis at zero, so that the height of a line is proportional to its value. `log` is ignored if a
    value is not above zero.
    """

    lines: Sequence[Line]
    unit: str  # of y; "" for a plain number
    x_name: str = "step"
    references: Sequence[Reference] = ()
    marks: Sequence[Mark] = ()
    zero: bool = False
    log: bool = False

    def svg(self) -> str:
        """The `<svg>` element."""
        lines = [Line(name=line.name, points=downsample(line.points, MAX_POINTS)) for line in self.lines if line.points]
        if not lines:
            raise ValueError("a chart needs at least one point")
        scale = _Scale.around(lines, self.references, zero=self.zero, log=self.log)
        label = text(", ".join(line.name for line in lines) + f" in {self.unit}" * bool(self.unit))
        return (
            f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}"'
            f' xmlns="http://www.w3.org/2000/svg" font-size="{FONT:g}">'
            + "".join(
                [
                    _axes(scale, self.x_name, self.unit),
                    _marks(scale, self.marks),
                    *(_dashes(scale, reference) for reference in self.references),
                    *(_curve(scale, line, number) for number, line in enumerate(lines)),
                    _names(scale, self.references, lines),
                    _legend(lines),
                    _bands(scale, lines, self.x_name, self.unit),
                ]
            )
            + "</svg>"
        )


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Maps data to plot coordinates. Values outside the axes are clamped to the border of the plot."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool

    @classmethod
    def around(cls, lines: Sequence[Line], references: Sequence[Reference], *, zero: bool, log: bool) -> _Scale:
        xs = [x for line in lines for x, _ in line.points]
        ys = [y for line in lines for _, y in line.points] + [r.y for r in references]
        log = log and min(ys) > 0
        low, high = (math.log10(min(ys)), math.log10(max(ys))) if log else (min(ys), max(ys))
        room = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        near = low < (high - low) * 0.15  # close enough to zero to start the axis there
        bottom = 0.0 if low >= 0 and (zero or near) and not log else low - room
        return cls(x0=min(xs), x1=max(xs) if max(xs) > min(xs) else min(xs) + 1, y0=bottom, y1=high + room, log=log)

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * _clamp((value - self.x0) / (self.x1 - self.x0))

    def y(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _clamp((value - self.y0) / (self.y1 - self.y0))

    def y_ticks(self) -> list[float]:
        if not self.log:
            return ticks(self.y0, self.y1, 5)
        decades = range(math.floor(self.y0), math.ceil(self.y1) + 1)
        every = max(1, len(decades) // 6)
        steps = (1, 2, 5) if len(decades) <= 3 else (1,)
        values = [m * 10.0**d for d in decades if d % every == 0 for m in steps]
        inside = [v for v in values if self.y0 <= math.log10(v) <= self.y1]
        return inside if len(inside) > 1 else [v for v in ticks(10**self.y0, 10**self.y1, 5) if v > 0]


def downsample(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` of the points, in order: the first, the last, and the minimum and maximum of every interval.

    A spike of one step stays visible; a mean would hide it.
    """
    if len(points) <= limit:
        return list(points)
    if limit < 4:
        raise ValueError(f"cannot downsample a line to {limit} points")
    inner, stretches = len(points) - 2, (limit - 2) // 2
    keep = {0, len(points) - 1}
    for s in range(stretches):
        part = range(1 + s * inner // stretches, 1 + (s + 1) * inner // stretches)
        keep |= {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(keep)]


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers (a step of 1, 2, 2.5 or 5 times a power of ten) from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def human(value: float) -> str:
    """Format a number in few characters: 0.0003 is 3e-4, 12500 is 12.5k."""
    size = abs(value)
    if size == 0:
        return "0"
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= bound:
            return f"{value / (1e3 if unit == 'k' else bound):.4g}{unit}"
    if size < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def _axes(scale: _Scale, x_name: str, unit: str) -> str:
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in scale.y_ticks():
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{LEFT:g} {y:.1f}H{right:g}"/>')
        parts.append(_label(LEFT - 6, y + FONT * 0.35, human(value), "tick", anchor="end"))
    for value in ticks(scale.x0, scale.x1, 6):
        x = scale.x(value)
        parts.append(f'<path class="axis" d="M{x:.1f} {floor:g}v4"/>')
        parts.append(_label(x, floor + 15, human(value), "tick", anchor="middle" if x < right - 12 else "end"))
    parts.append(f'<path class="axis" d="M{LEFT:g} {floor:g}H{right:g}"/>')
    parts.append(_label(right, HEIGHT - 3, x_name, "soft", anchor="end"))
    return "".join(parts) + (_label(2, 10, unit, "soft") if unit else "")


def _curve(scale: _Scale, line: Line, number: int) -> str:
    places = [(scale.x(x), scale.y(y)) for x, y in line.points]
    css = f"c{number % 6}"
    dots = "".join(f'<circle class="{css} dot" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in places)
    if len(places) > 40:
        dots = ""  # dots help only if there are few points
    return f'<path class="{css} line" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>' + dots


def _dashes(scale: _Scale, reference: Reference) -> str:
    return f'<path class="reference" d="M{LEFT:g} {scale.y(reference.y):.1f}H{WIDTH - RIGHT:g}"/>'


def _names(scale: _Scale, references: Sequence[Reference], lines: Sequence[Line]) -> str:
    """The names of the reference lines, at the side where the curves are farther from them, spaced so that they do not
    overlap."""
    ordered, places, free = sorted(references, key=lambda r: -r.y), list[float](), TOP + FONT
    for reference in ordered:
        places.append(max(scale.y(reference.y) - 3, free))
        free = places[-1] + FONT + 1
    free = HEIGHT - BOTTOM - 2
    for number in reversed(range(len(places))):  # those that were moved below the plot come back, and push the others
        places[number] = min(places[number], free)
        free = places[number] - FONT - 1
    middle, points = (scale.x0 + scale.x1) / 2, [point for line in lines for point in line.points]

    def distance(side: list[float]) -> float:
        return min((abs(scale.y(y) - scale.y(r.y)) for y in side for r in references), default=0.0)

    left = distance([y for x, y in points if x < middle]) > distance([y for x, y in points if x >= middle])
    x, anchor = (LEFT + 2, "start") if left else (WIDTH - RIGHT - 2, "end")
    return "".join(
        _label(x, at, f"{reference.name} {human(reference.y)}", "halo", anchor=anchor)
        for reference, at in zip(ordered, places, strict=True)
    )


def _marks(scale: _Scale, marks: Sequence[Mark]) -> str:
    """Dotted vertical lines with their names as titles; marks on the same pixel are merged."""
    places: dict[int, list[str]] = {}
    for mark in marks:
        places.setdefault(round(scale.x(mark.x)), []).append(mark.name)
    parts = []
    for x, names in places.items():
        more = f", and {len(names) - 3:,} more" if len(names) > 3 else ""
        parts.append(
            f'<g class="mark"><title>{text(", ".join(names[:3]) + more)}</title>'
            f'<path d="M{x} {TOP:g}V{HEIGHT - BOTTOM:g}"/><circle cx="{x}" cy="{TOP:g}" r="3"/></g>'
        )
    return "".join(parts)


def _legend(lines: Sequence[Line]) -> str:
    """Every line with its colour, to the right of the unit and then in a second row; a single line needs none, the
    title names it."""
    if len(lines) == 1:
        return ""
    widths = [_width(line.name) + 28 for line in lines]
    room = WIDTH - RIGHT - LEFT - 60
    first = sum(1 for total in itertools.accumulate(widths) if total <= room)
    parts = []
    for y, numbers in ((11.0, range(first)), (23.0, range(first, len(lines)))):
        left = WIDTH - RIGHT + 12 - sum(widths[n] for n in numbers)
        for n in numbers:
            parts.append(f'<path class="c{n % 6} line" d="M{left:.1f} {y - 4:g}h11"/>')
            parts.append(_label(left + 15, y, lines[n].name, ""))
            left += widths[n]
    return f'<g class="legend">{"".join(parts)}</g>'


def _bands(scale: _Scale, lines: Sequence[Line], x_name: str, unit: str) -> str:
    """The readout under the pointer: for every line, the point nearest to the middle of the band."""
    xs = sorted({x for line in lines for x, _ in line.points})
    count = min(BANDS, len(xs))
    chosen = [xs[(2 * i + 1) * len(xs) // (2 * count)] for i in range(count)]
    places = [scale.x(x) for x in chosen]
    borders = [LEFT, *((a + b) / 2 for a, b in itertools.pairwise(places)), WIDTH - RIGHT]
    parts = []
    for x, place, left, right in zip(chosen, places, borders[:-1], borders[1:], strict=True):
        values = [f"{line.name} {human(_nearest(line.points, x))}" for line in lines if _covers(line, x, scale)]
        words = f"{x_name} {x:,g}: {', '.join(values)} {unit}".rstrip()
        parts.append(
            f'<g class="band">{_label(WIDTH - RIGHT, 11, words, "tip", anchor="end")}'
            f'<rect x="{left:.1f}" y="{TOP:g}" width="{max(right - left, 0):.1f}" height="{HEIGHT - TOP - BOTTOM:g}"/>'
            f'<path d="M{place:.1f} {TOP:g}V{HEIGHT - BOTTOM:g}"/></g>'
        )
    return "".join(parts)


def _covers(line: Line, x: float, scale: _Scale) -> bool:
    """Whether the line has a point close to `x`."""
    return abs(_nearest_point(line.points, x)[0] - x) <= (scale.x1 - scale.x0) / 10


def _nearest(points: Sequence[Point], x: float) -> float:
    return _nearest_point(points, x)[1]


def _nearest_point(points: Sequence[Point], x: float) -> Point:
    at = bisect.bisect_left(points, (x, -math.inf))
    return min(points[max(at - 1, 0) : at + 1], key=lambda p: abs(p[0] - x))


def _label(x: float, y: float, words: str, css: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{text(words)}</text>'


def _width(words: str) -> float:
    """The approximate width of a text; full-width characters count as two Latin letters."""
    return sum(FONT if ord(c) > 0x2E7F else FONT * 0.56 for c in words)


def _clamp(share: float) -> float:
    return min(max(share, 0.0), 1.0)
