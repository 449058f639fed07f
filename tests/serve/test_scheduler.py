"""The scheduler, one behaviour per test, with the engine of fake_engine.py."""

from __future__ import annotations

import pytest
from fake_engine import EOS, STOP, alone, ask, assert_empty, drain, engine

from bagu.errors import ArgumentError
from bagu.serve.kv.groups import LayerGroup
from bagu.serve.limits import SchedulerConfig
from bagu.serve.plan import LATE
from bagu.serve.request import Request, Unservable


def test_decodes_and_chunks_of_prompts_share_one_budget() -> None:
    fake = engine(max_num_batched_tokens=16)
    fake.scheduler.queues.add(ask("short", 4, max_tokens=20, min_tokens=20))
    fake.step()
    fake.scheduler.queues.add(ask("long", [2 + i % 19 for i in range(40)], max_tokens=2, arrival=1.0))
    plan = fake.scheduler.plan()
    assert plan is not None
    assert [(s.sequence.request.id, s.length, s.samples) for s in plan.slices] == [
        ("short", 1, True),
        ("long", 15, False),
    ]
    assert plan.num_tokens == 16 and plan.num_decodes == 1 and plan.sample_rows == [0]


def test_priority_runs_first_and_age_catches_up() -> None:
    def order(*requests: Request) -> list[str]:
        fake = engine(max_num_seqs=1)
        for r in requests:
            fake.scheduler.queues.add(r)
        return [s.request.id for s in fake.scheduler.queues.waiting]

    assert order(ask("a", 3), ask("b", 3, priority=-1, arrival=1.0)) == ["b", "a"]
    assert order(ask("a", 3), ask("b", 3, priority=-1, arrival=31.0)) == ["a", "b"]  # 30 s are one step of priority
    assert order(ask("a", 3), ask("b", 3), ask("c", 3)) == ["a", "b", "c"]


def test_a_smaller_request_does_not_overtake_one_that_does_not_fit_yet() -> None:
    fake = engine(num_blocks=8, block_size=4)
    fake.scheduler.queues.add(ask("first", 12, max_tokens=8, min_tokens=8))
    fake.step()
    fake.scheduler.queues.add(ask("large", [3] * 24, max_tokens=2, arrival=1.0))
    fake.scheduler.queues.add(ask("small", [4] * 2, max_tokens=2, arrival=2.0))
    fake.step()
    assert [s.request.id for s in fake.scheduler.queues.waiting] == ["large", "small"]
    drain(fake)
    assert_empty(fake)


def test_preemption_takes_the_lowest_rank_and_resumes_from_the_prefix_cache() -> None:
    fake = engine(num_blocks=10, block_size=2)
    requests = [
        ask("old", [5, 6, 7], max_tokens=14, min_tokens=14),
        ask("new", [8, 9, 10, 11], max_tokens=10, min_tokens=10, arrival=1.0),
    ]
    for r in requests:
        fake.scheduler.queues.add(r)
    while not fake.scheduler.queues.preemptions:
        assert fake.step()
    assert [s.request.id for s in fake.scheduler.queues.running] == ["old"]
    drain(fake)
    assert fake.scheduler.queues.hit_tokens > 0
    assert {r.id: [fake.texts[r.id][0]] for r in requests} == {r.id: alone(r) for r in requests}


def test_choices_share_the_prompt_and_copy_the_last_block_when_they_write() -> None:
    fake = engine(block_size=4)
    request = ask("r", 10, n=3, max_tokens=6, min_tokens=6)
    fake.scheduler.queues.add(request)
    fake.step()
    assert fake.scheduler.blocks.used_count == 3, "three choices on the three blocks of one prompt"
    plan = fake.scheduler.plan()
    assert plan is not None and len(plan.copies) == 2, "the last to write needs no copy"
    assert {len(s.sequence.tokens) for s in plan.slices} == {11}
    fake.drawn.append((plan, fake.run(plan)))
    drain(fake)
    assert [fake.texts["r"][i] for i in range(3)] == alone(request)
    assert_empty(fake)


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    fake = engine(block_size=4)
    fake.scheduler.queues.add(ask("cold", 8, max_tokens=1))
    drain(fake)
    fake.scheduler.queues.add(ask("warm", 8, max_tokens=1))
    plan = fake.scheduler.plan()
    assert plan is not None and [(s.start, s.length) for s in plan.slices] == [(4, 4)]


