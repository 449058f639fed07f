"""Numbered stages of a longer job, such as the demo."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from bagu.machine.terminal import Terminal
from bagu.runs.progress import REFRESH_PER_S, TrainProgress, draws, duration


class Stages:
    """Numbered stages of a longer job. A running stage has a spinner; a finished one shows its time and result.

    with stages.stage("Tokenizer") as stage:
        stage.result = "4,096 tokens, 3.9 bytes a token"
    """

    def __init__(self, total: int, *, console: Console | None = None) -> None:
        self.total = total
        self.console = console or Terminal()
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
