"""The scheduler under random load, against a small reference: every request gets the same text as alone, and ten
thousand requests release everything.
"""

from __future__ import annotations

import random

import pytest
from fake_engine import EOS, STOP, FakeEngine, alone, ask, assert_empty, drain, engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagu.serve.kv.groups import LayerGroup
from bagu.serve.request import Request, Unservable

arrivals = st.fixed_dictionaries({
    "at": st.integers(0, 12),
    "family": st.integers(0, 2),  # prompts of one family share a prefix
    "shared": st.integers(0, 20),
    "own": st.integers(1, 12),
    "repeat": st.booleans(),  # the same prompt as the previous arrival
    "max_tokens": st.integers(0, 12),
    "min_tokens": st.integers(0, 3),
    "n": st.integers(1, 3),
    "priority": st.integers(-1, 1),
    "abort_after": st.one_of(st.none(), st.integers(0, 8)),
    "stop_after": st.one_of(st.none(), st.none(), st.integers(0, 8)),
    "score": st.one_of(st.none(), st.none(), st.integers(0, 20)),
})  # fmt: skip
systems = st.fixed_dictionaries({
    "block_size": st.sampled_from([1, 2, 3, 4, 8]),
    "num_blocks": st.integers(2, 40),
    "max_num_seqs": st.integers(1, 6),
    "spare": st.integers(0, 20),
    "groups": st.sampled_from([
        tuple(LayerGroup((i,), *each) for i, each in enumerate(kinds))
        for kinds in ([()], [()], [(2,)], [(5,)], [(9,)], [(), (5,)], [(), (2,), (9,)], [(7, 3)], [(), (4, 5)])
    ]),
    "prefix_cache": st.booleans(),
    "depth": st.integers(1, 2),
})  # fmt: skip


def prompt_of(number: int, load: list[dict]) -> list[int]:
    while load[number]["repeat"] and number:
        number -= 1
    a = load[number]
    shared = [2 + (7 * a["family"] + 3 * i) % 19 for i in range(a["shared"])]
    return shared + [2 + (number * 5 + i) % 19 for i in range(a["own"])]


def make(number: int, load: list[dict]) -> Request:
    a, prompt = load[number], prompt_of(number, load)
    scored = a["score"] is not None or a["max_tokens"] == 0
    sampling = {"prompt_logprobs": 0} if scored else {}
    return ask(
        f"r{number}", prompt, priority=a["priority"], arrival=float(a["at"]), max_tokens=a["max_tokens"],
        start=min(a["score"] or 0, len(prompt) - 1), min_tokens=min(a["min_tokens"], a["max_tokens"]),
        n=a["n"] if a["max_tokens"] else 1, **sampling,
    )  # fmt: skip


@settings(max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(system=systems, load=st.lists(arrivals, min_size=1, max_size=10))
def test_every_request_gets_the_text_it_would_get_alone(system: dict, load: list[dict]) -> None:
    system = dict(system)
    system["max_num_batched_tokens"] = system["max_num_seqs"] + system.pop("spare")
    fake = engine(**system)
    scheduler, groups = fake.scheduler, system["groups"]
    requests = [make(i, load) for i in range(len(load))]
    served: dict[str, Request] = {}
    aborted: set[str] = set()
    stopped: set[tuple[str, int]] = set()
    bound = 20 + 2 * sum(r.sampling.n * 2 * (len(r.prompt) + r.sampling.max_tokens) for r in requests)
    clock = 0
    while clock <= 20 or scheduler.queues.has_work:
        for i, a in enumerate(load):
            if a["at"] == clock:
                try:
                    scheduler.queues.add(requests[i])
                    served[requests[i].id] = requests[i]
                except Unservable:
                    assert_unservable(fake, requests[i])
            if (
                a["abort_after"] is not None
                and a["at"] + a["abort_after"] == clock
                and scheduler.queues.abort(requests[i].id)
            ):
                aborted.add(requests[i].id)
            if (
                a["stop_after"] is not None
                and a["at"] + a["stop_after"] == clock
                and scheduler.queues.stop(requests[i].id, 0)
            ):
                stopped.add((requests[i].id, 0))
            scheduler.queues.check_integrity()
        assert fake.step() or not scheduler.queues.has_work, "requests are alive and no plan can be made"
        assert fake.steps <= bound, "no progress"
        clock += 1
    assert_empty(fake)
    for id, request in served.items():
        for choice, text in enumerate(alone(request, groups)):
            got = fake.texts.get(id, {}).get(choice, [])
            if id in aborted or (id, choice) in stopped:
                assert got == text[: len(got)]
                continue
            assert got == text
            stops = bool(text) and text[-1] in (EOS, STOP) and len(text) >= request.sampling.min_tokens
            assert fake.ends[id][choice] == ("stop" if stops else "length")
        if request.sampling.prompt_logprobs is not None and id not in aborted:
            assert sorted(fake.scored[id]) == list(range(max(request.score_start - 1, 0), len(request.prompt) - 1))


def assert_unservable(fake: FakeEngine, request: Request) -> None:
    """A refusal is right only if the request would not fit the pool, the model or the block tables alone."""
    blocks, config = fake.scheduler.blocks, fake.scheduler.config
    positions = len(request.prompt) + max(request.sampling.max_tokens - 1, 0)
    assert blocks.max_blocks(positions) > blocks.num_blocks or (
        request.sampling.n > config.max_num_seqs or positions >= config.max_model_len
    )


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ten_thousand_requests_with_random_aborts_release_everything(depth: int) -> None:
    rng = random.Random(depth)
    fake = engine(num_blocks=20, max_num_seqs=16, max_num_batched_tokens=64, depth=depth, audit=False)
    scheduler, alive = fake.scheduler, []
    for number in range(10_000):
        prompt = [2 + (rng.randrange(3) + i) % 19 for i in range(rng.randrange(1, 24))]
        request = ask(
            f"r{number}", prompt, arrival=number / 50, max_tokens=rng.randrange(1, 8), n=rng.choice([1, 1, 1, 3]),
            priority=rng.randrange(-1, 2),
        )  # fmt: skip
        scheduler.queues.add(request)
        alive.append(request.id)
        if rng.random() < 0.4:
            scheduler.queues.abort(alive.pop(rng.randrange(len(alive))))
        if number % 3 == 0 or len(scheduler.queues.waiting) > 20:
            fake.step()
        if number % 500 == 0:
            scheduler.queues.check_integrity()
        alive = alive[-40:]
    drain(fake, bound=100_000)
    assert_empty(fake)
    assert scheduler.queues.preemptions > 0 and scheduler.queues.hit_tokens > 0, "the soak was too easy"
    assert len(scheduler.queues.free_rows) == 16 and not scheduler.queues.requests
