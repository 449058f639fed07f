"""A demo keeps its time on slow and fast machines, and what it chooses by the clock can be run again to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from bagu.errors import ArgumentError
from bagu.recipes.baselines import Compressors
from bagu.recipes.demo import REVISIONS, _clock
from bagu.recipes.demo_later import LATER
from bagu.recipes.demo_pace import in_parts, steps_made
from bagu.recipes.demo_plan import (
    COMPOSE_S,
    COMPRESS_S,
    DPO_COST,
    ENDING_S,
    EVALUATIONS,
    PREPARE_S,
    Pace,
    Plan,
    Rate,
    Steps,
    dpo_steps,
    measured,
    revised,
    rl_steps,
    sft_steps,
)
from bagu.recipes.demo_report import against_stock
from bagu.recipes.demo_sizes import CPU_SIZES, GPU, QUICK, Demo
from bagu.train.schedule import factor

LARGE, MEDIUM, SMALL, TINY = CPU_SIZES
ARM = {"large": 1_250.0, "medium": 2_800.0, "small": 6_500.0, "tiny": 20_000.0}  # tokens/s, two Neoverse-N1 cores
XEON = {"large": 12_600.0, "medium": 27_000.0, "small": 51_000.0, "tiny": 135_000.0}  # two cores with AMX
FAST = {n: 6.0 * r for n, r in XEON.items()}


def rates(by_name: dict[str, float]) -> list[Rate]:
    return [Rate(size=size, tokens_per_s=by_name[size.name]) for size in CPU_SIZES]


@pytest.mark.parametrize(
    ("machine", "chosen"),
    [
        (ARM, "small"),
        (XEON, "small"),
        ({n: 1.5 * r for n, r in XEON.items()}, "medium"),
        (FAST, "large"),
    ],
)
def test_a_slower_machine_gets_a_smaller_model_and_the_time_is_kept(machine: dict[str, float], chosen: str) -> None:
    plan = Plan.of(rates(machine), 300.0, fill=False)
    assert plan.size.name == chosen and plan.seconds <= 300.0
    assert plan.size.pretrain_steps <= plan.rate.size.pretrain_steps
    assert f"{chosen} trains at {machine[chosen]:,.0f} tokens/s" in plan.reason


@pytest.mark.parametrize("share", [0.2, 0.05, 0.03])
def test_a_starved_machine_keeps_its_time_too(share: float) -> None:
    """One that gives the demo a tenth of its cores or less, where 40 steps of the small model took minutes too long."""
    plan = Plan.of(rates({n: share * r for n, r in ARM.items()}), 300.0, fill=False)
    assert plan.seconds <= 300.0 and plan.size.name == ("small" if share == 0.2 else "tiny")
    done = max(1, plan.size.pretrain_steps // 8)
    at = pace(plan.rate.tokens_per_s, 300.0 - 22 - done * plan.size.tokens_per_step / plan.rate.tokens_per_s)
    assert finish(revised(plan, done, at, fill=False), done, at) <= 1.1 * at.left_s


def test_a_demo_that_cannot_keep_its_time_says_so() -> None:
    plan = Plan.of(rates({n: 0.001 * r for n, r in ARM.items()}), 300.0, fill=False)
    assert (plan.size.name, plan.size.pretrain_steps) == ("tiny", 8) and plan.seconds > 300.0
    assert plan.reason.endswith("with the fewest steps, 8, it takes longer than asked")
    assert "longer than asked" not in Plan.of(rates(ARM), 300.0, fill=False).reason


def test_more_minutes_are_used_and_fewer_are_kept() -> None:
    by_default, asked, short = (Plan.of(rates(FAST), s, fill=f) for s, f in ((300, False), (1200, True), (150, True)))
    assert 0.6 * LARGE.pretrain_steps < by_default.size.pretrain_steps <= LARGE.pretrain_steps
    assert by_default.seconds <= 300 and Plan.of(rates(FAST), 600, fill=False).size.pretrain_steps == 300
    assert asked.size.pretrain_steps > 3 * LARGE.pretrain_steps and asked.seconds == pytest.approx(1200, rel=0.01)
    assert short.seconds <= 150
    assert asked.size.sft_steps > 3 * by_default.size.sft_steps and short.size.name == "medium"


def test_only_as_many_sizes_are_measured_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    from bagu.recipes import demo_plan

    def tried(machine: dict[str, float], sizes: tuple[Demo, ...] = CPU_SIZES) -> tuple[list[str], list[str]]:
        """The sizes that are run, and those whose rates are kept."""
        run: list[str] = []

        def rate(size: Demo, device: torch.device) -> float:
            run.append(size.name)
            return machine[size.name]

        monkeypatch.setattr(demo_plan, "_tokens_per_s", rate)
        return run, [r.size.name for r in measured(sizes, 300.0, torch.device("cpu"))]

    assert tried(FAST) == (["tiny", "large"], ["large"])
    assert tried(ARM) == (["tiny", "small"], ["small"])
    assert tried({n: 0.03 * r for n, r in ARM.items()}) == (["tiny", "small"], ["small", "tiny"])
    assert tried({n: 0.01 * r for n, r in ARM.items()}) == (["tiny"], ["tiny"])  # three large steps would take minutes
    assert tried(XEON, (GPU,)) == (["large"], ["large"])


def pace(tokens_per_s: float, left_s: float, prepared_s: float = 22.0) -> Pace:
    return Pace(tokens_per_s=tokens_per_s, left_s=left_s, prepared_s=prepared_s, held_out_tokens=170_000)


def finish(size: Demo, done: int, at: Pace) -> float:
    """Seconds until the end of a demo at this pace, as it is accounted."""
    steps = (1 + size.later_share) * size.pretrain_steps - done
    training = 1.08 * steps * size.tokens_per_step / at.tokens_per_s
    return training + at.after_s(size, EVALUATIONS) + at.held_out_tokens / 3 / at.tokens_per_s


@pytest.mark.parametrize("speed", [0.5, 0.7, 0.97, 1.3])
def test_the_steps_follow_the_real_pace(speed: float) -> None:
    plan = Plan.of(rates(ARM), 300.0, fill=False)
    done = plan.size.pretrain_steps // 8
    at = pace(speed * ARM["small"], 300.0 - 22 - done * plan.size.tokens_per_step / (speed * ARM["small"]))
    size = revised(plan, done, at, fill=False)
    assert finish(size, done, at) <= 1.1 * at.left_s  # a plan within a tenth is kept
    assert size.pretrain_steps <= SMALL.pretrain_steps
    assert (size == plan.size) == (speed == 0.97)


def test_a_machine_that_stands_still_ends_the_run_early_but_whole() -> None:
    plan = Plan.of(rates(ARM), 300.0, fill=False)
    done = plan.size.pretrain_steps // 8
    size = revised(plan, done, pace(100.0, -60.0), fill=False)
    assert size.pretrain_steps == 2 * done  # not fewer: the cooldown must not have begun
    assert sft_steps(size, None, pace(100.0, -60.0)) == 8


@pytest.mark.parametrize("machine", [ARM, XEON, {n: 0.05 * r for n, r in ARM.items()}])
@pytest.mark.parametrize("budget_s", [300.0, 1800.0])
def test_the_later_stages_shrink_with_the_time(machine: dict[str, float], budget_s: float) -> None:
    """Each takes its share of what the stages before it left, so that the demo ends in time."""
    plan = Plan.of(rates(machine), budget_s, fill=budget_s > 300)
    size, rate = plan.size, plan.rate.tokens_per_s
    step_s, evaluation_s, slow = size.tokens_per_step / rate, 9.0, 1.3  # later stages are slower than estimated
    answer_s = 3 * size.rl_tokens / rate
    spent = 22 + (size.pretrain_steps * 1.08 * step_s) + 57_000 / rate
    if size.pretrain_steps != plan.rate.size.pretrain_steps:  # the time decides: pretraining keeps its part of it
        assert spent > 0.26 * (budget_s - 22 - 37 - EVALUATIONS * evaluation_s)
    for number, field, fits in ((1, "sft_steps", sft_steps), (2, "dpo_steps", dpo_steps), (3, "rl_steps", rl_steps)):
        spent += evaluation_s
        at = replace(pace(rate, budget_s - spent), evaluation_s=evaluation_s)
        more = {"answer_s": answer_s} if field == "rl_steps" else {}
        most = None if budget_s > 300 else getattr(plan.rate.size, field)
        size = replace(size, **{field: fits(size, most, at, **more)})
        assert getattr(size, field) >= 2 and (most is None or getattr(size, field) <= most), number
        cost = {"sft_steps": 1.0, "dpo_steps": 4 / 3}.get(field)
        each = size.rl_prompts * size.rl_samples * (answer_s + 80 / rate) if cost is None else cost * step_s
        spent += slow * 1.08 * getattr(size, field) * each
    assert spent + evaluation_s + 37 <= 1.2 * budget_s


def test_reinforcement_follows_the_time_of_an_answer() -> None:
    size, at = LARGE, replace(pace(8_400.0, 250.0), evaluation_s=5.0)
    steps = [rl_steps(size, size.rl_steps, at, answer_s) for answer_s in (0.001, 0.01, 0.1, 10.0)]
    assert steps[0] == size.rl_steps > steps[2] > steps[3] == 2 and steps == sorted(steps, reverse=True)
    assert rl_steps(size, size.rl_steps, replace(at, left_s=-10.0), 0.01) == 2
    assert size.later_share == pytest.approx(140 / 300 + 4 / 3 * 12 / 300 + size.rl_share)


class Machine:
    """A machine with a fake clock, that has a part of its speed until `until_s` and all of it then."""

    def __init__(self, share: float, until_s: float) -> None:
        self.share, self.until_s, self.now = share, until_s, 0.0

    def work(self, idle_s: float) -> float:
        """Do what takes `idle_s` on an idle machine; return the time it took."""
        began, slow_s = self.now, max(0.0, self.until_s - self.now)
        self.now += idle_s / self.share if idle_s <= slow_s * self.share else slow_s + idle_s - slow_s * self.share
        return self.now - began

    def steps(self, number: int, idle_s: float) -> list[dict[str, float]]:
        return [{"tokens": 1.0, "tokens_per_s": 1.0 / self.work(idle_s)} for _ in range(number)]


@pytest.mark.parametrize(("share", "until_s"), [(1.0, 0.0), (0.5, 1e9), (0.5, 60.0), (0.4, 150.0)])
def test_the_whole_time_is_used_whatever_the_first_seconds_were(share: float, until_s: float) -> None:
    """A neighbour takes half of the machine or more, all the time or at the beginning: what is left is trained in."""
    machine, step_s, answer_s = Machine(share, until_s), SMALL.tokens_per_step / ARM["small"], 0.0142
    speed = share if until_s else 1.0
    plan = Plan.of(rates({n: speed * r for n, r in ARM.items()}), 300.0, fill=False)
    size, made = plan.size, dict[str, int]()
    prepared_s = machine.work(PREPARE_S)

    def stage(
        field: str, idle_s: float, shares: Sequence[float], fit: Callable[[Steps], Demo]
    ) -> list[dict[str, float]]:
        rows: list[dict[str, float]] = []

        def train(steps: int, *, resume: bool, pause_after: int | None) -> list[dict[str, float]]:
            assert resume == bool(rows)
            rows.extend(machine.steps((pause_after or steps) - len(rows), 1.08 * idle_s))
            return rows

        def revise(done: int, paused: list[dict[str, float]]) -> int:
            nonlocal size
            assert done == len(paused)
            size = fit(steps_made(paused))
            return int(getattr(size, field))

        steps, rows = in_parts(getattr(size, field), shares, train, revise)
        made[field] = len(rows)
        assert steps == len(rows) >= 2
        return rows

    def at(rate: float, evaluation_s: float | None = None) -> Pace:
        return replace(pace(rate, 300.0 - machine.now, prepared_s), evaluation_s=evaluation_s)

    def rate(rows: list[dict[str, float]]) -> float:
        return SMALL.tokens_per_step / steps_made(rows).step_s

    def pretraining(so_far: Steps) -> Demo:
        paced = at(SMALL.tokens_per_step / so_far.step_s)
        return revised(replace(plan, size=size), so_far.done, paced, fill=False)

    rows = stage("pretrain_steps", step_s, REVISIONS, pretraining)
    known = rate(rows[len(rows) // 2 :])
    machine.work(57_000 / ARM["small"] + COMPRESS_S)
    evaluation_s, planned = machine.work(COMPOSE_S), size

    def fine_tuning(so_far: Steps | None = None) -> Demo:
        return replace(size, sft_steps=sft_steps(planned, SMALL.sft_steps, at(known, evaluation_s), so_far))

    def reinforcement(so_far: Steps | None = None) -> Demo:  # the time of an answer is estimated far too long
        return replace(size, rl_steps=rl_steps(planned, SMALL.rl_steps, at(known, evaluation_s), 3 * answer_s, so_far))

    size = fine_tuning()
    rows = stage("sft_steps", step_s, LATER[0].revisions, fine_tuning)
    known, evaluation_s = rate(rows), machine.work(COMPOSE_S)
    size = replace(size, dpo_steps=dpo_steps(planned, SMALL.dpo_steps, at(known, evaluation_s)))
    stage("dpo_steps", DPO_COST * step_s, (), fine_tuning)
    evaluation_s = machine.work(COMPOSE_S)
    size = reinforcement()
    idle_s = size.rl_prompts * size.rl_samples * (answer_s + 60 / ARM["small"])
    stage("rl_steps", idle_s, LATER[2].revisions, reinforcement)
    machine.work(COMPOSE_S + ENDING_S)
    assert 0.88 * 300 <= machine.now <= 1.1 * 300, made
    assert made["sft_steps"] > 0.9 * made["pretrain_steps"] and made["rl_steps"] > 4, made


def test_a_longer_demo_has_smaller_intervals() -> None:
    items = [Plan.of(rates(FAST), s, fill=True).size.write_items for s in (150, 300, 600, 1800)]
    assert items[1] == LARGE.write_items and items == sorted(items) and items[-1] == 128


@pytest.mark.parametrize("size", [LARGE, MEDIUM, SMALL, GPU])
@pytest.mark.parametrize("grows", [0.25, 0.4, 0.9, 1.7])
def test_the_first_steps_are_those_of_a_run_of_the_new_length(size: Demo, grows: float) -> None:
    """So that config.json, which holds the new length, describes the whole run."""
    config = size.pretrain().train
    done = config.steps // 8
    new = max(2 * done, round(grows * config.steps))
    for step in range(done):
        assert factor(config.schedule, step, config.steps) == factor(config.schedule, step, new)


def test_the_tile_says_on_which_side_of_each_compressor_the_model_is() -> None:
    stock = Compressors(
        gzip_bits_per_byte=2.0, xz_bits_per_byte=1.2, primed_xz_bits_per_byte=1.0, held_out_bytes=1, priming_bytes=1
    )
    assert against_stock(1.5, stock) == "25 % below gzip -9 (2.000), 25 % above xz -6 (1.200)"


def test_minutes_that_make_no_sense_are_refused() -> None:
    for minutes in (0.0, -1.0, 1.9, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="--minutes is"):
            _clock(False, minutes)
    with pytest.raises(ArgumentError, match="--quick is given with --minutes"):
        _clock(True, 5.0)
    assert _clock(False, None).budget_s == 300 and not _clock(False, None).fill
    assert _clock(False, 3.0).budget_s == 180 and _clock(False, 3.0).fill


def test_a_machine_is_measured_by_real_steps() -> None:
    tiny = replace(QUICK, name="tiny", enough_tokens=10**12)
    (rate,) = measured([tiny], 300.0, torch.device("cpu"))
    assert rate.tokens_per_s > 10
