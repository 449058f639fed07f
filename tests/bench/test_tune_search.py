"""The search of `bagu tune serve` on a simulated server: how near the best of the grid it comes, and in what time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bagu.bench.tune.fit import Fit, Measured, fit
from bagu.bench.tune.roofline import Roofline
from bagu.bench.tune.search import Found, Recorded, Trial, search
from bagu.bench.tune.simulate import Samples, Schedule, StepTime, samples_of, schedule, simulate
from bagu.bench.tune.space import Point, default_space, parse_space, points_of
from bagu.errors import BaguError
from bagu.runs.record import append_rows, read_rows

# The space of the bar: 36 points.
SPACE = {
    "max_num_seqs": (4, 8, 16),
    "max_num_batched_tokens": (64, 256, 2048),
    "threads": (1, 2),
    "quantization": (None, "int8"),
}
SMALL = {**SPACE, "max_num_seqs": (4, 16), "max_num_batched_tokens": (256,)}
REQUESTS, SHORT, CLIENTS, START_S = 96, 32, 16, 4.0
# What a data sheet says. The simulated machine differs: see `truth`.
PREDICTION = Roofline(
    parameters=8_000_000, kv_bytes=16_384, itemsize=4, bandwidth=12e9, rate=60e9, threads=2, overhead_s=1e-3
)


def jobs(count: int, seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randint(32, 256), draw.randint(16, 64)) for _ in range(count)]


def run(point: Point, step_s: StepTime, requests: int, seed: int) -> Samples:
    one = dict(point)
    return simulate(
        jobs(requests, seed), step_s, slots=int(one["max_num_seqs"] or 0),
        step_tokens=int(one["max_num_batched_tokens"] or 0), clients=CLIENTS,
    )  # fmt: skip


def predict(point: Point, requests: int) -> Samples:
    return run(point, PREDICTION.step_time(point), requests, 0)


@cache
def schedules(point: Point, requests: int) -> tuple[Schedule, ...]:
    """In a closed loop they do not depend on the times of the steps."""
    one, times = dict(point), PREDICTION.step_time(point)
    slots, tokens = int(one["max_num_seqs"] or 0), int(one["max_num_batched_tokens"] or 0)
    return tuple(
        schedule(jobs(requests, seed), times, slots=slots, step_tokens=tokens, clients=CLIENTS)[0]
        for seed in (0, 1000, 2000)
    )


def plan(point: Point, requests: int, step_s: StepTime) -> tuple[Schedule, ...]:
    return schedules(point, requests)


def truth(machine: int) -> Callable[[Point], StepTime]:
    """The step time of one simulated machine: a roofline with other ceilings and a larger overhead, and effects that
    the prediction does not have: two threads or int8 may be slower, and large steps miss the cache."""
    draw = random.Random(machine)
    other = Roofline(
        parameters=8_000_000, kv_bytes=16_384, itemsize=4, bandwidth=12e9 * draw.uniform(0.4, 1.5),
        rate=60e9 * draw.uniform(0.3, 1.5), threads=2, overhead_s=1e-3 * draw.uniform(1, 8),
    )  # fmt: skip
    second, int8, cache = draw.uniform(0.75, 2.2), draw.uniform(0.7, 2.2), draw.uniform(1.0, 1.3)

    def step_time(point: Point) -> StepTime:
        one, exact = dict(point), other.step_time(point)
        factor = (second if one["threads"] == 2 else 1.0) * (int8 if one["quantization"] else 1.0)

        def seconds(decodes: int, prompt: int, context: int) -> float:
            return factor * (cache if prompt > 512 else 1.0) * exact(decodes, prompt, context)

        return seconds

    return step_time


class Machine:
    """Measures like a real one: starting takes time, every step has noise, and the machine's speed drifts."""

    def __init__(self, machine: int, noise: float = 0.03) -> None:
        self.truth, self.rng, self.noise = truth(machine), np.random.default_rng(machine), noise
        self.trials: list[Trial] = []

    def __call__(self, point: Point, requests: int) -> Trial:
        exact, drift = self.truth(point), float(np.exp(self.noise * self.rng.standard_normal()))
        factors = iter(drift * np.exp(0.2 * self.rng.standard_normal(1 << 16)))
        samples = run(point, lambda *step: next(factors) * exact(*step), requests, len(self.trials) + 1)
        trial = Trial(
            point=point, requests=requests, samples=samples, seconds=START_S + samples.duration_s, start_s=START_S
        )
        self.trials.append(trial)
        return trial

    def grid(self, limits: dict[str, float]) -> tuple[dict[Point, float], float]:
        """The exact goodput of every point, on requests that no search saw, and the time of measuring the grid."""
        exact = {p: run(p, self.truth(p), 2 * REQUESTS, 99) for p in points_of(SPACE)}
        seconds = sum(START_S + s.duration_s / 2 for s in exact.values())
        return {p: s.goodput(limits) for p, s in exact.items()}, seconds


