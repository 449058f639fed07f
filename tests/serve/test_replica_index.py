"""The index of cached blocks over replicas is that of their pools, whatever they do."""

from __future__ import annotations

import time

import pytest
from fake_engine import EOS, VOCAB, FakeEngine, ask, engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagu.parallel.unlike.profile import StepCost
from bagu.serve.kv.blocks import IndexChanges, extend_keys
from bagu.serve.kv.groups import LayerGroup
from bagu.serve.replicas.index import PrefixIndex
from bagu.serve.replicas.keys import KnownChunks, PromptKeys
from bagu.serve.replicas.load import Ask, ReplicaLoad
from bagu.serve.replicas.router import Candidate, Router
from bagu.serve.wire.messages import CacheChanges

WINDOWED = (LayerGroup((0,)), LayerGroup((1,), window=6))


class Reported:
    """A replica whose pool reports its changes to an index, as the engine process does."""

    def __init__(self, number: int, index: PrefixIndex, **options: object) -> None:
        self.number, self.index = number, index
        self.engine: FakeEngine = engine(num_blocks=12, block_size=4, groups=index.groups, **options)  # type: ignore[arg-type]
        self.blocks = self.engine.scheduler.blocks
        self.blocks.changes = self.changes = IndexChanges()
        self.sent = 0

    def report(self, *, lose: bool = False) -> None:
        if self.changes:
            message = CacheChanges(self.sent, *self.changes.take())
            self.sent += 1
            if not lose and not self.index.update(self.number, message):
                self.index.update(self.number, CacheChanges(self.sent, True, list(self.blocks.index), ()))
                self.sent += 1


PROMPTS = st.lists(st.integers(2, 4), min_size=1, max_size=24)  # few tokens: prefixes are shared
ACTS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "steps", "reset", "die"]), st.integers(0, 1), PROMPTS, st.booleans()),
    max_size=30,
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(ACTS, PROMPTS, st.sampled_from([WINDOWED[:1], WINDOWED]))
def test_the_index_equals_the_pools_and_finds_what_they_find(
    acts: list[tuple[str, int, list[int], bool]], prompt: list[int], groups: tuple[LayerGroup, ...]
) -> None:
    """With evictions (12 blocks), emptied caches, dead replicas and lost messages."""
    assert VOCAB > 4 > EOS
    index = PrefixIndex(4, groups)
    replicas = [Reported(number, index) for number in (0, 1)]
    for i, (act, which, tokens, lose) in enumerate(acts):
        replica = replicas[which]
        if act == "ask":
            replica.engine.scheduler.queues.add(ask(f"r{i}", tokens, max_tokens=3))
        elif act == "steps":
            while replica.engine.step():
                replica.report(lose=lose and replica.sent > 0)
        elif act == "reset" and not replica.engine.scheduler.queues.has_work:
            replica.blocks.reset_prefix_cache()
            replica.report()
        elif act == "die":
            index.drop(which)
            replicas[which] = Reported(which, index)
    for replica in replicas:
        while replica.engine.step():
            pass
        replica.engine.scheduler.queues.add(ask("last", [2] * 9, max_tokens=2))  # reports after a loss
        while replica.engine.step():
            replica.report()
        replica.report()
    seen = {r.number: r.sent for r in replicas}
    for replica in replicas:
        if seen[replica.number] == index._next.get(replica.number, 0):
            assert index.held(replica.number) == set(replica.blocks.index)
            found = index.match(prompt, [0, 1])
            columns = replica.blocks.match(prompt, limit=len(prompt) - 1).columns
            assert found.cached[replica.number] == 4 * columns


def test_what_a_replica_is_about_to_compute_counts_as_cached() -> None:
    index = PrefixIndex(4, WINDOWED[:1])
    prompt = list(range(2, 15))
    promises = [index.promise(1, index.match(prompt, [0, 1])), index.promise(0, index.match(prompt, [0, 1]))]
    assert index.match(prompt, [0, 1]).cached == {0: 12, 1: 12}
    assert index.match([*prompt[:9], *[0] * 9], [0, 1]).cached == {0: 8, 1: 8}  # two blocks are the same
    for promise, left in zip(promises, ({0: 12, 1: 0}, {0: 0, 1: 0}), strict=True):
        assert promise is not None
        index.fulfil(promise)
        assert index.match(prompt, [0, 1]).cached == left
    assert index.promise(0, index.match([1, 2], [0])) is None  # no full block


def test_promises_after_promises_and_cached_blocks_are_one_prefix() -> None:
    """One request computes what a second continues, and that a third: the blocks of each count for the next."""
    index, prompt = PrefixIndex(4, WINDOWED[:1]), list(range(2, 60))
    keys = index.match(prompt, [0]).keys
    index.update(0, CacheChanges(0, False, [(0, keys[0])], ()))
    for end in (14, 30, 41):  # 3, 7 and 10 full blocks
        index.promise(0, index.match(prompt[:end], [0]))
    assert index.match(prompt, [0]).cached == {0: 40}
    assert index.match([*prompt[:20], 99, *prompt[21:]], [0]).cached == {0: 20}


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), max_size=100), min_size=1, max_size=8), st.integers(1, 4))
def test_keys_are_those_of_the_pool_whatever_is_remembered(prompts: list[list[int]], room: int) -> None:
    known = KnownChunks(room)
    for prompt in prompts:
        expected: list[bytes] = []
        extend_keys(expected, prompt, 2, len(prompt) // 2)
        keys = PromptKeys(tuple(prompt), 2, known)
        order = [*range(0, keys.count, 3), *range(keys.count)]
        assert [keys[i] for i in order] == [expected[i] for i in order]


def test_a_lost_message_is_noticed() -> None:
    index = PrefixIndex(4, WINDOWED[:1])
    assert index.update(0, CacheChanges(0, False, [(0, b"a")], []))
    assert not index.update(0, CacheChanges(2, False, [(0, b"c")], []))
    assert index.update(0, CacheChanges(3, True, [(0, b"a"), (0, b"b"), (0, b"c")], []))
    assert index.held(0) == {(0, b"a"), (0, b"b"), (0, b"c")}


@pytest.mark.parametrize("have", [0, 64, 128])
def test_a_request_is_routed_over_16_replicas_in_a_fraction_of_a_millisecond(have: int) -> None:
    """The bar is 0.3 ms for 2,048 tokens, new or cached; the fastest of 50, since other processes run too."""
    index = PrefixIndex(16, WINDOWED[:1])
    loads = [ReplicaLoad(StepCost(base=1e-3, prompt=1e-5), slots=64, step_tokens=2048) for _ in range(16)]
    prompt, router, times = tuple(range(2049)), Router(), []
    keys = index.match(prompt, range(16)).keys
    for r, load in enumerate(loads):
        index.update(r, CacheChanges(0, False, [(0, keys[i]) for i in range(have * (r + 1) // 16)], ()))
        for i in range(20):
            load.add(Ask(f"{r} {i}", 100, 50), 0, 0.0)
    for i in range(50):
        began = time.thread_time()
        found, new = index.match(prompt, range(16)), Ask(f"new {i}", len(prompt), 64)
        choice = router.choose([Candidate(r, load, found.cached[r]) for r, load in enumerate(loads)], new, 1.0)
        loads[choice.number].add(new, choice.cached, 1.0)
        promise = index.promise(choice.number, found)
        times.append(time.thread_time() - began)
        loads[choice.number].remove(new.id)
        if promise is not None:
            index.fulfil(promise)
    assert min(times) < 6e-4, "twice the bar: this machine may be slow"
