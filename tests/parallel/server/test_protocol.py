"""The protocol without processes: faults of the network, deaths, sleep, and every order of a small run."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from bagu.parallel.server.keys import holders, ranges_of
from bagu.parallel.server.membership import Manager, Map
from bagu.parallel.server.node import Address
from bagu.parallel.server.wire import Message
from tests.parallel.server.network import SEGMENTS, SIZE, Cluster, expected


def check(cluster: Cluster, updates: int) -> None:
    workers = len(cluster.workers)
    assert np.array_equal(cluster.values(), expected(workers, updates))  # the same bits: sums do not depend on arrival
    assert len({tuple(w.norms) for w in cluster.workers}) == 1 and len(cluster.workers[0].norms) == updates


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 7])
def test_every_position_belongs_to_one_range_and_neighbours_spread(servers: int) -> None:
    ranges = ranges_of([(0, 64 * 300), (64 * 300, 64 * 1000)], servers)
    owner = np.full(64 * 1000, -1)
    for r in ranges:
        for span in r.spans:
            assert (owner[span.start : span.stop] == -1).all()
            owner[span.start : span.stop] = r.number
    sizes = np.bincount(owner, minlength=servers)
    assert (owner >= 0).all() and sizes.max() <= 1.35 * 64000 / servers
    flat = np.arange(64000.0)
    back = np.zeros_like(flat)
    for r in ranges:
        r.put(back, r.take(flat))
        assert sum(p.stop - p.start for p in r.pieces) == r.size
    assert np.array_equal(flat, back)


def test_a_server_has_its_range_and_copies_of_the_next_two() -> None:
    assert [[r for r in range(5) if s in holders(r, 5)] for s in range(5)] == [
        [0, 1, 2], [1, 2, 3], [2, 3, 4], [0, 3, 4], [0, 1, 4],
    ]  # fmt: skip
    assert holders(0, 1) == (0,) and holders(0, 2) == (0, 1)


@pytest.mark.parametrize("seed", range(10))
def test_a_network_that_drops_doubles_and_reorders_changes_no_bit(seed: int) -> None:
    cluster = Cluster(servers=4, workers=3, updates=6)
    cluster.run(random.Random(seed), drop=0.1, double=0.1)
    check(cluster, 6)


@pytest.mark.parametrize("seed", range(20))
def test_deaths_births_and_sleep_lose_and_double_nothing(seed: int) -> None:
    """Up to two servers at a time are dead or asleep, at random moments of a run on a bad network."""
    rng = random.Random(seed)
    cluster = Cluster(servers=4, workers=2, updates=8, delay=seed % 3)
    gone: list[int] = []
    for _ in range(10):
        for _ in range(rng.randrange(1, 60)):
            if not cluster.flight:
                cluster.timers()
            if cluster.flight:
                cluster.deliver(rng.randrange(len(cluster.flight)), keep=rng.random() < 0.05)
        loaded = all(w.session.has_values(0) for w in cluster.workers)
        synced = all(s.versions[r] >= 0 for s in cluster.servers.values() for r in s.versions)
        if loaded and synced and len(gone) < 2:
            slot = rng.choice([s for s in cluster.servers if s not in gone])
            gone.append(slot)
            cluster.kill(slot) if rng.random() < 0.6 else cluster.sleep(slot)
        elif gone:
            slot = gone.pop(0)
            if slot in cluster.asleep:  # it wakes by its old map, and only later learns that it is out
                cluster.wake(slot)
                for _ in range(20):
                    cluster.deliver(rng.randrange(len(cluster.flight))) if cluster.flight else None
            cluster.birth(slot)
    for slot in gone:
        cluster.wake(slot)
        cluster.birth(slot)
    cluster.run(rng, drop=0.05, double=0.05)
    check(cluster, 8)
    assert max(age for w in cluster.workers for age in w.ages) <= seed % 3


def in_order(cluster: Cluster, limit: int = 10000) -> None:
    """Deliver first in, first out, until nothing is on its way."""
    for _ in range(limit):
        if not cluster.flight:
            return
        cluster.deliver(0)
    raise AssertionError("messages without end")


def finish(cluster: Cluster, updates: int) -> None:
    for _ in range(40):
        in_order(cluster)
        if all(w.done for w in cluster.workers):
            break
        cluster.timers()
    check(cluster, updates)


@pytest.mark.parametrize(
    ("delay", "fate"),
    [(0, "kill"), (2, "sleep"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, "sleep"), (2, "kill")))],
)
def test_a_death_at_every_message_of_a_run(fate: str, delay: int) -> None:
    """2 workers, 3 updates, 3 servers: the victim dies (or sleeps, and wakes with an old map) before each message k."""
    k, reached = 0, True
    while reached:
        reached = False
        for victim in range(3):
            cluster = Cluster(servers=3, workers=2, updates=3, delay=delay)
            while not all(w.session.has_values(0) for w in cluster.workers):
                cluster.timers() if not cluster.flight else cluster.deliver(0)
            for _ in range(k):
                if cluster.flight:
                    cluster.deliver(0)
            reached = reached or bool(cluster.flight)
            getattr(cluster, fate)(victim)
            in_order(cluster)
            if fate == "sleep":
                cluster.wake(victim)
            finish(cluster, 3)
            cluster.birth(victim)
            finish(cluster, 3)
            assert all(v == 3 for v in cluster.servers[victim].versions.values())
        k += 2 if delay else 1  # every message, or every second one: the same test in half the time
    assert k > 50


def test_every_order_of_two_workers_with_a_death_between_any_two_pushes() -> None:
    """All interleavings of 3 pushes of each of 2 workers that the delay allows, times the place of one death."""
    runs = 0
    for turns in combinations(range(6), 3):
        for place in range(7):
            cluster = Cluster(servers=3, workers=2, updates=3, delay=2)
            while not all(w.session.has_values(0) for w in cluster.workers):
                cluster.timers() if not cluster.flight else cluster.deliver(0)
            for turn in range(6):
                if turn == place:
                    cluster.kill(turn % 3)
                worker = cluster.workers[turn in turns]
                cluster.send(("worker", worker.number), worker.go())
                in_order(cluster)
            if place == 6:
                cluster.kill(0)
            finish(cluster, 3)
            runs += 1
    assert runs == 140


def test_two_adjacent_deaths_at_once_lose_nothing_and_three_are_said() -> None:
    for first in range(4):
        cluster = Cluster(servers=4, workers=2, updates=4)
        while cluster.workers[0].decided < 2:
            cluster.timers() if not cluster.flight else cluster.deliver(0)
        cluster.publish()  # heartbeats: the manager knows who has values
        cluster.servers.pop(first), cluster.servers.pop((first - 1) % 4)
        cluster.manager.leave(first, 1), cluster.manager.leave((first - 1) % 4, 1)
        cluster.publish()
        finish(cluster, 4)
    cluster.kill((first - 2) % 4)
    assert cluster.manager.map.empty == (first,)


def test_a_woken_server_with_an_old_map_answers_no_commit_and_no_pull() -> None:
    cluster = Cluster(servers=3, workers=1, updates=4)
    finish_at(cluster, 1)
    old = cluster.servers[0]
    cluster.sleep(0)
    cluster.flight = [f for f in cluster.flight if f[1] != ("server", 0)]
    finish(cluster, 4)
    cluster.wake(0)
    session = cluster.workers[0].session
    out = [m for _, m in old.handle(("worker", 0), _as_of(session, old, "commit"))]
    assert all(m.kind == "copy" for m in out)  # to servers that refuse it
    old.awake = False  # as its process says after the manager was silent for a second
    assert old.handle(("worker", 0), _as_of(session, old, "pull")) == []


def test_a_pull_that_came_while_the_manager_was_silent_is_answered_after_it() -> None:
    cluster = Cluster(servers=3, workers=1, updates=1)
    finish(cluster, 1)
    server = cluster.servers[0]
    server.awake = False
    assert server.handle(("worker", 0), _as_of(cluster.workers[0].session, server, "pull")) == []
    assert server.tick() == []
    server.awake = True
    assert [m.kind for _, m in server.tick()] == ["values"]


def finish_at(cluster: Cluster, decided: int) -> None:
    while cluster.workers[0].decided < decided:
        cluster.timers() if not cluster.flight else cluster.deliver(0)


def _as_of(session, server, kind):  # type: ignore[no-untyped-def]
    more = {"decision": {"step": 9}, "pull": True}
    return Message(
        kind=kind, epoch=server.map.epoch, range=0, t=server.stores[0].version + (kind == "commit"), more=more
    )


def test_a_push_of_another_length_or_model_is_refused_in_a_sentence() -> None:
    cluster = Cluster(servers=3, workers=1, updates=2)
    cluster.workers[0].updates = 0
    while not cluster.workers[0].session.has_values(0):
        cluster.timers() if not cluster.flight else cluster.deliver(0)
    session = cluster.workers[0].session
    (to, good), *_ = session.push(1, np.zeros(SIZE), [0.0])
    server = cluster.servers[to[1]]
    cut = replace(good, data=good.data[:-8])
    other = replace(good, more={**good.more, "layout": "another"})
    for bad, word in ((cut, "bytes"), (other, "keys")):
        (_, answer), *_ = server.handle(("worker", 0), bad)
        assert answer.kind == "refused" and word in answer.more["reason"]
        session.handle(to, answer)
        with pytest.raises(Exception, match="refused worker 0"):
            session.check()


def test_a_new_manager_goes_on_above_the_highest_epoch() -> None:
    cluster = Cluster(servers=3, workers=1, updates=3)
    finish_at(cluster, 1)
    epoch = max(s.map.epoch for s in cluster.servers.values())
    cluster.manager = Manager(3, now=0.0)
    for slot, server in cluster.servers.items():
        cluster.manager.join(slot, 1, ("", 0), server.map.epoch, server.versions, 0.0)
    cluster.publish()
    assert cluster.manager.map.epoch == epoch + 1 and cluster.manager.map.empty == ()
    finish(cluster, 3)


@pytest.mark.parametrize("lost", ["want", "state"])
def test_a_state_that_is_lost_on_its_way_to_the_new_first_holder_is_asked_for_again(lost: str) -> None:
    """Server 0 dies when server 1 has its update and server 2, which serves the range after it, has not."""
    cluster = Cluster(servers=3, workers=1, updates=3)
    finish_at(cluster, 1)
    assert drop(cluster, lambda to, m: m.kind == "copy" and m.range == 0 and to == ("server", 2)) == 1
    assert [cluster.servers[slot].versions[0] for slot in range(3)] == [1, 1, 0]
    cluster.kill(0)
    assert drop(cluster, lambda to, m: m.kind == lost and m.range == 0) == 1
    finish(cluster, 3)


def drop(cluster: Cluster, lost: Callable[[Address, Message], bool]) -> int:
    """Deliver until nothing is on its way, but what is `lost`; how many messages that was."""
    count = 0
    while cluster.flight:
        _, to, m = cluster.flight[0]
        if lost(to, m):
            count += 1
            cluster.flight.pop(0)
        else:
            cluster.deliver(0)
    return count


def managed(versions: int) -> Manager:
    """A manager of 3 servers at time 0.1, of which each has so many ranges."""
    manager = Manager(3)
    for slot in range(3):
        assert manager.join(slot, 5, ("", slot), 0, {(slot + k) % 3: 0 for k in range(versions)}, 0.0)
    assert manager.publish(0.1) is not None and manager.publish(0.2) is None
    return manager


def passes(manager: Manager, start: float, stop: float, beats: tuple[int, ...]) -> Map | None:
    """The last map of a time in which some servers send heartbeats, and the manager runs."""
    found = None
    for tenth in range(round(start * 10), round(stop * 10) + 1):
        for slot in beats:
            manager.beat(slot, 5, manager.members[slot].versions, tenth / 10)
        found = manager.publish(tenth / 10) or found
    return found


def test_a_silent_server_is_taken_for_dead_and_an_older_process_is_turned_away() -> None:
    manager = managed(versions=3)
    assert passes(manager, 0.3, 1.0, beats=(0, 1)) is None
    later = passes(manager, 1.1, 1.5, beats=(0, 1))
    assert later is not None and later.births == {0: 5, 1: 5} and later.empty == ()
    assert not manager.join(1, 4, ("", 1), 0, {}, 1.5)
    assert len(ranges_of(SEGMENTS, 3)) == 3


def test_a_silent_server_that_alone_has_a_range_is_waited_for() -> None:
    """Nobody could serve in its place, and taken for dead it would come back empty."""
    manager = managed(versions=1)
    assert passes(manager, 0.3, 29.0, beats=(0, 1)) is None
    later = passes(manager, 29.1, 31.0, beats=(0, 1))
    assert later is not None and later.births == {0: 5, 1: 5} and later.empty == (2,)


def test_a_manager_that_slept_takes_no_server_for_dead() -> None:
    """On a busy machine, or stopped: what servers sent meanwhile waits in its sockets, and is read one by one."""
    manager = managed(versions=3)
    assert manager.publish(3.0) is None
    for slot in range(3):
        manager.beat(slot, 5, manager.members[slot].versions, 3.0)
        assert manager.publish(3.0) is None
    later = passes(manager, 3.1, 4.2, beats=(1, 2))
    assert later is not None and later.births == {1: 5, 2: 5}


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_bytes_are_those_of_the_formula_and_copies_cost_1_over_w(workers: int) -> None:
    cluster = Cluster(servers=4, workers=workers, updates=5)
    finish(cluster, 5)
    size = 8 * SIZE
    assert cluster.bytes["push"] == 5 * workers * size
    assert cluster.bytes["copy"] == 5 * 2 * size  # of sums, whatever the number of workers
    first = workers * size  # what every worker reads before its first step
    assert cluster.bytes["values"] == 5 * workers * size + first
    with_copies = cluster.bytes["push"] + cluster.bytes["values"] - first + cluster.bytes["copy"]
    assert with_copies / (with_copies - cluster.bytes["copy"]) == 1 + 1 / workers