def searched(machine: int, limits: dict[str, float]) -> tuple[float, float, Found]:
    """The goodput of the winner over the best of the grid, the time over the grid's, and the search."""
    points, measure = points_of(SPACE), Machine(machine)
    first = max(points, key=lambda p: predict(p, REQUESTS).goodput(limits))
    found = search(points, PREDICTION, plan, measure, limits, first=first, requests=REQUESTS, short=SHORT)
    values, grid_s = measure.grid(limits)
    return values[found.best] / max(values.values()), found.seconds / grid_s, found


def limits_of(machine: int) -> dict[str, float]:
    """Limits that some points meet and others do not: 1.3 times the medians of a point in the middle."""
    middle = run(points_of(SPACE)[17], truth(machine)(points_of(SPACE)[17]), REQUESTS, 99)
    return {"ttft": 1300 * float(np.median(middle.ttft_s)), "tpot": 1300 * float(np.median(middle.tpot_s))}


@pytest.mark.parametrize(
    "machine", [pytest.param(0, marks=pytest.mark.slow), 5, pytest.param(8, marks=pytest.mark.slow)]
)
def test_the_search_is_within_5_percent_of_the_grid_in_a_fifth_of_its_time(machine: int) -> None:
    """The machines have different best points: two threads or one, with int8 or without."""
    quality, share, found = searched(machine, limits_of(machine))
    assert quality >= 0.95
    assert share <= 0.2
    assert found.trials[0].requests == REQUESTS and len({t.point for t in found.trials}) < 36 / 2
    assert any(
        t.point == found.best and t.requests == REQUESTS for t in found.trials
    )  # the winner was measured in full


def test_a_search_that_was_killed_resumes_from_its_record(tmp_path: Path) -> None:
    """The second search replays the measurements of the first, and ends as one that was never stopped."""
    points, limits = points_of(SMALL), {"ttft": 400.0, "tpot": 40.0}
    whole = search(points, PREDICTION, plan, Machine(1), limits, first=points[0], requests=32, short=16, share=1.0)
    assert len(whole.trials) > 4

    class Killed(Exception):
        pass

    machine, left = Machine(1), 3

    def dies(point: Point, requests: int) -> Trial:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return machine(point, requests)

    path = tmp_path / "trials.jsonl"
    append_rows(path, [{"search": "another", "point": {"max_num_seqs": 1}, "requests": 32}])
    with pytest.raises(Killed):
        search(
            points,
            PREDICTION,
            plan,
            Recorded(path, "this", dies),
            limits,
            first=points[0],
            requests=32,
            short=16,
            share=1.0,
        )
    again = Recorded(path, "this", machine)
    found = search(points, PREDICTION, plan, again, limits, first=points[0], requests=32, short=16, share=1.0)
    assert again.replayed == 3 and found == whole
    assert len(read_rows(path)) == 1 + len(whole.trials)


def test_settings_that_do_not_run_are_left_out() -> None:
    points, limits = points_of(SMALL), {"ttft": 400.0, "tpot": 40.0}
    machine = Machine(1)

    def fails(point: Point, requests: int) -> Trial:
        trial = machine(point, requests)
        return replace(trial, samples=None, error="no int8 here") if dict(point)["quantization"] else trial

    found = search(points, PREDICTION, plan, fails, limits, first=points[0], requests=32, short=16, share=1.0)
    assert dict(found.best)["quantization"] is None
    assert all(found.corrected[t.point] == 0 for t in found.trials if t.error)
    with pytest.raises(BaguError, match="first measurement failed: no int8 here"):
        search(points, PREDICTION, plan, fails, limits, first=points[-1], requests=32, short=16)


def test_a_repeated_measurement_is_replayed_in_its_order(tmp_path: Path) -> None:
    point, machine = points_of(SMALL)[0], Machine(1)
    first = [Recorded(tmp_path / "trials.jsonl", "this", machine)(point, 8) for _ in range(2)]
    assert first[0] == first[1]  # a new search replays; the same search measures again
    same = Recorded(tmp_path / "trials.jsonl", "this", machine)
    trials = [same(point, 8) for _ in range(3)]
    assert trials[0] == first[0] != trials[1] != trials[2] and same.replayed == 1
    again = Recorded(tmp_path / "trials.jsonl", "this", machine)
    assert [again(point, 8) for _ in range(3)] == trials and again.replayed == 3


