"""The scheduler against a small reference: every request gets the text it would get alone, whatever else is going on.

The engine is a fake whose KV is real: a pool of blocks that is written and read through the plan alone (ids, positions,
block tables, copies). The value stored for a token is made from the value stored before it, and the drawn token from
all values in sight: a wrong block, a stale one or one given away too early changes the text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagu.errors import ArgumentError
from bagu.serve.blocks import Blocks
from bagu.serve.limits import SchedulerConfig
from bagu.serve.plan import LATE, Plan
from bagu.serve.request import Request, Sampling, Unservable
from bagu.serve.scheduler import Scheduler

VOCAB, EOS, STOP = 23, 0, 1


def draw(seen: list[int], choice: int) -> int:
    return hash((*seen[-64:], len(seen), choice)) % VOCAB


def alone(request: Request, window: int | None) -> list[list[int]]:
    """The reference: one contiguous list of values for each choice, no pool, no batch."""
    texts = []
    for choice in range(request.sampling.n):
        values: list[int] = []
        text: list[int] = []
        tokens = list(request.prompt)
        while len(text) < request.sampling.max_tokens:
            for token in tokens[len(values) :]:
                values.append(hash((values[-1] if values else 0, token)))
            text.append(draw(values[-(window or len(values)) :], choice))
            tokens.append(text[-1])
            if text[-1] in (EOS, STOP) and len(text) >= request.sampling.min_tokens:
                break
        texts.append(text)
    return texts


@dataclass
class FakeEngine:
    """Runs plans on a pool of values. `depth` 2 plans a step ahead, as an engine on a GPU does."""

    scheduler: Scheduler
    depth: int = 1
    audit: bool = True
    texts: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    ends: dict[str, dict[int, str]] = field(default_factory=dict)
    scored: dict[str, list[int]] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        blocks = self.scheduler.blocks
        self.pool: list[list[int | None]] = [[None] * blocks.block_size for _ in range(blocks.num_blocks)]
        self.rows: dict[tuple[int, int], int] = {}  # the block tables as a device would keep them
        self.drawn: list[tuple[Plan, list[int]]] = []

    def step(self) -> bool:
        """Plan until `depth` are in flight, then commit the oldest. False when there was nothing to do."""
        while len(self.drawn) < self.depth and (plan := self.scheduler.plan()) is not None:
            self.drawn.append((plan, self.run(plan)))  # a stream runs in order: what is planned may as well run now
            self.check()
        if not self.drawn:
            return False
        plan, tokens = self.drawn.pop(0)
        for event in self.scheduler.commit(plan, tokens):
            if event.token is not None:
                self.texts.setdefault(event.request_id, {}).setdefault(event.index, []).append(event.token)
            if event.finish is not None:
                self.ends.setdefault(event.request_id, {})[event.index] = event.finish
        self.check()
        self.steps += 1
        return True

    def run(self, plan: Plan) -> list[int]:
        B, window = self.scheduler.blocks.block_size, self.scheduler.config.window
        for source, target in plan.copies:
            self.pool[target] = list(self.pool[source])
        self.rows.update({(seat, at): block for seat, at, block in plan.table_writes})
        before = self.drawn[-1][1] if self.drawn else []
        ids = list(plan.ids)
        for row, sample in plan.late:
            assert ids[row] == LATE
            ids[row] = before[sample]
        outputs: dict[int, list[int]] = {}  # row -> what its token sees
        # A model writes the keys of all tokens of a layer before any is read, so a slice may read what another writes
        # in this plan. Here a value is made from the one before it: whoever is read begins earlier, and goes first.
        for s, piece in sorted(enumerate(plan.slices), key=lambda at: at[1].start):
            low, high = plan.cu_seqlens[s], plan.cu_seqlens[s + 1]
            table, seat = plan.block_tables[s], plan.seats[s]
            assert plan.positions[low:high] == list(range(piece.start, piece.start + piece.length))
            assert plan.context_lens[s] == piece.start + piece.length <= plan.max_context
            assert high - low == piece.length <= plan.max_len and (piece.length == 1) == (s < plan.num_decodes)
            for row in range(low, high):
                p = plan.positions[row]
                last = self.pool[table[(p - 1) // B]][(p - 1) % B] if p else 0
                self.pool[table[p // B]][p % B] = hash((last, ids[row]))
                first = 0 if window is None else max(0, p - window + 1)
                assert all(self.rows[seat, at] == table[at] for at in range(first // B, p // B + 1))
                seen = [self.pool[table[q // B]][q % B] for q in range(first, p + 1)]
                assert None not in seen
                outputs[row] = seen  # type: ignore[assignment]
            self.scored.setdefault(piece.sequence.request.id, []).extend(piece.scored)
        return [draw(outputs[r], s.index) for s, r in zip(plan.sampled, plan.sample_rows, strict=True)]

    def check(self) -> None:
        if self.audit:
            self.scheduler.check_integrity()


def engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    depth: int = 1,
    audit: bool = True,
    prefix_cache: bool = True,
    **config: int,
) -> FakeEngine:
    limits = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 32, **config}
    blocks = Blocks(num_blocks, block_size, prefix_cache=prefix_cache)
    return FakeEngine(Scheduler(SchedulerConfig(eos_ids=(EOS,), **limits), blocks), depth=depth, audit=audit)  # type: ignore[arg-type]


def ask(
    id: str, prompt: list[int] | int, *, priority: int = 0, arrival: float = 0.0, start: int = 0, **sampling: int
) -> Request:
    tokens = list(range(2, 2 + prompt)) if isinstance(prompt, int) else prompt
    return Request(
        id=id, prompt=tuple(tokens), priority=priority, arrival=arrival, score_start=start,
        sampling=Sampling(stop_token_ids=(STOP,), **sampling),  # type: ignore[arg-type]
    )  # fmt: skip


def drain(fake: FakeEngine, bound: int = 10_000) -> None:
    while fake.scheduler.has_work:
        assert fake.step(), "requests are alive and no plan can be made"
        assert fake.steps <= bound, "no progress"


def assert_empty(fake: FakeEngine) -> None:
    fake.scheduler.check_integrity()
    assert fake.scheduler.blocks.used_count == 0
    assert not fake.scheduler.has_work and not fake.scheduler.running and not fake.scheduler.waiting


# --- the property ----------------------------------------------------------------------------------------------------

arrivals = st.fixed_dictionaries({
    "at": st.integers(0, 12),
    "family": st.integers(0, 2),  # prompts of one family share their beginning
    "shared": st.integers(0, 20),
    "own": st.integers(1, 12),
    "repeat": st.booleans(),  # the same prompt as the arrival before
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
    "max_prefill_chunk": st.sampled_from([None, None, 1, 5]),
    "window": st.sampled_from([None, None, 2, 5, 9]),
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


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(system=systems, load=st.lists(arrivals, min_size=1, max_size=10))
def test_every_request_gets_the_text_it_would_get_alone(system: dict, load: list[dict]) -> None:
    system = dict(system)
    system["max_num_batched_tokens"] = system["max_num_seqs"] + system.pop("spare")
    fake = engine(**system)
    scheduler, window = fake.scheduler, system["window"]
    requests = [make(i, load) for i in range(len(load))]
    served: dict[str, Request] = {}
    aborted: set[str] = set()
    stopped: set[tuple[str, int]] = set()
    bound = 20 + 2 * sum(r.sampling.n * 2 * (len(r.prompt) + r.sampling.max_tokens) for r in requests)
    clock = 0
    while clock <= 20 or scheduler.has_work:
        for i, a in enumerate(load):
            if a["at"] == clock:
                try:
                    scheduler.add(requests[i])
                    served[requests[i].id] = requests[i]
                except Unservable:
                    assert_unservable(fake, requests[i])
            if a["abort_after"] is not None and a["at"] + a["abort_after"] == clock and scheduler.abort(requests[i].id):
                aborted.add(requests[i].id)
            if a["stop_after"] is not None and a["at"] + a["stop_after"] == clock and scheduler.stop(requests[i].id, 0):
                stopped.add((requests[i].id, 0))
            scheduler.check_integrity()
        assert fake.step() or not scheduler.has_work, "requests are alive and no plan can be made"
        assert fake.steps <= bound, "no progress"
        clock += 1
    assert_empty(fake)
    for id, request in served.items():
        for choice, text in enumerate(alone(request, window)):
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
    """A refusal is right only if the request would not fit the pool, the model or the seats alone."""
    blocks, config = fake.scheduler.blocks, fake.scheduler.config
    positions = len(request.prompt) + max(request.sampling.max_tokens - 1, 0)
    assert positions > blocks.num_blocks * blocks.block_size - (config.window is not None) * blocks.block_size or (
        request.sampling.n > config.max_num_seqs or positions >= config.max_model_len
    )


# --- the soak --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_ten_thousand_requests_with_random_aborts_leave_nothing(depth: int) -> None:
    rng = random.Random(depth)
    fake = engine(num_blocks=20, max_num_seqs=16, max_num_batched_tokens=64, depth=depth, audit=False)
    scheduler, alive = fake.scheduler, []
    for number in range(10_000):
        prompt = [2 + (rng.randrange(3) + i) % 19 for i in range(rng.randrange(1, 24))]
        request = ask(
            f"r{number}", prompt, arrival=number / 50, max_tokens=rng.randrange(1, 8), n=rng.choice([1, 1, 1, 3]),
            priority=rng.randrange(-1, 2),
        )  # fmt: skip
        scheduler.add(request)
        alive.append(request.id)
        if rng.random() < 0.4:
            scheduler.abort(alive.pop(rng.randrange(len(alive))))
        if number % 3 == 0 or len(scheduler.waiting) > 20:
            fake.step()
        if number % 500 == 0:
            scheduler.check_integrity()
        alive = alive[-40:]
    drain(fake, bound=100_000)
    assert_empty(fake)
    assert scheduler.preemptions > 0 and scheduler.hit_tokens > 0, "the soak was too easy"
    assert len(scheduler._seats) == 16 and not scheduler.requests


# --- single behaviours -----------------------------------------------------------------------------------------------


def test_decodes_and_chunks_of_prompts_share_one_budget() -> None:
    fake = engine(max_num_batched_tokens=16)
    fake.scheduler.add(ask("short", 4, max_tokens=20, min_tokens=20))
    fake.step()
    fake.scheduler.add(ask("long", [2 + i % 19 for i in range(40)], max_tokens=2, arrival=1.0))
    plan = fake.scheduler.plan()
    assert plan is not None
    assert [(s.sequence.request.id, s.length, s.samples) for s in plan.slices] == [
        ("short", 1, True),
        ("long", 15, False),
    ]
    assert plan.num_tokens == 16 and plan.num_decodes == 1 and plan.sample_rows == [0]


def test_a_capped_chunk_lets_a_short_prompt_go_along_with_a_long_one() -> None:
    fake = engine(max_num_batched_tokens=16, max_prefill_chunk=8)
    fake.scheduler.add(ask("long", [2 + i % 19 for i in range(100)]))
    fake.scheduler.add(ask("short", [20] * 5, arrival=1.0))
    plan = fake.scheduler.plan()
    assert plan is not None and [s.length for s in plan.slices] == [8, 5]


def test_priority_goes_first_and_age_catches_up() -> None:
    def order(*requests: Request) -> list[str]:
        fake = engine(max_num_seqs=1)
        for r in requests:
            fake.scheduler.add(r)
        return [s.request.id for s in fake.scheduler.waiting]

    assert order(ask("a", 3), ask("b", 3, priority=-1, arrival=1.0)) == ["b", "a"]
    assert order(ask("a", 3), ask("b", 3, priority=-1, arrival=31.0)) == ["a", "b"]  # 30 s are one step of priority
    assert order(ask("a", 3), ask("b", 3), ask("c", 3)) == ["a", "b", "c"]


def test_a_request_that_does_not_fit_yet_is_not_passed_by_a_smaller_one() -> None:
    fake = engine(num_blocks=8, block_size=4)
    fake.scheduler.add(ask("first", 12, max_tokens=8, min_tokens=8))
    fake.step()
    fake.scheduler.add(ask("large", [3] * 24, max_tokens=2, arrival=1.0))
    fake.scheduler.add(ask("small", [4] * 2, max_tokens=2, arrival=2.0))
    fake.step()
    assert [s.request.id for s in fake.scheduler.waiting] == ["large", "small"]
    drain(fake)
    assert_empty(fake)


def test_preemption_takes_the_lowest_rank_and_resumes_from_the_prefix_cache() -> None:
    fake = engine(num_blocks=10, block_size=2)
    requests = [
        ask("old", [5, 6, 7], max_tokens=14, min_tokens=14),
        ask("new", [8, 9, 10, 11], max_tokens=10, min_tokens=10, arrival=1.0),
    ]
    for r in requests:
        fake.scheduler.add(r)
    while not fake.scheduler.preemptions:
        assert fake.step()
    assert [s.request.id for s in fake.scheduler.running] == ["old"]
    drain(fake)
    assert fake.scheduler.hit_tokens > 0
    assert {r.id: [fake.texts[r.id][0]] for r in requests} == {r.id: alone(r, None) for r in requests}


def test_choices_share_the_prompt_and_copy_the_last_block_when_they_write() -> None:
    fake = engine(block_size=4)
    request = ask("r", 10, n=3, max_tokens=6, min_tokens=6)
    fake.scheduler.add(request)
    fake.step()
    assert fake.scheduler.blocks.used_count == 3, "three choices on the three blocks of one prompt"
    plan = fake.scheduler.plan()
    assert plan is not None and len(plan.copies) == 2, "the last to write needs no copy"
    assert {len(s.sequence.tokens) for s in plan.slices} == {11}
    fake.drawn.append((plan, fake.run(plan)))
    drain(fake)
    assert [fake.texts["r"][i] for i in range(3)] == alone(request, None)
    assert_empty(fake)


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    fake = engine(block_size=4)
    fake.scheduler.add(ask("cold", 8, max_tokens=1))
    drain(fake)
    fake.scheduler.add(ask("warm", 8, max_tokens=1))
    plan = fake.scheduler.plan()
    assert plan is not None and [(s.start, s.length) for s in plan.slices] == [(4, 4)]


def test_cached_blocks_that_a_prompt_hits_do_not_count_as_room_for_its_rest() -> None:
    fake = engine(num_blocks=6, block_size=2)
    fake.scheduler.add(ask("cold", 8, max_tokens=1))
    drain(fake)
    fake.scheduler.add(ask("holder", [20, 21, 22], max_tokens=5, min_tokens=5))
    fake.step()
    assert (fake.scheduler.blocks.free_count, fake.scheduler.blocks.cached_count) == (0, 4)
    fake.scheduler.add(ask("warm", 12, max_tokens=1, arrival=1.0))
    fake.step()
    assert [s.request.id for s in fake.scheduler.waiting] == ["warm"]
    drain(fake)
    assert_empty(fake)


def test_prompts_of_one_plan_share_what_the_first_of_them_computes() -> None:
    fake = engine(block_size=4, max_num_batched_tokens=24)
    requests = [ask(name, [*range(2, 14), *own], max_tokens=2, min_tokens=2) for name, own in
                {"a": [3, 4], "b": [5, 6, 7], "c": [3, 4, 8]}.items()]  # fmt: skip
    for request in requests:
        fake.scheduler.add(request)
    plan = fake.scheduler.plan()
    assert plan is not None and [(s.start, s.length) for s in plan.slices] == [(0, 14), (12, 3), (12, 3)]
    assert fake.scheduler.hit_tokens == 24 and fake.scheduler.blocks.used_count == 3 + 3
    fake.drawn.append((plan, fake.run(plan)))
    drain(fake)
    assert {r.id: [fake.texts[r.id][0]] for r in requests} == {r.id: alone(r, None) for r in requests}


def test_what_an_aborted_owner_computes_is_there_for_those_that_share_it() -> None:
    fake = engine(block_size=4)
    follower = ask("follower", 14, max_tokens=3, min_tokens=3, arrival=1.0)
    fake.scheduler.add(ask("owner", 13, max_tokens=1))
    fake.scheduler.add(follower)
    plan = fake.scheduler.plan()
    assert plan is not None and [(s.start, s.length) for s in plan.slices] == [(0, 13), (12, 2)]
    assert fake.scheduler.abort("owner")
    fake.scheduler.check_integrity()
    fake.drawn.append((plan, fake.run(plan)))  # the plan stands: it runs whoever is still there
    drain(fake)
    assert [fake.texts["follower"][0]] == alone(follower, None)
    assert_empty(fake)


def test_wanted_prompt_logprobs_are_computed_though_cached() -> None:
    fake = engine(block_size=4)
    fake.scheduler.add(ask("cold", 16, max_tokens=1))
    drain(fake)
    fake.scheduler.add(ask("all", 16, max_tokens=1, prompt_logprobs=0))
    fake.scheduler.add(ask("tail", 16, max_tokens=0, prompt_logprobs=0, start=9, arrival=1.0))
    drain(fake)
    assert fake.scored["all"] == list(range(15)) and fake.scored["tail"] == list(range(8, 15))
    assert fake.scheduler.hit_tokens == 8, "positions before the first wanted one may come from the cache"
    assert fake.ends["tail"] == {0: "length"} and "tail" not in fake.texts


def test_a_windowed_model_serves_a_text_longer_than_the_pool() -> None:
    fake = engine(num_blocks=4, block_size=4, window=8)
    request = ask("r", 40, max_tokens=100, min_tokens=100)
    fake.scheduler.add(request)
    most = 0
    while fake.step():
        most = max(most, fake.scheduler.blocks.used_count)
    assert most <= 4 and [fake.texts["r"][0]] == alone(request, 8)
    with pytest.raises(Unservable, match="need 35 KV blocks of 4 tokens, and the pool has 4"):
        engine(num_blocks=4, block_size=4).scheduler.add(request)


def test_an_abort_in_flight_releases_when_the_plan_is_committed() -> None:
    fake = engine(num_blocks=4, block_size=4)
    fake.scheduler.add(ask("r", 10, n=2, max_tokens=4))
    plan = fake.scheduler.plan()
    assert plan is not None and fake.scheduler.abort("r")
    assert fake.scheduler.blocks.used_count == 3, "the plan in flight writes to these"
    assert not fake.scheduler.abort("r") and fake.scheduler.plan() is None
    fake.scheduler.check_integrity()
    assert fake.scheduler.commit(plan, [5, 5]) == []
    assert_empty(fake)


def test_stops_end_a_choice_with_their_reason() -> None:
    fake = engine()
    for name, sampling in {"eos": {}, "ids": {}, "ignored": {"ignore_eos": True}, "early": {"min_tokens": 2}}.items():
        fake.scheduler.add(ask(name, 3, max_tokens=2, **sampling))
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
    fake.scheduler.add(request)
    for _ in range(3):
        fake.step()
    fake.scheduler.restart()
    assert fake.scheduler.blocks.available == fake.scheduler.blocks.free_count == 64
    drain(fake)
    assert [fake.texts["r"][0]] == alone(request, None)


def test_what_can_never_fit_is_refused_with_the_reason() -> None:
    scheduler = engine(num_blocks=4, block_size=4, max_num_seqs=2).scheduler
    with pytest.raises(Unservable, match="make 266 tokens, and the model serves 256"):
        scheduler.add(ask("r", 10, max_tokens=256))
    with pytest.raises(Unservable, match="need 5 KV blocks of 4 tokens, and the pool has 4"):
        scheduler.add(ask("r", 10, max_tokens=8))
    with pytest.raises(Unservable, match="n = 3, and 2 sequences"):
        scheduler.add(ask("r", 4, n=3, max_tokens=2))
    scheduler.add(ask("r", 10, max_tokens=7))
    with pytest.raises(ArgumentError, match="already being served"):
        scheduler.add(ask("r", 4, max_tokens=2))
    with pytest.raises(ArgumentError, match="max_num_batched_tokens = 4"):
        SchedulerConfig(max_model_len=10, max_num_seqs=8, max_num_batched_tokens=4)


def test_plans_are_committed_in_order() -> None:
    fake = engine()
    fake.scheduler.add(ask("r", 4, max_tokens=4))
    first, second = fake.scheduler.plan(), fake.scheduler.plan()
    assert first is not None and second is not None and second.ids == [LATE] and second.late == [(0, 0)]
    assert fake.scheduler.plan() is None, "two plans are in flight"
    with pytest.raises(ArgumentError, match="not the oldest"):
        fake.scheduler.commit(second, [5])
    with pytest.raises(ArgumentError, match="0 tokens for a plan that samples 1"):
        fake.scheduler.commit(first, [])
