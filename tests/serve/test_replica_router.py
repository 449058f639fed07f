"""Routing without processes: predictions, policies and the simulation that draws the figures."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagu.errors import UnknownName
from bagu.parallel.unlike.profile import Step, StepCost
from bagu.serve.replicas.load import Ask, Progress, ReplicaLoad
from bagu.serve.replicas.router import POLICIES, Candidate, Router
from bagu.serve.replicas.simulate import (
    COST,
    Outcome,
    SimulatedReplica,
    SimulatedRequest,
    poisson_requests,
    quantile,
    simulate,
)

FAST = StepCost(base=0.001, prompt=0.001, decode=0.0005, attended=1e-7)


def load(cost: StepCost = FAST, slots: int = 4) -> ReplicaLoad:
    return ReplicaLoad(cost, slots=slots, step_tokens=512)


def settled(outcomes: list[Outcome]) -> list[float]:
    """Seconds to the first token, without the begin of the load."""
    return [o.first_token for o in outcomes[len(outcomes) // 10 :]]


def unlike(policy: str, rate: float = 0.7 * 1.75, count: int = 1500) -> list[Outcome]:
    """Speeds 1, 1/2, 1/4."""
    replicas = [SimulatedReplica(cost=COST.scaled(f)) for f in (1, 2, 4)]
    return simulate(poisson_requests(count, rate), replicas, policy)


def test_a_prediction_beats_queues_over_unlike_replicas() -> None:
    p99 = {policy: quantile(settled(unlike(policy)), 0.99) for policy in POLICIES}
    assert p99["finish"] <= 0.6 * p99["p2c"] and p99["finish"] <= 0.8 * p99["queue"]
    assert p99["rr"] > 10 * p99["finish"]  # the slowest gets more than it can do


def test_the_predicted_first_token_is_the_measured_one() -> None:
    """One request at a time, no noise: what the router says happens."""
    outcomes = unlike("finish", count=300)
    errors = [abs(o.predicted - o.first_token) for o in outcomes]
    assert max(errors) < 0.02 * max(o.first_token for o in outcomes)


def test_a_profile_wrong_by_3_is_corrected_within_20_requests() -> None:
    replica = SimulatedReplica(cost=COST.scaled(3), believed=COST)
    seen: list[float] = []
    simulate(
        poisson_requests(25, 0.2), [replica], "finish", observe=lambda now, r: seen.append(r[0].load.correction.factor)
    )
    assert seen[0] == 1 and seen[20] == pytest.approx(3, rel=0.1)


def test_prefix_groups_keep_to_their_replicas() -> None:
    """Two replicas with room for 8 prefixes each hit as often as one of twice the speed with room for 16."""

    def cached(replicas: int, room: int, factor: float) -> int:
        many = [SimulatedReplica(cost=COST.scaled(factor), room=room) for _ in range(replicas)]
        return sum(o.cached for o in simulate(poisson_requests(600, 1.0, groups=8, shared=0.5), many, "finish"))

    assert cached(2, 8, 1.0) >= 0.97 * cached(1, 16, 0.5)


def test_a_prefix_that_all_share_spreads_when_the_queue_costs_more() -> None:
    """The trap of routers that prefer the cache: all requests go to the replica that has it."""

    def p99(policy: str) -> float:
        many = [SimulatedReplica(cost=COST) for _ in range(3)]
        return quantile(settled(simulate(poisson_requests(1500, 2.2, groups=1, shared=0.9), many, policy)), 0.99)

    assert p99("finish") <= 1.05 * p99("queue")


def test_an_idle_replica_without_the_prefix_is_left_alone_when_computing_it_costs_more() -> None:
    """One token of queue is cheaper than 900 of prefill."""
    many = [SimulatedReplica(cost=COST) for _ in range(2)]
    requests = [SimulatedRequest(10.0 * i, 1000, 10, group=0, shared=900) for i in range(10)]
    assert {o.replica for o in simulate(requests, many, "finish")} == {0}


def test_equal_idle_replicas_take_turns() -> None:
    router, loads = Router("finish"), [load() for _ in range(3)]
    chosen = []
    for i in range(6):
        ask = Ask(f"r{i}", 10, 1)
        choice = router.choose([Candidate(k, each, 0) for k, each in enumerate(loads)], ask, float(i))
        loads[choice.number].add(ask, 0, float(i))
        loads[choice.number].progress([Progress(ask.id, 1, 1)], i + choice.forecast.finish)
        chosen.append(choice.number)
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2]


def test_a_replica_that_has_stopped_answering_gets_no_more_requests() -> None:
    router, silent, slow = Router("finish"), load(), load(FAST.scaled(3))
    silent.add(Ask("stuck", 10, 10), 0, 0.0)
    candidates = [Candidate(0, silent, 0), Candidate(1, slow, 0)]
    assert router.choose(candidates, Ask("new", 100, 10), 0.005).number == 0
    assert router.choose(candidates, Ask("new", 100, 10), 2.0).number == 1


def test_an_unknown_router_is_refused() -> None:
    with pytest.raises(UnknownName, match="router"):
        Router("best")


REQUEST = st.tuples(st.integers(1, 50), st.integers(1, 8), st.integers(1, 3))


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.lists(REQUEST, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_load_is_empty_after_its_requests_have_ended(requests: list[tuple[int, int, int]], draw: object) -> None:
    """In any order of tokens, ends, aborts and deaths; nothing that was counted is left."""
    found, now = load(slots=2), 0.0
    open_choices: dict[str, int] = {}
    for i, (prompt, output, choices) in enumerate(requests):
        found.add(Ask(f"r{i}", prompt, output, choices), 0, now)
        open_choices[f"r{i}"] = choices
    assert found.choices == sum(open_choices.values())
    while open_choices:
        now += 0.01
        id = draw.choice(sorted(open_choices))  # type: ignore[attr-defined]
        what = draw.choice(["tokens", "tokens", "end", "abort"])  # type: ignore[attr-defined]
        if what == "abort":
            found.remove(id)
            del open_choices[id]
            continue
        found.progress([Progress(id, 1, int(what == "end"))], now)
        open_choices[id] -= what == "end"
        if not open_choices[id]:
            del open_choices[id]
        assert found.choices == sum(open_choices.values())
        assert min(found.forecast(Ask("x", 5, 5), 0, now)) >= 0
    idle = found.forecast(Ask("x", 5, 5), 0, now)
    assert found.choices == 0 and idle.wait == 0
    assert (found._left, found._context, found._running) == (0, 0, 0) and abs(found._prefill) < 1e-9


@given(st.integers(0, 20), st.integers(0, 99))
def test_more_work_is_predicted_to_take_longer_and_cached_tokens_shorter(before: int, cached: int) -> None:
    found = load()
    for i in range(before):
        found.add(Ask(f"r{i}", 100, 10), 0, 0.0)
    first = found.forecast(Ask("x", 100, 10), 0, 0.0)
    assert found.forecast(Ask("x", 100, 10), cached, 0.0).finish <= first.finish
    found.add(Ask("more", 100, 10), 0, 0.0)
    if before:
        assert found.forecast(Ask("x", 100, 10), 0, 0.0).finish >= first.finish - 1e-9


@pytest.mark.parametrize("options", [{}, {"max_model_len": 6}, {"num_blocks": 4, "max_num_seqs": 2}])
def test_an_engine_measures_its_speed_and_leaves_no_trace(options: dict[str, int]) -> None:
    from small_engine import small_engine, small_model

    from bagu.serve.worker.measure import measure_engine

    engine = small_engine(small_model(), **options)
    capacity = measure_engine(engine)
    assert capacity.cost.seconds(Step.of_prompt(64)) > 0 and capacity.cost.error is not None
    assert capacity.slots == engine.config.max_num_seqs and capacity.block_size == engine.blocks.block_size
    assert not engine.has_work and not engine.blocks.index and engine.blocks.used_count == 0
