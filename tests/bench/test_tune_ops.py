"""The search of `bagu tune ops`, with simulated times: which candidates it measures, what it stores, its verdict."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bagu.bench import tune_compile, tune_ops
from bagu.bench.selection import MAX_ROUNDS, MIN_ROUNDS, select
from bagu.bench.tune_compile import Build, Compiler, Job
from bagu.bench.tune_steps import Key, Step, space, steps, targets
from bagu.bench.units import parse_seconds
from bagu.cli import main
from bagu.errors import ArgumentError, BaguError, ConformanceError, UnknownName
from bagu.machine.timing import Timing
from bagu.ops.catalogue import SPECS
from bagu.ops.tuning.store import Measurement, Store, Winner
from tests.ops.points import DEVICE


def noisy(times: dict[str, float], spread: float, seed: int) -> Any:
    draw = random.Random(seed)
    return lambda name: times[name] * draw.lognormvariate(0, spread)


def timing(seconds: float) -> Timing:
    return Timing(median_s=seconds, low_s=0.9 * seconds, high_s=1.1 * seconds, samples=5)


def timer(slow: float = 1e-5, **times: float) -> Callable[[Key], Timing]:
    """Constant times: `slow`, or the time of a candidate by its position in the space: p3=8e-6."""
    points = space(SPECS["transpose"], "forward")
    known = {points[int(name[1:])]: seconds for name, seconds in times.items()}
    return lambda key: timing(known.get(key, slow))


# --- the race ---------------------------------------------------------------------------------------------------------


def test_the_fastest_is_found_and_slow_candidates_are_dropped_early() -> None:
    times = {"default": 1.0, **{f"c{i}": 1.0 + 0.1 * i for i in range(1, 9)}, "best": 0.9}
    right, measured = 0, 0
    for seed in range(50):
        found = select("default", list(times)[1:], noisy(times, 0.02, seed))
        right += found.winner == "best"
        measured += sum(map(len, found.samples.values()))
        assert found.winner is None or found.speedup == pytest.approx(1 / 0.9, abs=0.05)
    assert right == 50
    assert measured / 50 < 0.3 * MAX_ROUNDS * len(times)


def test_equal_candidates_have_no_winner_and_the_race_ends_early() -> None:
    times = dict.fromkeys(("default", "a", "b", "c"), 1.0)
    found = [select("default", ["a", "b", "c"], noisy(times, 0.005, seed)) for seed in range(100)]
    assert sum(f.winner is not None for f in found) <= 8  # at 99 % confidence, and three comparisons with peeking
    assert sum(f.rounds for f in found) / 100 < MAX_ROUNDS / 2


def test_a_deadline_ends_the_search() -> None:
    now = iter(range(10_000))
    found = select("a", ["b"], lambda name: 1.0, deadline=0.0, clock=lambda: float(next(now)))
    assert found.rounds == MIN_ROUNDS and found.winner is None


def test_a_candidate_that_fails_is_not_measured_again_and_cannot_win() -> None:
    times = {"default": 1.0, "broken": math.inf, "good": 0.8}
    found = select("default", ["broken", "good"], times.__getitem__)
    assert found.samples["broken"] == [math.inf] and found.winner == "good"


def test_candidates_that_beat_the_default_are_in_order() -> None:
    times = {"default": 1.0, "a": 0.9, "b": 0.8, "c": 0.995, "d": 1.2}
    assert list(select("default", list("abcd"), noisy(times, 0.001, 0)).faster) == ["b", "a"]


# --- one search -------------------------------------------------------------------------------------------------------


@pytest.fixture
def step() -> Step:
    spec = SPECS["transpose"]
    case = next(c for c in spec.cases if not c.bench)
    return next(iter(steps(spec, case, torch.float32, DEVICE)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.jsonl")


def statuses(store: Store) -> dict[Key, str]:
    return {tuple(r.options.items()): r.status for r in store.records() if isinstance(r, Measurement)}


def test_a_search_stores_every_measurement_at_once_and_then_the_checked_winner(step: Step, store: Store) -> None:
    points, timed = space(step.spec, "forward"), []
    plain = timer(p3=0.8e-5)

    def spy(key: Key) -> Timing:
        assert len(store.records()) == len(timed), "the measurement before this one is not stored yet"
        timed.append(key)
        return plain(key)

    winner = tune_ops.tune(step, store, seconds=9, timer=spy)
    *kept, last = store.records()
    assert last == winner and isinstance(winner, Winner) and winner.verdict == "faster"
    assert winner.options == dict(points[3]) and winner.speedup == pytest.approx(1.25, rel=0.01)
    assert [tuple(r.options.items()) for r in kept] == timed and set(timed) == {(), *points}
    assert all(r.status == "ok" and r.low_s < r.median_s < r.high_s and r.samples == 5 for r in kept)  # type: ignore[union-attr,operator]
    assert last.dims and {"torch", "triton", "driver"} <= set(last.environment)


def test_equal_times_are_the_verdict_no_significant_winner(step: Step, store: Store) -> None:
    winner = tune_ops.tune(step, store, seconds=9, timer=timer())
    assert (winner.verdict, winner.options, winner.speedup) == ("no significant winner", {}, 1.0)


def test_wrong_results_are_refused_and_the_next_fastest_is_used(
    step: Step, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, points = step.spec.module("triton"), space(step.spec, "forward")
    right = module.forward

    def wrong(*args: Any, **more: Any) -> Any:
        bad = {k: more.get(k) for k in dict(points[0])} == dict(points[0])
        return tuple(y + bad for y in right(*args, **more))

    monkeypatch.setattr(module, "forward", wrong)
    winner = tune_ops.tune(step, store, seconds=9, timer=timer(p0=0.5e-5, p1=0.6e-5))
    assert winner.options == dict(points[1]) and winner.verdict == "faster"
    assert [k for k, status in statuses(store).items() if status == "wrong"] == [points[0]]


def test_a_winner_is_checked_on_fresh_inputs_with_poisoned_outputs(
    step: Step, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that leaves its last row as it finds it passes where the memory holds the result of an earlier call."""
    module, points, seen = step.spec.module("triton"), space(step.spec, "forward"), []
    right = module.forward

    def leaves_a_row(x: torch.Tensor, dim0: int, dim1: int, **options: Any) -> Any:
        seen.append(x)
        (y,) = right(x, dim0, dim1, **options)
        if not options:
            return (y,)
        made = torch.empty_like(y)
        made[:-1] = y[:-1]
        return (made,)

    monkeypatch.setattr(module, "forward", leaves_a_row)
    winner = tune_ops.tune(step, store, seconds=9, timer=timer(p0=0.5e-5))
    assert (winner.options, winner.verdict) == ({}, "wrong") and statuses(store)[points[0]] == "wrong"
    assert "nan" in next(r.reason for r in store.records() if isinstance(r, Measurement) and r.status == "wrong")
    assert not any(x.shape == step.args["x"].shape and torch.equal(x, step.args["x"]) for x in seen)