@pytest.mark.parametrize("machine", [3, 4])
def test_the_fit_predicts_points_that_were_not_measured(machine: int) -> None:
    """After five measurements without noise, the largest error of a duration is below a quarter of the roofline's
    median error."""
    points, exact = points_of(SPACE), truth(machine)
    prior, measured = Fit.prior(PREDICTION, points), []
    for i in (0, 5, 14, 23, 34):
        measured.append(Measured(i, 1.0, run(points[i], exact(points[i]), 32, 0), schedules(points[i], 32)[:1]))
    found = fit(prior, measured, prior.mean)

    def errors(model: Fit) -> list[float]:
        true = [run(p, exact(p), 32, 0).duration_s for p in points]
        return [abs(model.duration_s(i, schedules(p, 32)[:1]) / true[i] - 1) for i, p in enumerate(points)]

    assert 4 * max(errors(found)) < np.median(errors(prior))


# --- the model of the engine ------------------------------------------------------------------------------------------


def test_a_simulated_request_alone() -> None:
    """A prompt of 10 in chunks of 4 takes three steps; the third samples the first token, then one token a step."""
    steps: list[tuple[int, int, int]] = []

    def second(decodes: int, prompt: int, context: int) -> float:
        steps.append((decodes, prompt, context))
        return 1.0

    found = simulate([(10, 3)], second, slots=2, step_tokens=4, clients=1)
    assert (found.ttft_s, found.tpot_s, found.duration_s) == ((3.0,), (1.0,), 5.0)
    assert steps == [(0, 4, 4), (0, 4, 8), (1, 2, 10), (1, 0, 11), (1, 0, 12)]


def test_slots_clients_and_arrivals_limit_a_simulation() -> None:
    def second(*_: int) -> float:
        return 1.0

    jobs = [(1, 2), (1, 2), (1, 2)]
    assert simulate(jobs, second, slots=3, step_tokens=8).duration_s == 2.0
    assert simulate(jobs, second, slots=1, step_tokens=8).ttft_s == (1.0, 3.0, 5.0)  # waiting counts
    assert simulate(jobs, second, slots=3, step_tokens=8, clients=1).ttft_s == (1.0, 1.0, 1.0)
    late = simulate(jobs, second, slots=3, step_tokens=8, arrivals=[0.0, 0.5, 10.0])
    assert late.ttft_s == (1.0, 1.5, 1.0) and late.duration_s == 12.0
    cached = simulate([(9, 1), (9, 1)], second, slots=2, step_tokens=4, clients=1, cached=8)
    assert cached.ttft_s == (3.0, 1.0)
    assert late.goodput({"ttft": 1000.0}) == pytest.approx(2 / 12)


@pytest.mark.parametrize("arrivals", [None, [0.0, 1.0, 5.0, 40.0]])
def test_a_schedule_gives_the_latencies_of_other_step_times(arrivals: list[float] | None) -> None:
    """In a closed loop at any times. With arrivals it depends on the times; here the load is low, so it does not."""
    jobs = [(5, 2), (3, 4), (9, 1), (4, 4)]

    def slow(*step: int) -> float:
        return 0.1 * step[0] + 0.01 * step[1]

    found, seconds = schedule(jobs, lambda *_: 0.1, slots=2, step_tokens=6, clients=2, arrivals=arrivals)
    expected = simulate(jobs, slow, slots=2, step_tokens=6, clients=2, arrivals=arrivals)
    assert samples_of(found, np.array([slow(*step) for step in found.steps])) == expected
    assert samples_of(found, seconds).duration_s < expected.duration_s


@pytest.mark.parametrize(
    ("text", "says"),
    [("max_num_seq=4", "max_num_seq"), ("threads", "threads"), ("threads=two", "threads=two"),
     ("threads=0", "threads=0"),
     ("max_num_seqs=4,4", "different"), ("enable_prefix_caching=maybe", "maybe"), ("max_num_seqs=", "max_num_seqs")],
)  # fmt: skip
def test_a_bad_setting_to_try_is_refused(text: str, says: str) -> None:
    with pytest.raises(BaguError) as caught:
        parse_space([text], {})
    assert says in f"{caught.value} {caught.value.hint}"


def test_a_space_has_the_valid_combinations() -> None:
    space = parse_space(["threads=2", "max-num-seqs=64,default", "max_num_batched_tokens=128,none"],
                        default_space(2, on_gpu=False, shared_prefix=True))  # fmt: skip
    assert space["max_num_seqs"] == (64, None) and space["enable_prefix_caching"] == (True, False)
    points = [dict(p) for p in points_of(space)]
    assert {(p["max_num_seqs"], p["max_num_batched_tokens"]) for p in points} == {(64, 128), (64, None), (None, None)}
    with pytest.raises(BaguError, match="no combination"):
        points_of({"max_num_seqs": (64,), "max_num_batched_tokens": (8,)})
