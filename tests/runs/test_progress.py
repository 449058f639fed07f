"""Progress output: fits the terminal, has units, and is plain text if there is no terminal."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from bagu.runs.progress import TrainProgress, duration
from bagu.runs.stages import Stages
from bagu.train.objectives.language_modelling import LanguageModelling

METRICS = {
    "loss_nats": 2.3456,
    "bits_per_byte": 1.5,
    "val_bits_per_byte": 1.75,
    "tokens_per_s": 123456.7,
    "mfu_percent": 41.23,
}
FORMATS = LanguageModelling().display().progress


def terminal(width: int, **options: object) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm"}, **options)  # type: ignore[arg-type]


def plain(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=width, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(progress: TrainProgress, console: Console) -> str:
    with console.capture() as capture:
        console.print(progress, end="")
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.integers(1, 200), st.integers(0, 400), st.sampled_from(["train", "预训练"]))
def test_the_line_fits_any_width(width: int, step: int, name: str) -> None:
    console = terminal(width)
    progress = TrainProgress(400, formats=FORMATS, name=name, console=console, live=False)
    progress.on_step(step, METRICS)
    shown = line(progress, console)
    assert "\n" not in shown.rstrip("\n")
    assert cell_len(shown.rstrip("\n")) <= width


def test_a_wide_line_has_every_metric_with_its_unit() -> None:
    clock = Clock()
    console = terminal(200)
    progress = TrainProgress(400, formats=FORMATS, console=console, live=False, clock=clock)
    clock.now = 2.0
    progress.on_step(0, METRICS)
    shown = line(progress, console)
    assert "train 1/400 steps" in shown
    for word in ("loss 2.346 nats", "1.500 bits/byte", "validation 1.750 bits/byte", "123,457 tokens/s", "MFU 41.2 %"):
        assert word in shown
    assert shown.rstrip().endswith("13 min 18 s left")


def test_the_least_important_part_is_dropped_first() -> None:
    progress = TrainProgress(400, formats=FORMATS, console=terminal(52), live=False)
    progress.on_step(0, METRICS)
    shown = line(progress, terminal(52))
    assert "1/400 steps" in shown
    assert "loss" in shown
    assert "left" in shown
    assert "MFU" not in shown


def test_time_left_uses_recent_steps_of_this_process() -> None:
    clock = Clock()
    progress = TrainProgress(1000, start=900, console=plain(), live=False, clock=clock)
    assert progress.seconds_left() is None
    for step in range(900, 980):
        clock.now += 2.0 if step >= 925 else 100.0
        progress.on_step(step, {})
    assert progress.seconds_left() == pytest.approx(40.0)
    progress.rewind(950)
    assert (progress.done, progress.seconds_left()) == (950, None)


def test_plain_lines_are_few_and_include_the_last_step() -> None:
    clock, console = Clock(), plain()
    progress = TrainProgress(1000, formats=FORMATS, console=console, clock=clock)
    for step in range(1000):
        clock.now += 0.001
        progress.on_step(step, METRICS)
    progress.close()
    lines = written(console).splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("train 100/1,000 steps, loss 2.346 nats, 1.500 bits/byte")
    assert lines[-1].endswith("in all")
    assert "\x1b" not in written(console)


def test_slow_steps_print_extra_lines_less_and_less_often() -> None:
    clock, console = Clock(), plain()
    progress = TrainProgress(100_000, console=console, clock=clock)
    for step in range(3600):  # one hour, less than a tenth of the steps
        clock.now += 1.0
        progress.on_step(step, {})
    assert 30 < len(written(console).splitlines()) < 250


def test_events_are_printed_except_routine_ones() -> None:
    console = plain()
    progress = TrainProgress(10, console=console)
    progress.on_event("save", 3, path="x")
    progress.on_event("skip", 4, reason="[loss] spike", z=9.12345)
    assert written(console) == "train step 4: skip (reason [loss] spike, z 9.123)\n"


def test_a_live_line_is_redrawn_and_stays_complete() -> None:
    console = terminal(100)
    progress = TrainProgress(2, console=console)
    progress.on_step(0, METRICS)
    progress.on_step(1, METRICS)
    progress.close()
    assert "2/2 steps" in written(console)
    assert written(console).count("\n") == 1


@pytest.mark.parametrize("console", [plain(), terminal(60)], ids=["plain", "terminal"])
def test_stages_are_numbered_timed_and_keep_their_result(console: Console) -> None:
    stages = Stages(2, console=console)
    with stages.stage("Tokenizer") as stage:
        stage.detail = "reading"
        stage.result = "4,096 tokens [of text]"
    with pytest.raises(RuntimeError), stages.stage("Pretrain") as stage:
        progress = stage.training(2)
        progress.on_step(0, METRICS)
        raise RuntimeError
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written(console))
    assert re.search(r"✓ 1/2 Tokenizer  \d+\.\d+ s  4,096 tokens \[of text\]", shown)
    assert re.search(r"✗ 2/2 Pretrain  \d+\.\d+ s  failed", shown)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0.40 s"), (12.34, "12.3 s"), (59.97, "1 min 00 s"), (245, "4 min 05 s"), (12000, "3 h 20 min")],
)
def test_durations_have_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words
