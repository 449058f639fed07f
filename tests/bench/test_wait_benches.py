"""Workers whose steps wait: shares by speed, and parameter servers beside all-reduce. The labs unlike_workers and
server_or_all_reduce run the same for longer."""

from __future__ import annotations

import pytest

from bagu.bench.parameter_server import delay_rows, jittered
from bagu.bench.shares import compare
from bagu.parallel.local_ranks import on_ranks
from bagu.train.served.config import ServedConfig
from tests.forked import fork_server

pytestmark = pytest.mark.usefixtures("forked")


@pytest.mark.slow
def test_a_slow_worker_has_the_smaller_share() -> None:
    fork_server()
    found = compare((1.0, 0.25), wait_s=0.04, micro_batches=8, rounds=1)
    assert sum(found.shares) == 8 and found.shares[0] > found.shares[1], found.shares  # (6, 2) on a quiet machine
    assert found.equal_tokens_per_s > 0 and found.measured_tokens_per_s > 0 and found.predicted_tokens_per_s > 0


def test_servers_and_all_reduce_make_updates() -> None:
    fork_server()
    (alone,) = delay_rows([0], servers=1, workers=2, steps=2)
    assert alone["updates_per_s"] > 0 and alone["speed"] == 1 and alone["oldest"] == 0
    ranks = on_ranks(2, jittered, None, ServedConfig(servers=1, workers=2), 2, 0.0)
    assert len(ranks) == 2 and all(0 < each["rate"] < 1 / 0.15 for each in ranks)
