"""Which version of a model answers a request, and when a new version loses its traffic again."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.repository.layout import ReturnLimits
from bagu.serve.repository.traffic import Router, Traffic, Trial

WEIGHTS = st.dictionaries(st.integers(1, 9), st.integers(1, 20), min_size=1, max_size=4)


@given(WEIGHTS)
def test_requests_without_a_user_have_exact_shares(weights: dict[int, int]) -> None:
    router, total = Router("m", weights), sum(weights.values())
    chosen = Counter(router.choose(weights, None) for _ in range(3 * total))
    assert chosen == {version: 3 * weight for version, weight in weights.items()}


def test_users_have_about_the_shares_and_keep_their_version() -> None:
    router = Router("m", {1: 90, 2: 10})
    users = [f"user-{i}" for i in range(4000)]
    first = {user: router.choose((1, 2), user) for user in users}
    assert {user: router.choose((1, 2), user) for user in users} == first
    count = Counter(first.values())[2]
    assert abs(count - 400) < 4 * (4000 * 0.1 * 0.9) ** 0.5  # four standard deviations


def test_a_change_of_weights_moves_only_the_users_between_the_bounds() -> None:
    router = Router("m", {1: 90, 2: 10})
    users = [f"user-{i}" for i in range(1000)]
    before = {user: router.choose((1, 2), user) for user in users}
    router.set({1: 80, 2: 20})
    after = {user: router.choose((1, 2), user) for user in users}
    assert {(before[u], after[u]) for u in users} == {(1, 1), (1, 2), (2, 2)}
    assert all(0.8 <= router.point(u) < 0.9 for u in users if before[u] != after[u])


def test_two_models_assign_users_independently() -> None:
    one, other = (Router(name, {1: 1, 2: 1}) for name in "ab")
    assert len({(one.choose((1, 2), f"{i}"), other.choose((1, 2), f"{i}")) for i in range(100)}) == 4


@given(WEIGHTS, st.sets(st.integers(1, 9)), st.none() | st.text())
def test_only_ready_versions_with_a_weight_are_chosen(
    weights: dict[int, int], ready: set[int], user: str | None
) -> None:
    chosen = Router("m", weights).choose(ready, user)
    possible = weights.keys() & ready
    assert chosen in possible if possible else chosen is None


# --- automatic return -------------------------------------------------------------------------------------------------


def trial(metrics: Metrics, **limits: float) -> Trial:
    return Trial.begin(ReturnLimits(**{"after_requests": 10, "trial_requests": 20, **limits}), metrics)  # type: ignore[arg-type]


def finish(metrics: Metrics, count: int, *, ttft: float = 0.01, errors: int = 0) -> None:
    metrics.finished["length"] += count
    metrics.errors += errors
    for _ in range(count):
        metrics.first_token.observe(ttft)


def test_errors_are_counted_from_the_start_of_the_trial() -> None:
    metrics = Metrics("m")
    finish(metrics, 10, errors=10)
    run = trial(metrics, error_percent=20)
    finish(metrics, 8, errors=1)
    assert run.requests == 9 and run.breach() is None  # too few to decide
    finish(metrics, 0, errors=1)
    assert run.breach() is None  # 2 of 10 is the limit, and does not pass it
    finish(metrics, 0, errors=1)
    assert run.breach() == "27.3 % of 11 requests failed, and the limit is 20 %"


def test_the_latency_is_that_of_the_trial() -> None:
    metrics = Metrics("m")
    finish(metrics, 100, ttft=5.0)
    run = trial(metrics, ttft_p99_ms=100)
    finish(metrics, 20, ttft=0.05)
    assert run.breach() is None and run.passed
    finish(metrics, 1, ttft=0.2)
    assert run.breach() == "the p99 TTFT is 200 ms, and the limit is 100 ms"


def test_requests_that_clients_abort_are_not_counted() -> None:
    metrics = Metrics("m")
    run = trial(metrics, error_percent=0)
    metrics.finished["abort"] += 1000
    assert run.requests == 0 and run.breach() is None and not run.passed


@pytest.mark.parametrize("settings", [{}, {"error_percent": 1, "after_requests": 0}])
def test_limits_that_never_apply_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"limit|after_requests"):
        ReturnLimits(**settings)  # type: ignore[arg-type]


def test_the_versions_to_unload_are_those_that_lost_the_traffic_for_good() -> None:
    metrics, limits = Metrics("m"), ReturnLimits(error_percent=5, after_requests=1, trial_requests=1)
    versions: Any = {n: SimpleNamespace(is_ready=True, metrics=metrics, state="ready") for n in (1, 2, 3)}
    traffic = Traffic("m", {1: 1.0})
    assert traffic.set({2: 1.0}, versions, limits) == []  # 1 stays for the trial of 2
    assert traffic.in_trial(2) and traffic.kept == {1, 2} and traffic.share(2) == 1.0
    assert traffic.set({1: 1.0}, versions, limits) == []  # 1 has the traffic again, and 2 may get it back
    assert traffic.set({3: 1.0}, versions, limits) == [2]
    assert traffic.check(versions) == [] and traffic.in_trial(3)
    metrics.finished["stop"] += 1
    assert traffic.check(versions) == [1] and traffic.kept == {3} and traffic.returns == 0
    traffic.set({1: 1.0, 3: 1.0}, versions, limits)
    metrics.errors += 1
    assert traffic.check(versions) == [1] and traffic.weights == {3: 1.0} and traffic.returns == 1
    assert traffic.last_return is not None and traffic.last_return.startswith("version 1: 100.0 % of 1 requests failed")