def test_a_fault_that_the_defaults_have_too_does_not_refuse_the_options(
    step: Step, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first inputs are beyond the tolerance for every set of options; the next ones decide."""
    module, points = step.spec.module("triton"), space(step.spec, "forward")
    right, first = module.forward, tune_ops.check

    def unlucky(spec: Any, case: Any, *args: Any, **more: Any) -> Any:
        if case.name.endswith("tuned 0"):
            raise ConformanceError("2.54 ulps off (allowed 2)")
        return first(spec, case, *args, **more)

    monkeypatch.setattr(tune_ops, "check", unlucky)
    assert tune_ops.wrong(step, points[0]) is None
    monkeypatch.setattr(module, "forward", lambda *args, **more: tuple(y + bool(more) for y in right(*args, **more)))
    assert "off" in str(tune_ops.wrong(step, points[0]))


def test_a_launch_that_fails_is_recorded_and_the_search_goes_on(step: Step, store: Store) -> None:
    points, plain = space(step.spec, "forward"), timer(p2=0.8e-5)

    def failing(key: Key) -> Timing:
        if key == points[1]:
            raise RuntimeError("CUDA out of memory\nmore")
        return plain(key)

    winner = tune_ops.tune(step, store, seconds=9, timer=failing)
    failed = [r for r in store.records() if isinstance(r, Measurement) and r.status == "failed"]
    assert [r.reason for r in failed] == ["CUDA out of memory"] and winner.options == dict(points[2])
    with pytest.raises(BaguError, match="fails with its default options"):
        tune_ops.tune(step, store, seconds=9, timer=lambda key: failing(points[1]))


# --- compilation beside the search ------------------------------------------------------------------------------------


def test_a_search_measures_all_that_compiles_in_the_order_of_the_space(step: Step, store: Store) -> None:
    points, timed = space(step.spec, "forward"), []
    builds = {(): Build(seconds=1.0), **dict.fromkeys(points, Build(seconds=0.25)), points[0]: Build(error="no")}

    def spy(key: Key) -> Timing:
        timed.append(key)
        return timing(1e-5)

    winner = tune_ops.tune(step, store, seconds=9, timer=spy, builds=builds.__getitem__)
    assert statuses(store)[points[0]] == "compile" and timed[: len(points) + 1] == [(), (), *points[1:]]
    assert (winner.searched, winner.space) == (len(points) - 1, len(points))
    first, again = (r.seconds for r in store.records()[1:3])  # the default: compilation counts once
    assert first >= 1.0 > again


def crash(job: Job) -> Build:
    if job.options:
        os._exit(1)
    return Build(seconds=1.0)


def test_a_crash_of_the_compiler_loses_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_compile, "START", "fork")  # so that the process has this test's `build`
    monkeypatch.setattr(tune_compile, "build", crash)
    (target,) = targets(["transpose"], ["weight"], (), torch.bfloat16)
    with Compiler(torch.bfloat16, "sm_90", workers=1) as compiler:
        result = compiler.begin(target, [(("rows", 1),), ()])
        assert result((("rows", 1),)).error == "the compiler crashed"
        assert result(()) == Build(seconds=1.0)


# --- a crash, shapes, budget, and the command -------------------------------------------------------------------------


def search_for_ever(step: Step, path: Path, done: int) -> None:
    def timed(key: Key) -> Timing:
        os.write(done, b".")
        return timing(1e-5)

    while True:
        tune_ops.tune(step, Store(path), seconds=9, timer=timed)


def test_a_killed_search_loses_at_most_one_measurement(store: Store) -> None:
    spec = SPECS["transpose"]
    step = next(iter(steps(spec, spec.cases[0], torch.float32, "cpu")))
    tune_ops.environment()  # before the fork: it may ask CUDA
    reader, writer = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=search_for_ever, args=(step, store.path, writer))
    process.start()
    os.close(writer)
    finished = b""
    while len(finished) < 60:
        finished += os.read(reader, 1)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    while more := os.read(reader, 1000):
        finished += more
    os.close(reader)
    records = [r for r in store.records() if isinstance(r, Measurement)]
    assert process.exitcode == -signal.SIGKILL and len(finished) - 1 <= len(records) <= len(finished)


def test_shapes_replace_the_sizes_of_the_first_case() -> None:
    found = targets(["rms_norm", "layer_norm"], (), ["M=64,N=512", "N=1024"], torch.bfloat16)
    sizes = [(t.spec.name, t.step, t.case["M"], t.case["N"]) for t in found]
    assert sizes == [
        (name, step, M, N)
        for name in ("layer_norm", "rms_norm")
        for M, N in ((64, 512), (16384, 1024))
        for step in ("forward", "backward")
    ]
    (stack,) = targets(["transpose"], (), ["shape=2x3x4"], torch.bfloat16)
    assert stack.case["shape"] == (2, 3, 4)


@pytest.mark.parametrize(
    ("names", "shapes", "words"),
    [
        (["rms_norm"], "M=4,Q=3", "no size of rms_norm.* 'Q'"),
        (["rms_norm"], "M=4x4", "rms_norm: size M is .4, 4.; expected a number"),
        (["rms_norm"], "M=-4", "--sizes has 'M=-4'; expected NAME=NUMBER"),
        (["rms_norm"], "", "--sizes is empty"),
        (["group_norm"], "groups=7", "group_norm: "),
        ([], "M=4", "--sizes was given without an op"),
        (["attention"], "H=4", "attention has no tuning space"),
        (["rms_nrom"], "M=4", "no op 'rms_nrom'"),
    ],
)
def test_bad_shapes_are_one_sentence(names: list[str], shapes: str, words: str) -> None:
    with pytest.raises((ArgumentError, UnknownName), match=words):
        targets(names, (), [shapes], torch.bfloat16)


def test_a_budget_is_written_with_its_unit() -> None:
    assert [parse_seconds(text) for text in ("300s", "5m", "300", "1h", " 0.5 m")] == [300, 300, 300, 3600, 30]
    for wrong in ("", "0s", "-5s", "5 minutes", "inf", "s"):
        with pytest.raises(ArgumentError, match="is not a length of time"):
            parse_seconds(wrong)


def test_the_command_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"--budget": "is not a length of time", "--sizes": "expected NAME=NUMBER", "--case": "benchmark case"}
    for option, words in commands.items():
        with pytest.raises(SystemExit):
            main(["tune", "ops", "softmax", option, "x"])
        assert words in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            main(["tune", "ops", "softmax", "--sizes", "M=64,N=512", "--budget", "5m"])
        assert "no CUDA device" in capsys.readouterr().err
