"""The progress of a training run in one line.

On a terminal the line is redrawn in place and always fits: the least important parts are dropped first. Elsewhere (a
file, a pipe, CI) plain lines are printed at every tenth of the work and every few seconds in between.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from bagu.machine.terminal import Terminal
from bagu.runs.observer import ROUTINE_EVENTS, Metrics, Observer
from bagu.runs.plain_progress import SECONDS_BETWEEN_LINES

REFRESH_PER_S = 8
SPEED = {"tokens_per_s": "{:,.0f} tokens/s", "mfu_percent": "MFU {:.1f} %"}
BARS = (32, 24, 16, 8)  # cells; few sizes, so that the bar does not change with every digit beside it


class TrainProgress(Observer):
    """The progress line of a training run of `steps` steps, `start` of which are already done.

    `formats` maps the metrics of its objective to texts ({"loss_nats": "loss {:.3f} nats"}); speed and MFU follow.
    Metrics that are not measured at every step (validation) stay on the line until the next value. With `live=False`
    the caller draws this object. Events of the kinds in `quiet` print no line.
    """

    def __init__(
        self,
        steps: int,
        *,
        start: int = 0,
        name: str = "train",
        formats: Mapping[str, str] | None = None,
        console: Console | None = None,
        live: bool = True,
        quiet: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps, self.done, self.name = steps, start, name
        self.console = console or Terminal(stderr=True)
        self.metrics: dict[str, float | int] = {}
        self._formats = {**(formats or {}), **SPEED}
        self._quiet = ROUTINE_EVENTS.union(quiet)
        self._clock = clock
        self._began = clock()
        self._recent: deque[tuple[float, int]] = deque([(self._began, start)], maxlen=50)  # for the rate
        self._last = (self._began, start)  # time and step of the last plain line
        self._plain = not draws(self.console)
        self._live = Live(self, console=self.console, refresh_per_second=REFRESH_PER_S) if live else None
        if self._live and not self._plain:
            self._live.start()

    def on_step(self, step: int, metrics: Metrics) -> None:
        self.done = step + 1
        self.metrics |= {name: value for name, value in metrics.items() if value is not None}
        self._recent.append((self._clock(), self.done))
        if self._plain and self._due():
            self._last = self._recent[-1]
            self.console.print(self.sentence(), soft_wrap=True, highlight=False, markup=False)

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        if kind not in self._quiet:
            details = ", ".join(f"{name} {_short(value)}" for name, value in facts.items())
            text = f"{self.name} step {step}: {kind.replace('_', ' ')}" + (f" ({details})" if details else "")
            self.console.print(Text(text, style="yellow"), soft_wrap=True)  # style= would also colour the live line

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        """Samples are not printed; the run folder has them."""

    def rewind(self, step: int) -> None:
        self.done = step
        self._recent.clear()
        self._recent.append((self._clock(), step))
        self._last = (self._clock(), step)

    def close(self) -> None:
        if self._live and not self._plain:
            self._live.stop()  # the last drawn line stays

    def seconds_left(self) -> float | None:
        """Estimated from the rate of the last steps; None until one is done."""
        (t0, s0), (t1, s1) = self._recent[0], self._recent[-1]
        return (t1 - t0) / (s1 - s0) * (self.steps - self.done) if s1 > s0 else None

    def sentence(self) -> str:
        """The line as plain text."""
        return ", ".join([f"{self.name} {self.done:,}/{self.steps:,} steps", *self._words(), self._time()])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        separator, full, empty = (" | ", "#", "-") if options.ascii_only else (" · ", "━", "─")
        words, ends = self._words(), self._time()
        shown = [f"{self.name} {self.done:,}/{self.steps:,} steps", *words[:1], ends, *words[1:]]
        width = options.max_width
        while len(shown) > 1 and cell_len(separator.join(shown)) > width:
            shown.pop()
        if ends in shown:
            shown.remove(ends)
            shown.append(ends)
        line = Text(no_wrap=True, overflow="crop", end="")
        room = width - cell_len(separator.join(shown)) - 2
        if cells := next((size for size in BARS if size <= room), 0):
            filled = round(cells * min(self.done / max(self.steps, 1), 1))
            line.append(full * filled, style="green").append(empty * (cells - filled), style="dim").append("  ")
        for number, part in enumerate(shown):
            line.append(separator if number else "", style="dim").append(part, style="" if number else "bold")
        line.truncate(width)
        yield line

    def _words(self) -> list[str]:
        """The metrics, the most important first, each with its unit."""
        return [text.format(self.metrics[name]) for name, text in self._formats.items() if name in self.metrics]

    def _time(self) -> str:
        left = self.seconds_left()
        if left is None:
            return f"{duration(self._clock() - self._began)} so far"
        if self.done >= self.steps:
            return f"{duration(self._clock() - self._began)} in all"
        return f"{duration(left)} left"

    def _due(self) -> bool:
        """At every tenth of the steps, and after a few seconds or 2 % of the time so far without a line, whichever is
        longer."""
        now, then = self._recent[-1], self._last
        quiet = max(SECONDS_BETWEEN_LINES, (now[0] - self._began) / 50)
        tenth = max(self.steps // 10, 1)
        return then[1] // tenth != now[1] // tenth or now[0] - then[0] >= quiet or self.done >= self.steps


def draws(console: Console) -> bool:
    """Whether a line can be redrawn in place."""
    return console.is_terminal and not console.is_dumb_terminal


def duration(seconds: float) -> str:
    """0.42 s, 12.3 s, 4 min 05 s, 3 h 20 min."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