def test_hit_blocks_do_not_count_as_available_for_the_same_prompt() -> None:
    fake = engine(num_blocks=6, block_size=2)
    fake.scheduler.queues.add(ask("cold", 8, max_tokens=1))
    drain(fake)
    fake.scheduler.queues.add(ask("holder", [20, 21, 22], max_tokens=5, min_tokens=5))
    fake.step()
    assert (len(fake.scheduler.blocks.free), fake.scheduler.blocks.cached_count) == (0, 4)
    fake.scheduler.queues.add(ask("warm", 12, max_tokens=1, arrival=1.0))
    fake.step()
    assert [s.request.id for s in fake.scheduler.queues.waiting] == ["warm"]
    drain(fake)
    assert_empty(fake)


def test_prompts_of_one_plan_share_the_blocks_of_the_first() -> None:
    fake = engine(block_size=4, max_num_batched_tokens=24)
    requests = [ask(name, [*range(2, 14), *own], max_tokens=2, min_tokens=2) for name, own in
                {"a": [3, 4], "b": [5, 6, 7], "c": [3, 4, 8]}.items()]  # fmt: skip
    for request in requests:
        fake.scheduler.queues.add(request)
    plan = fake.scheduler.plan()
    assert plan is not None and [(s.start, s.length) for s in plan.slices] == [(0, 14), (12, 3), (12, 3)]
    assert fake.scheduler.queues.hit_tokens == 24 and fake.scheduler.blocks.used_count == 3 + 3
    fake.drawn.append((plan, fake.run(plan)))
    drain(fake)
    assert {r.id: [fake.texts[r.id][0]] for r in requests} == {r.id: alone(r) for r in requests}


def test_blocks_of_an_aborted_sequence_are_computed_for_its_sharers() -> None:
    fake = engine(block_size=4)
    follower = ask("follower", 14, max_tokens=3, min_tokens=3, arrival=1.0)
    fake.scheduler.queues.add(ask("owner", 13, max_tokens=1))
    fake.scheduler.queues.add(follower)
    plan = fake.scheduler.plan()
    assert plan is not None and [(s.start, s.length) for s in plan.slices] == [(0, 13), (12, 2)]
    assert fake.scheduler.queues.abort("owner")
    fake.scheduler.queues.check_integrity()
    fake.drawn.append((plan, fake.run(plan)))  # the plan still runs
    drain(fake)
    assert [fake.texts["follower"][0]] == alone(follower)
    assert_empty(fake)


def test_requested_prompt_logprobs_are_computed_although_cached() -> None:
    fake = engine(block_size=4)
    fake.scheduler.queues.add(ask("cold", 16, max_tokens=1))
    drain(fake)
    fake.scheduler.queues.add(ask("all", 16, max_tokens=1, prompt_logprobs=0))
    fake.scheduler.queues.add(ask("tail", 16, max_tokens=0, prompt_logprobs=0, start=9, arrival=1.0))
    drain(fake)
    assert fake.scored["all"] == list(range(15)) and fake.scored["tail"] == list(range(8, 15))
    assert fake.scheduler.queues.hit_tokens == 8, "positions before the first wanted one may come from the cache"
    assert fake.ends["tail"] == {0: "length"} and "tail" not in fake.texts


def test_a_windowed_model_generates_a_text_longer_than_the_pool() -> None:
    groups = (LayerGroup((0,), 8),)
    fake = engine(num_blocks=4, block_size=4, groups=groups)
    request = ask("r", 40, max_tokens=100, min_tokens=100)
    fake.scheduler.queues.add(request)
    most = 0
    while fake.step():
        most = max(most, fake.scheduler.blocks.used_count)
    assert most <= 4 and [fake.texts["r"][0]] == alone(request, groups)
    with pytest.raises(Unservable, match="need 35 KV blocks of 4 tokens, and the pool has 4"):
        engine(num_blocks=4, block_size=4).scheduler.queues.add(request)


def test_layers_with_a_window_release_blocks_that_the_others_keep() -> None:
    groups = (LayerGroup((0,)), LayerGroup((1,), 8), LayerGroup((2,), 6, first=3))
    fake = engine(num_blocks=64, block_size=4, groups=groups)
    request = ask("r", 90, max_tokens=30, min_tokens=30)
    fake.scheduler.queues.add(request)
    held = [fake.scheduler.blocks.used_count for _ in iter(fake.step, False)]
    assert [fake.texts["r"][0]] == alone(request, groups)
    # 119 positions in 30 blocks of the first group; 8 positions in up to 3; 6 in up to 3, and the first block
    assert max(held[-20:]) <= 30 + 3 + 4 and fake.scheduler.blocks.max_blocks(119) == 37


