"""Progress of long work: one line for training, numbered stages for a demo.

On a terminal the line is redrawn in place and always fits: the least important parts are dropped first. Elsewhere (a
file, a pipe, CI) plain lines are printed at every tenth of the work and every few seconds in between.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from bagu.runs.observer import ROUTINE_EVENTS, Metrics, Observer

__all__ = ["PlainLines", "Stage", "Stages", "TrainProgress", "draws", "duration", "plain_progress"]

SECONDS_BETWEEN_LINES = 5.0  # at least, where there is no terminal
T = TypeVar("T")

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
        self.console = console or Console(stderr=True)
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


class Stages:
    """Numbered stages of a longer job. A running stage has a spinner; a finished one shows its time and result.

    with stages.stage("Tokenizer") as stage:
        stage.result = "4,096 tokens, 3.9 bytes a token"
    """

    def __init__(self, total: int, *, console: Console | None = None) -> None:
        self.total = total
        self.console = console or Console()
        self.number = 0

    @contextlib.contextmanager
    def stage(self, title: str) -> Iterator[Stage]:
        """Run one stage. If its body raises, the stage is marked as failed and the error propagates."""
        self.number += 1
        stage = Stage(f"{self.number}/{self.total} {title}", self.console)
        live = Live(stage, console=self.console, refresh_per_second=REFRESH_PER_S, transient=True)
        plain = not draws(self.console)
        if plain:
            self.console.print(f"{stage.title} ...", highlight=False, markup=False)
        done = False
        try:
            with contextlib.nullcontext() if plain else live:
                yield stage
            done = True
        finally:
            self.console.print(stage.summary(done, ascii_only=self.console.options.ascii_only))


class Stage:
    """A running stage: `detail` is shown beside the spinner, `result` when it has finished."""

    def __init__(self, title: str, console: Console) -> None:
        self.title, self.console = title, console
        self.detail = self.result = ""
        self.progress: TrainProgress | None = None
        self.began = time.monotonic()
        self._spinner: Spinner | None = None

    def training(
        self,
        steps: int,
        *,
        start: int = 0,
        name: str = "train",
        formats: Mapping[str, str] | None = None,
        quiet: Collection[str] = (),
    ) -> TrainProgress:
        """An observer whose line is drawn below the line of the stage."""
        self.progress = TrainProgress(
            steps, start=start, name=name, formats=formats, console=self.console, live=False, quiet=quiet
        )
        return self.progress

    def summary(self, done: bool, *, ascii_only: bool = False) -> Text:
        """The line that remains when the stage has finished."""
        mark = ("ok" if done else "failed") if ascii_only else ("✓" if done else "✗")
        text = Text.assemble((mark, "green" if done else "red"), " ", (self.title, "bold"))
        text.append(f"  {duration(time.monotonic() - self.began)}", style="dim")
        return text.append(f"  {self.result}" if done and self.result else "" if done else "  failed")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._spinner is None:
            self._spinner = Spinner("line" if options.ascii_only else "dots", style="cyan")
        words = Text(no_wrap=True, overflow="ellipsis")
        words.append(self.title, style="bold").append(f"  {duration(time.monotonic() - self.began)}", style="dim")
        words.append(f"  {self.detail}" if self.detail else "")
        words.truncate(max(options.max_width - 2, 1), overflow="ellipsis")
        self._spinner.update(text=words)
        yield Group(self._spinner, self.progress) if self.progress else self._spinner


class PlainLines:
    """A line of progress every few seconds: for output that is not a terminal. Called with (done, total)."""

    def __init__(
        self, unit: str, console: Console, *, prefix: str = "", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.unit, self.console, self.prefix = unit, console, prefix
        self._clock = clock
        self._began: tuple[float, int] | None = None  # time and number done at the first call
        self._last = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._began is None:
            self._began, self._last = (now, done), now
        start, already = self._began
        if now - self._last < SECONDS_BETWEEN_LINES or done == already:
            return
        self._last, took = now, now - start
        left = took / (done - already) * (total - done)
        line = f"{self.prefix}{done} of {total} {self.unit} in {took:.0f} s, about {left:.0f} s left"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def plain_progress(items: Sequence[T], unit: str, console: Console, *, prefix: str = "") -> Iterator[T]:
    """The items, with `PlainLines` of progress."""
    line = PlainLines(unit, console, prefix=prefix)
    for index, item in enumerate(items):
        line(index, len(items))
        yield item


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
