"""The sequences of a scheduler: which of them wait and which run, and the blocks and table rows that they hold."""

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from itertools import count
from operator import attrgetter

from bagu.errors import ArgumentError
from bagu.serve.adapters.info import Resident
from bagu.serve.kv.blocks import Blocks, IntegrityError, Prefix, Table
from bagu.serve.limits import SchedulerConfig, check_servable
from bagu.serve.plan import Plan, PlanBuilder, Sequence
from bagu.serve.request import Request
from bagu.serve.speculation.speculator import Speculator

RANK = attrgetter("rank")
AGING_S = 30.0  # seconds of waiting that equal one step of priority


class SequenceQueues:
    """Changes the state of sequences; the scheduler decides when."""

    def __init__(self, config: SchedulerConfig, blocks: Blocks, speculator: Speculator | None = None) -> None:
        self.config, self.blocks, self.speculator = config, blocks, speculator
        self.running: list[Sequence] = []  # by rank: they hold a table and a row of the block tables
        self.waiting: list[Sequence] = []  # by rank: they hold no blocks
        self.requests: dict[str, list[Sequence]] = {}  # unfinished choices, including those that are not forked yet
        self.in_flight: deque[Plan] = deque()
        self.preemptions = 0
        self.looked_up_tokens = 0  # of all admissions, in the prefix cache
        self.hit_tokens = 0  # those of them found there
        self.free_rows = list(range(config.max_num_seqs - 1, -1, -1))  # of the block tables
        self._writes: list[tuple[int, int, int]] = []
        self._serial = count()

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.in_flight)

    def add(self, request: Request, adapter: Resident | None = None) -> None:
        """Queue a request; raises Unservable if it could not run even alone. It takes no block until it is planned."""
        if request.id in self.requests:
            raise ArgumentError(f"there is already a request {request.id!r}", hint="use a unique id")
        check_servable(request, self.config, self.blocks)
        sampling, serial = request.sampling, next(self._serial)
        age = request.priority + request.arrival / AGING_S
        goes_on = sampling.ignore_eos and sampling.grammar is None  # after a complete text of a grammar nothing follows
        stops = frozenset(sampling.stop_token_ids + (() if goes_on else self.config.eos_ids))
        choices = [Sequence(request, i, (age, serial, i), stops, adapter) for i in range(sampling.n)]
        choices[0].forks = choices[1:]
        self.requests[request.id] = choices
        insort(self.waiting, choices[0], key=RANK)

    def abort(self, request_id: str) -> bool:
        """End all choices of a request, without an event; False if none is unfinished. Blocks that no plan in flight
        uses are free on return, the others when that plan is committed."""
        choices = list(self.requests.get(request_id, ()))
        for sequence in choices:
            self.finish(sequence)
        return bool(choices)

    def stop(self, request_id: str, index: int) -> bool:
        """End one choice, as `abort` does, after a stop string; False if it has already ended or has no token yet."""
        for sequence in self.requests.get(request_id, ()):
            if sequence.index == index and sequence.num_output:
                self.finish(sequence)
                return True
        return False

    def restart(self) -> None:
        """Preempt all running sequences and empty the prefix cache, so that all KV is computed again."""
        if self.in_flight:
            raise ArgumentError(f"{len(self.in_flight)} plans are in flight", hint="commit them first")
        while self.running:
            self.preempt(self.running[-1])
        self.blocks.reset_prefix_cache()

    def busy_slots(self) -> set[int]:
        """The slots of the adapters that unfinished requests use."""
        choices = (s for group in self.requests.values() for s in group)
        return {s.adapter.slot for s in choices if s.adapter is not None}

    def check_integrity(self) -> None:
        """Raise IntegrityError unless blocks, tables, rows and queues agree. For tests, and when idle."""
        self.blocks.check_integrity()
        holders = {s.sequence for plan in self.in_flight for s in plan.slices} | set(self.running)
        audit(self.config, self.blocks, holders, self.running, self.waiting, self.requests, self.free_rows)

    def take_writes(self) -> list[tuple[int, int, int]]:
        """The changes of the block tables since the last call, as in `Plan.table_writes`."""
        writes, self._writes = self._writes, []
        return writes

    def reserve(self, builder: PlanBuilder, sequence: Sequence, table: Table, upto: int) -> None:
        """Give a sequence blocks for its positions up to `upto`."""
        start, before = sequence.planned, table.columns
        for group, source, destination in self.blocks.reserve(table, start, upto):
            builder.copies.append((source, destination))
            row = group * self.config.max_num_seqs + sequence.table_row
            self._writes.append((row, start // self.blocks.block_size, destination))
        self._write_row(sequence, table, before)

    def _write_row(self, sequence: Sequence, table: Table, first: int = 0) -> None:
        """Write the table from entry `first` on, each group to its row."""
        for group, blocks in enumerate(table.blocks):
            row = group * self.config.max_num_seqs + sequence.table_row
            self._writes.extend((row, at, blocks[at]) for at in range(first, len(blocks)))

    def register(self, table: Table, sequence: Sequence, computed: int) -> None:
        """Put the blocks that the first `computed` positions fill into the prefix cache."""
        self.blocks.register(table, sequence.content, sequence.keys, computed, sequence.root)

    def begin(self, sequence: Sequence, prefix: Prefix) -> None:
        """Start to run a sequence, with the blocks of a cached prefix at the beginning of its table."""
        sequence.table = self.blocks.new_table(prefix)
        sequence.planned = sequence.computed = prefix.columns * self.blocks.block_size
        for choice in (sequence, *sequence.forks):
            choice.table_row = self.free_rows.pop()
        self._write_row(sequence, sequence.table)
        if self.blocks.prefix_cache:
            self.looked_up_tokens += len(sequence.tokens)
            self.hit_tokens += sequence.computed
        if sequence.cached is None:
            sequence.cached = sequence.computed
            sequence.started = time.perf_counter()
        insort(self.running, sequence, key=RANK)

    def fork(self, sequence: Sequence, table: Table) -> None:
        """Start the other choices of a prompt, which share its blocks."""
        for child in sequence.forks:
            child.table = self.blocks.fork(table)
            child.planned = child.computed = sequence.computed
            child.keys = sequence.keys.copy()
            self._write_row(child, child.table)
            insort(self.running, child, key=RANK)
        sequence.forks = []

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence from the queues; release it unless a plan in flight still uses it."""
        sequence.finished = True
        if self.speculator is not None:
            self.speculator.forget(sequence)
        choices = self.requests[sequence.request.id]
        choices.remove(sequence)
        if not choices:
            del self.requests[sequence.request.id]
        for queue in (self.running, self.waiting):
            at = bisect_left(queue, sequence.rank, key=RANK)
            if at < len(queue) and queue[at] is sequence:
                del queue[at]
        if not sequence.in_flight:
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Release blocks and rows, including those of choices that are not forked yet."""
        if sequence.table is None:
            return
        self.blocks.release(sequence.table)
        sequence.table = None
        for choice in (sequence, *sequence.forks):
            self.free_rows.append(choice.table_row)
            choice.table_row = -1
        sequence.planned = sequence.computed = 0

    def preempt(self, sequence: Sequence) -> None:
        """Return a sequence to the waiting queue. Its full blocks stay in the prefix cache until they are reused."""
        assert not sequence.in_flight, "a sequence in a plan in flight was preempted"
        self.running.remove(sequence)
        self.release(sequence)
        insort(self.waiting, sequence, key=RANK)
        self.preemptions += 1


def audit(
    config: SchedulerConfig,
    blocks: Blocks,
    holders: Set[Sequence],
    running: Seq[Sequence],
    waiting: Seq[Sequence],
    requests: Mapping[str, Seq[Sequence]],
    free_rows: Seq[int],
) -> None:
    """Raise IntegrityError with the names of all violated invariants. `holders` are the sequences that are running or
    in a plan in flight.
    """
    queues, B = (running, waiting), blocks.block_size
    rows = [s.table_row for h in holders for s in (h, *h.forks)]
    queued = {s for queue in queues for h in queue for s in (h, *h.forks)}
    tables = {h: h.table for h in holders if h.table is not None}
    checks = {
        "exactly the running sequences have a table": len(tables) == len(holders)
        and set(tables.values()) == blocks.tables,
        "rows of the block tables are taken once": sorted([*rows, *free_rows]) == list(range(config.max_num_seqs)),
        "queues are sorted by rank": all(list(q) == sorted(q, key=lambda s: s.rank) for q in queues),
        "every unfinished sequence is in a queue": queued == {s for choices in requests.values() for s in choices},
        "waiting sequences hold no blocks": all(s.table is None and not s.planned and not s.in_flight for s in waiting),
        "tables cover all planned positions": all(h.planned <= t.columns * B for h, t in tables.items()),
        "only blocks outside the window are released": all(
            len(dead) <= len(group.dead(h.computed, B))
            for h, t in tables.items()
            for dead, group in zip(t.dead, blocks.groups, strict=True)
        ),
        "registered blocks have the tokens of their sequence": all(_holds_its_tokens(blocks, h) for h in tables),
    }
    broken = [name for name, holds in checks.items() if not holds]
    if broken:
        raise IntegrityError(f"the scheduler's state is inconsistent; violated: {'; '.join(broken)}")


def _holds_its_tokens(blocks: Blocks, sequence: Sequence) -> bool:
    """Whether every registered block of the sequence's table was computed from the sequence's tokens."""
    table, B = sequence.table, blocks.block_size
    assert table is not None
    for own, dead in zip(table.blocks, table.dead, strict=True):
        for at in (i for i in range(len(own)) if i not in dead):
            content = blocks.contents[own[at]]
            if content is not None and content.tokens != tuple(sequence.content[at * B : (at + 1) * B]):
                return False
    return True