def test_a_prefix_hit_needs_the_last_blocks_of_a_window_only() -> None:
    groups = (LayerGroup((0,)), LayerGroup((1,), 6))
    fake = engine(num_blocks=40, block_size=2, groups=groups)
    fake.scheduler.queues.add(ask("cold", 21, max_tokens=4, min_tokens=4))
    drain(fake)
    blocks, tokens = fake.scheduler.blocks, list(ask("warm", 21).prompt)
    windowed = [b for b, c in enumerate(blocks.contents) if c is not None and c.group == 1]
    first = [b for b in windowed if len(blocks.match(tokens[:4]).blocks[1]) and b in blocks.match(tokens[:4]).blocks[1]]
    for block in first:  # evicted: the window after 20 tokens does not reach them
        content = blocks.contents[block]
        assert content is not None
        del blocks.index[content.group, content.key], blocks.cached[block]
        blocks.contents[block] = None
        blocks.free.append(block)
    found = blocks.match(tokens, limit=20)
    assert found.columns == 10 and blocks.match(tokens[:6]).columns == 0
    fake.scheduler.queues.add(warm := ask("warm", 21, max_tokens=4, min_tokens=4, arrival=1.0))
    drain(fake)
    assert fake.scheduler.queues.hit_tokens == 20 and [fake.texts["warm"][0]] == alone(warm, groups)


def test_an_abort_in_flight_releases_when_the_plan_is_committed() -> None:
    fake = engine(num_blocks=4, block_size=4)
    fake.scheduler.queues.add(ask("r", 10, n=2, max_tokens=4))
    plan = fake.scheduler.plan()
    assert plan is not None and fake.scheduler.queues.abort("r")
    assert fake.scheduler.blocks.used_count == 3, "the plan in flight writes to these"
    assert not fake.scheduler.queues.abort("r") and fake.scheduler.plan() is None
    fake.scheduler.queues.check_integrity()
    assert fake.scheduler.commit(plan, [5, 5]) == []
    assert_empty(fake)


def test_stops_end_a_choice_with_their_reason() -> None:
    fake = engine()
    for name, sampling in {"eos": {}, "ids": {}, "ignored": {"ignore_eos": True}, "early": {"min_tokens": 2}}.items():
        fake.scheduler.queues.add(ask(name, 3, max_tokens=2, **sampling))
    plan = fake.scheduler.plan()
    assert plan is not None
    first = {e.request_id: (e.finish, e.stop_reason) for e in fake.scheduler.commit(plan, [EOS, STOP, EOS, EOS])}
    assert first == {"eos": ("stop", None), "ids": ("stop", STOP), "ignored": (None, None), "early": (None, None)}
    plan = fake.scheduler.plan()
    assert plan is not None
    assert [(e.finish, e.stop_reason) for e in fake.scheduler.commit(plan, [7, EOS])] == [
        ("length", None),
        ("stop", None),
    ]


def test_restart_recomputes_everything_and_empties_the_cache() -> None:
    fake = engine(block_size=2)
    request = ask("r", 9, max_tokens=6, min_tokens=6)
    fake.scheduler.queues.add(request)
    for _ in range(3):
        fake.step()
    fake.scheduler.queues.restart()
    assert fake.scheduler.blocks.available == len(fake.scheduler.blocks.free) == 64
    drain(fake)
    assert [fake.texts["r"][0]] == alone(request)


def test_a_request_that_can_never_fit_is_refused_with_the_reason() -> None:
    scheduler = engine(num_blocks=4, block_size=4, max_num_seqs=2).scheduler
    with pytest.raises(Unservable, match="make 266 tokens, more than max_model_len = 256"):
        scheduler.queues.add(ask("r", 10, max_tokens=256))
    with pytest.raises(Unservable, match="need 5 KV blocks of 4 tokens, and the pool has 4"):
        scheduler.queues.add(ask("r", 10, max_tokens=8))
    with pytest.raises(Unservable, match="n = 3, and 2 choices"):
        scheduler.queues.add(ask("r", 4, n=3, max_tokens=2))
    scheduler.queues.add(ask("r", 10, max_tokens=7))
    with pytest.raises(ArgumentError, match="already a request"):
        scheduler.queues.add(ask("r", 4, max_tokens=2))
    with pytest.raises(ArgumentError, match="max_num_batched_tokens = 4"):
        SchedulerConfig(max_model_len=10, max_num_seqs=8, max_num_batched_tokens=4)


def test_plans_are_committed_in_order() -> None:
    fake = engine()
    fake.scheduler.queues.add(ask("r", 4, max_tokens=4))
    first, second = fake.scheduler.plan(), fake.scheduler.plan()
    assert first is not None and second is not None and second.ids == [LATE] and second.late == [(0, 0)]
    assert fake.scheduler.plan() is None, "two plans are in flight"
    with pytest.raises(ArgumentError, match="not the oldest"):
        fake.scheduler.commit(second, [5])
    with pytest.raises(ArgumentError, match="0 tokens for a plan that samples 1"):
        fake.scheduler.commit(first, [])
