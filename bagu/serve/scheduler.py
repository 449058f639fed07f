"""The scheduler: which tokens of which sequences are computed in the next step.

One token budget serves prompts and decodes alike. Every running sequence gets one token of it; what is spare goes to
prompts, in chunks, in the order of rank. So a long prompt slows no decode, and no decode stops a long prompt.

Rank is priority, then age: `priority + arrival / aging_s`, lower first. One step of priority is worth `aging_s` seconds
of waiting, so an old request cannot be passed for ever; and since all requests age alike the order never changes, which
is why nothing is ever preempted back and forth. Requests are admitted strictly in this order (a large one that does not
fit yet is not passed by small ones), a sequence that needs a block takes it from the lowest rank, and so the first in
rank always advances: that is the proof that work ends. A waiting request does not preempt a running one.

Preemption is by recompute: the blocks are released but stay findable, so the sequence mostly finds them again.

The blocks that a chunk of a prompt fills are registered when it is planned, so that prompts which begin alike share
them from the same step on: 64 of them that arrive together compute their common beginning once. That is sound since
every plan is run, in order, and a forward writes the keys of all its tokens in a layer before a query reads any; who
is planned is neither preempted nor released before its plan is committed. An engine whose forward fails is at its end.

Two plans may be in flight: `plan()` may be called once before the last plan is committed. Tokens still to be drawn are
LATE in the new plan, a sequence that turns out finished has computed one token for nothing, and blocks go back to the
pool only when the last plan that uses them is committed.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence as Seq
from itertools import count
from operator import attrgetter

from bagu.errors import ArgumentError
from bagu.serve.audit import audit
from bagu.serve.kv.blocks import Blocks, Table
from bagu.serve.limits import SchedulerConfig, check_servable
from bagu.serve.plan import Draft, Plan, Sequence, Slice
from bagu.serve.request import Finish, Request, TokenEvent, TokenLogprob

__all__ = ["Scheduler", "SchedulerConfig"]

MAX_IN_FLIGHT = 2
RANK = attrgetter("rank")


class Scheduler:
    """Requests in, plans out; then drawn tokens in, events out."""

    def __init__(self, config: SchedulerConfig, blocks: Blocks) -> None:
        self.config, self.blocks = config, blocks
        self.running: list[Sequence] = []  # by rank: they hold a table and a seat
        self.waiting: list[Sequence] = []  # by rank: they hold nothing
        self.requests: dict[str, list[Sequence]] = {}  # the choices alive, also those that wait to fork
        self.in_flight: deque[Plan] = deque()
        self.preemptions = 0
        self.prompt_tokens = 0  # tokens of sequences that began to run, and
        self.hit_tokens = 0  # how many of them were in the prefix cache
        self._seats = list(range(config.max_num_seqs - 1, -1, -1))
        self._writes: list[tuple[int, int, int]] = []
        self._serial = count()
        self._number = count()

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.in_flight)

    def add(self, request: Request) -> None:
        """Queue a request, or raise Unservable if it could not run even alone. It holds nothing until it is planned."""
        if request.id in self.requests:
            raise ArgumentError(f"request {request.id!r} is already being served", hint="ids are unique")
        check_servable(request, self.config, num_blocks=self.blocks.num_blocks, block_size=self.blocks.block_size)
        sampling, serial = request.sampling, next(self._serial)
        age = request.priority + request.arrival / self.config.aging_s
        stops = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else self.config.eos_ids))
        choices = [Sequence(request, i, (age, serial, i), stops) for i in range(sampling.n)]
        choices[0].forks = choices[1:]
        self.requests[request.id] = choices
        insort(self.waiting, choices[0], key=RANK)

    def abort(self, request_id: str) -> bool:
        """End all choices of a request; False where none is alive. No event: the caller knows. Blocks that no plan in
        flight uses are free on return, the others when that plan is committed."""
        choices = list(self.requests.get(request_id, ()))
        for sequence in choices:
            self._finish(sequence)
        return bool(choices)

    def stop(self, request_id: str, index: int) -> bool:
        """End one choice as `abort` does, for what its text says; False where it is not alive or has no token yet."""
        for sequence in self.requests.get(request_id, ()):
            if sequence.index == index and sequence.num_output:
                self._finish(sequence)
                return True
        return False

    def plan(self) -> Plan | None:
        """The next step, or None: nothing waits, or what waits needs a plan in flight to be committed first.

        Run it, before any later one: others are already planned to read what it writes.
        """
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            return None
        draft = Draft()
        spare = self.config.max_num_batched_tokens - len(self.running)
        preempted = self.preemptions
        spare = self._advance(draft, spare)
        if preempted == self.preemptions:  # otherwise the blocks just taken from a running one would go to a new one
            self._admit(draft, spare)
        if not draft.decodes and not draft.chunks:
            return None
        writes, self._writes = self._writes, []
        plan = draft.finish(next(self._number), writes)
        self.in_flight.append(plan)
        return plan

    def commit(
        self, plan: Plan, tokens: Seq[int], logprobs: Seq[TokenLogprob | None] | None = None
    ) -> list[TokenEvent]:
        """The plan was computed and drew `tokens`, one for each of `plan.sampled`. Returns their events.

        Sequences that end, and those that ended while the plan was in flight, have released what they held on return.
        """
        if not self.in_flight or self.in_flight[0] is not plan:
            raise ArgumentError(
                f"plan {plan.number} is not the oldest in flight", hint="commit plans in the order they were made"
            )
        if len(tokens) != len(plan.sampled):
            raise ArgumentError(f"{len(tokens)} tokens for a plan that samples {len(plan.sampled)}")
        self.in_flight.popleft()
        events = [event for piece in plan.slices if (event := self._computed(piece)) is not None]
        for i, (sequence, token) in enumerate(zip(plan.sampled, tokens, strict=True)):
            sequence.pending -= 1
            if not sequence.finished:
                detail = logprobs[i] if logprobs is not None else None
                events.append(self._drawn(sequence, token, detail))
        return events

    def restart(self) -> None:
        """Compute everything anew: running sequences go back to the queue and the prefix cache is emptied."""
        if self.in_flight:
            raise ArgumentError(f"{len(self.in_flight)} plans are in flight", hint="commit them first")
        while self.running:
            self._preempt(self.running[-1])
        self.blocks.forget()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless blocks, tables, seats and queues agree. For tests, and when idle."""
        self.blocks.check_integrity()
        holders = {s.sequence for plan in self.in_flight for s in plan.slices} | set(self.running)
        audit(self.config, self.blocks, holders, self.running, self.waiting, self.requests, self._seats)

    def _advance(self, draft: Draft, spare: int) -> int:
        """Plan what the running sequences need, by rank; returns the tokens left."""
        running, cap, B, i = self.running, self.config.max_prefill_chunk, self.blocks.block_size, 0
        while i < len(running):  # preemption shortens it from the end
            sequence = running[i]
            i += 1
            start, known = sequence.planned, len(sequence.tokens) + sequence.pending
            todo = (known if known < sequence.end else sequence.end) - start
            if todo <= 0 or (sequence.forks and sequence.pending):  # its last token is in flight; or its forks are
                continue
            length = 1 if todo == 1 else min(todo, spare + 1, todo if cap is None else cap)
            table = sequence.table
            assert table is not None
            if table.shared or start + length > len(table.blocks) * B:
                length = self._make_room(draft, sequence, table, length)
                if not length:
                    continue
            spare -= length - 1
            self._take_up(draft, table, Slice(sequence, start, length, start + length == known and sequence.draws))
        return spare

    def _take_up(self, draft: Draft, table: Table, piece: Slice) -> None:
        if piece.length == 1:  # its token may be LATE: what it fills is registered when it is computed
            draft.decodes.append(piece)
            return
        draft.chunks.append(piece)
        self.blocks.register(table, piece.sequence.tokens, piece.sequence.keys, piece.start + piece.length)

    def _make_room(self, draft: Draft, sequence: Sequence, table: Table, length: int) -> int:
        """Reserve blocks for the next `length` tokens, or for as many as can be had, preempting lower ranks."""
        start = sequence.planned
        while self.blocks.need(table, start, start + length) > self.blocks.available:
            victim = next((s for s in reversed(self.running) if not s.in_flight or s is sequence), sequence)
            if victim.rank <= sequence.rank:
                length = max(0, min(length, self.blocks.room(table, start)))
                break
            self._preempt(victim)
        if length:
            self._reserve(draft, sequence, table, start + length)
        return length

    def _reserve(self, draft: Draft, sequence: Sequence, table: Table, upto: int) -> None:
        start, before = sequence.planned, len(table.blocks)
        copy = self.blocks.reserve(table, start, upto)
        if copy is not None:
            draft.copies.append(copy)
            self._writes.append((sequence.seat, start // self.blocks.block_size, copy[1]))
        self._writes.extend((sequence.seat, at, table.blocks[at]) for at in range(before, len(table.blocks)))

    def _admit(self, draft: Draft, spare: int) -> None:
        """Begin to run what waits, by rank, while there are tokens, seats and blocks for the first of the queue."""
        cap, B = self.config.max_prefill_chunk, self.blocks.block_size
        while self.waiting and spare > 0:
            sequence = self.waiting[0]
            known = min(len(sequence.tokens), sequence.end)
            if 1 + len(sequence.forks) > len(self._seats):
                return
            hits = self.blocks.match(sequence.tokens, sequence.keys, limit=self._hit_limit(sequence, known))
            dead = self.config.dead_blocks(len(hits) * B, B)
            most = self.config.max_blocks(known, B)
            idle = sum(not self.blocks.refs[b] for b in hits[dead:])
            if min(most, -(-known // B) - dead) - (len(hits) - dead) > self.blocks.available - idle:
                return
            self.waiting.pop(0)
            self._begin(sequence, hits, dead)
            table = sequence.table
            assert table is not None
            start = sequence.planned
            length = min(known - start, spare, known if cap is None else cap, self.blocks.room(table, start))
            assert length > 0, "admitted without room for a token"
            self._reserve(draft, sequence, table, start + length)
            spare -= length
            samples = start + length == len(sequence.tokens) and sequence.draws
            self._take_up(draft, table, Slice(sequence, start, length, samples))

    def _begin(self, sequence: Sequence, hits: list[int], dead: int) -> None:
        """Seat a sequence (and those that will fork from it) on the blocks of a match."""
        sequence.table = self.blocks.open(hits, dead=dead)
        sequence.planned = sequence.computed = sequence.hit_tokens = len(hits) * self.blocks.block_size
        for choice in (sequence, *sequence.forks):
            choice.seat = self._seats.pop()
        self._writes.extend((sequence.seat, at, block) for at, block in enumerate(sequence.table.blocks))
        self.prompt_tokens += len(sequence.tokens)
        self.hit_tokens += sequence.hit_tokens
        if sequence.cached is None:
            sequence.cached = sequence.hit_tokens
            sequence.started = time.perf_counter()
        insort(self.running, sequence, key=RANK)

    def _hit_limit(self, sequence: Sequence, known: int) -> int:
        """How many leading tokens may come from the cache: all but the last, whose logits are needed, and none whose
        prompt logprob is still wanted."""
        limit = known - 1
        return min(limit, sequence.score_next) if sequence.scores else limit

    def _computed(self, piece: Slice) -> TokenEvent | None:
        """The slice's KV exists now: register what a decode has filled, give back what the window has passed, fork. An
        event where this was all: the request wants logprobs of its prompt and no token."""
        sequence, start, length, samples = piece
        sequence.in_flight -= 1
        if sequence.finished:
            if not sequence.in_flight:
                self._release(sequence)
            return None
        computed = sequence.computed = start + length
        table = sequence.table
        assert table is not None
        if computed // self.blocks.block_size > table.registered:
            self.blocks.register(table, sequence.tokens, sequence.keys, computed)
        if self.config.window is not None:
            self.blocks.drop(table, self.config.dead_blocks(computed, self.blocks.block_size))
        if sequence.scores and computed > sequence.score_next:
            sequence.score_next = computed
        if samples and sequence.forks:
            self._fork(sequence, table)
        if computed < sequence.end or sequence.draws:
            return None
        self._finish(sequence)
        return TokenEvent(sequence.request.id, sequence.index, None, None, None, "length", None, sequence.cached or 0)

    def _fork(self, sequence: Sequence, table: Table) -> None:
        for child in sequence.forks:
            child.table = self.blocks.fork(table)
            child.planned = child.computed = sequence.computed
            child.keys = sequence.keys.copy()
            self._writes.extend((child.seat, at, block) for at, block in enumerate(child.table.blocks))
            insort(self.running, child, key=RANK)
        sequence.forks = []

    def _drawn(self, sequence: Sequence, token: int, detail: TokenLogprob | None) -> TokenEvent:
        """Append a drawn token, and end the choice if it is the last."""
        request, tokens = sequence.request, sequence.tokens
        tokens.append(token)
        drawn, reason = len(tokens) - sequence.num_prompt, None
        finish: Finish | None = None
        if token in sequence.stops and drawn >= request.sampling.min_tokens:
            finish = "stop"
            reason = token if token in request.sampling.stop_token_ids else None
        elif len(tokens) > sequence.end:  # all of max_tokens: the last one has no place in the cache
            finish = "length"
        if finish is not None:
            self._finish(sequence)
        logprob, top = (None, None) if detail is None else detail
        if drawn > 1:
            return TokenEvent(request.id, sequence.index, token, logprob, top, finish, reason)
        cached, started = sequence.cached or 0, sequence.started  # choices that forked have none of their own
        return TokenEvent(request.id, sequence.index, token, logprob, top, finish, reason, cached, started)

    def _finish(self, sequence: Sequence) -> None:
        """Take a sequence out of the queues; release it unless a plan in flight still uses it."""
        sequence.finished = True
        choices = self.requests[sequence.request.id]
        choices.remove(sequence)
        if not choices:
            del self.requests[sequence.request.id]
        for queue in (self.running, self.waiting):
            at = bisect_left(queue, sequence.rank, key=RANK)
            if at < len(queue) and queue[at] is sequence:
                del queue[at]
        if not sequence.in_flight:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back blocks and seats, those of the choices that did not fork yet included."""
        if sequence.table is None:
            return
        self.blocks.release(sequence.table)
        sequence.table = None
        for choice in (sequence, *sequence.forks):
            self._seats.append(choice.seat)
            choice.seat = -1
        sequence.planned = sequence.computed = 0

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue. What was computed stays in the prefix cache until someone needs the blocks."""
        assert not sequence.in_flight, "a plan in flight writes to its blocks"
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=RANK)
        self.preemptions += 1
