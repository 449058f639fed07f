"""An engine for tests of the scheduler: a real KV pool, and a hash function as the model.

The pool is read and written only through the plan (ids, positions, block tables, copies). The value stored for a token
is computed from the previous value, and the next token from all visible values: a wrong block, a stale one or one
released too early changes the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bagu.serve.kv.blocks import ONE_GROUP, Blocks
from bagu.serve.kv.groups import LayerGroup
from bagu.serve.limits import SchedulerConfig
from bagu.serve.plan import LATE, Plan
from bagu.serve.request import Request, Sampling
from bagu.serve.scheduler import Scheduler

VOCAB, EOS, STOP = 23, 0, 1


def draw(seen: list[int], choice: int) -> int:
    return hash((*seen[-64:], len(seen), choice)) % VOCAB


def visible(values: list[int], groups: Sequence[LayerGroup]) -> list[int]:
    """The values that the last token attends to, in each group of layers."""
    n = len(values)
    return [v for g in groups for i, v in enumerate(values) if g.window is None or i < g.first or n - 1 - i < g.window]


def alone(request: Request, groups: Sequence[LayerGroup] = ONE_GROUP) -> list[list[int]]:
    """The reference: one contiguous list of values per choice, without pool and batch."""
    texts = []
    for choice in range(request.sampling.n):
        values: list[int] = []
        text: list[int] = []
        tokens = list(request.prompt)
        while len(text) < request.sampling.max_tokens:
            for token in tokens[len(values) :]:
                values.append(hash((values[-1] if values else 0, token)))
            text.append(draw(visible(values, groups), choice))
            tokens.append(text[-1])
            if text[-1] in (EOS, STOP) and len(text) >= request.sampling.min_tokens:
                break
        texts.append(text)
    return texts


@dataclass
class FakeEngine:
    """Runs plans on a pool of values. With `depth` 2 it plans one step ahead, as the engine does on a GPU."""

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
        """Plan until `depth` plans are in flight, then commit the oldest. False if there is nothing to do."""
        while len(self.drawn) < self.depth and (plan := self.scheduler.plan()) is not None:
            # A CUDA stream runs in order, so running the plan now is equivalent.
            self.drawn.append((plan, self.run(plan)))
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
        B, groups = self.scheduler.blocks.block_size, self.scheduler.blocks.groups
        for source, target in plan.copies:
            self.pool[target] = list(self.pool[source])
        self.rows.update({(row, at): block for row, at, block in plan.table_writes})
        before = self.drawn[-1][1] if self.drawn else []
        ids = list(plan.ids)
        for row, sample in plan.late:
            assert ids[row] == LATE
            ids[row] = before[sample]
        outputs: dict[int, list[int]] = {}  # row -> the values that its token attends to
        # In each layer a model writes the keys of all tokens before any is read, so a slice may read blocks that
        # another slice of the plan writes. Here a value needs the previous one: slices of earlier positions run first.
        for s, piece in sorted(enumerate(plan.slices), key=lambda at: at[1].start):
            low, high = plan.cu_seqlens[s], plan.cu_seqlens[s + 1]
            tables, table_row = plan.block_tables[s], plan.table_rows[s]
            assert plan.positions[low:high] == list(range(piece.start, piece.start + piece.length))
            assert plan.context_lens[s] == piece.start + piece.length <= plan.max_context
            assert high - low == piece.length <= plan.max_len and (piece.length == 1) == (s < plan.num_decodes)
            for row in range(low, high):
                p = plan.positions[row]
                outputs[row] = []
                # A group keeps at least the last position before a new one if its window is 2 or more.
                wide = max(range(len(groups)), key=lambda g: groups[g].window or 1 << 30)
                last = self.pool[tables[wide][(p - 1) // B]][(p - 1) % B] if p else 0
                for g, table in enumerate(tables):
                    self.pool[table[p // B]][p % B] = hash((last, ids[row]))
                    seen = visible(list(range(p + 1)), groups[g : g + 1])
                    own_row = g * self.scheduler.config.max_num_seqs + table_row
                    assert all(self.rows[own_row, at] == table[at] for at in {q // B for q in seen})
                    outputs[row] += [self.pool[table[q // B]][q % B] for q in seen]  # type: ignore[misc]
                assert None not in outputs[row]
            self.scored.setdefault(piece.sequence.request.id, []).extend(piece.scored)
        return [draw(outputs[r], s.index) for s, r in zip(plan.sampled, plan.sample_rows, strict=True)]

    def check(self) -> None:
        if self.audit:
            self.scheduler.queues.check_integrity()


def engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    depth: int = 1,
    audit: bool = True,
    prefix_cache: bool = True,
    groups: Sequence[LayerGroup] = ONE_GROUP,
    **config: int,
) -> FakeEngine:
    limits = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 32, **config}
    blocks = Blocks(num_blocks, block_size, prefix_cache=prefix_cache, groups=groups)
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
    while fake.scheduler.queues.has_work:
        assert fake.step(), "requests are alive and no plan can be made"
        assert fake.steps <= bound, "no progress"


def assert_empty(fake: FakeEngine) -> None:
    fake.scheduler.queues.check_integrity()
    assert fake.scheduler.blocks.used_count == 0
    assert (
        not fake.scheduler.queues.has_work and not fake.scheduler.queues.running and not fake.scheduler.queues.waiting
    )
