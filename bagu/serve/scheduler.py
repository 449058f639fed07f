"""The scheduler: chooses the tokens to compute in the next step. queues.py has the sequences and what they hold.

Prefill and decode share one token budget. Every running sequence gets one token of it; the rest goes to prompts, in
chunks, in order of rank. So a long prompt does not delay decodes, and decodes do not block a long prompt.

Rank combines priority and age: `priority + arrival / AGING_S`, lower first. One step of priority equals `AGING_S`
seconds of waiting, so a low priority delays a request but cannot starve it. The rank of a request never changes, so two
requests cannot preempt each other in turn. Requests are admitted strictly by rank: small requests do not overtake a
large one that does not fit yet. A sequence that needs a block preempts the running sequence of lowest rank. So the
first in rank always advances, and therefore all requests finish. A waiting request does not preempt a running one.

Preemption is by recompute: the blocks are released but stay in the prefix cache, where the sequence usually finds them
again.

The blocks that a prompt chunk fills are registered when the chunk is planned, so requests in the same step already
share them: 64 prompts that arrive together compute their common prefix once. This is correct for two reasons. Every
plan is run, in order, and in each layer a forward writes the keys of all its tokens before a query reads them. And a
planned sequence is neither preempted nor released before its plan is committed. If a forward raises, the engine cannot
be used any more.

Two plans may be in flight: `plan()` may be called once more before the last plan is committed. Tokens that are not
sampled yet are LATE in the new plan. A sequence that turns out to be finished has computed one token too many. Blocks
return to the pool when the last plan that uses them is committed.

With speculation a sequence may get drafted tokens after its last known one (speculation/speculator.py). Its next
position depends on how many of them are accepted, so a plan with drafts is committed before the next one is made.
Drafts take available blocks and preempt no sequence. A block is registered in the prefix cache when the tokens that
fill it are sampled, so a rejected draft is never in it: its position is written again by the sampled token.

With a grammar, tokens may be forced: only they can follow the sampled one (constrain/masks.py). They are appended at
once, and computed together by the next plan. So a sequence with a grammar is planned when all its tokens are known: if
steps overlap, it is in every second one.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import count

from bagu.errors import ArgumentError
from bagu.serve.images.prompt import EncoderBudget
from bagu.serve.kv.blocks import Blocks, Table
from bagu.serve.limits import SchedulerConfig
from bagu.serve.plan import NO_DRAFT, SHORT, Plan, PlanBuilder, Sequence, Slice
from bagu.serve.queues import SequenceQueues
from bagu.serve.request import Finish, TokenEvent, TokenLogprob
from bagu.serve.speculation.speculator import Candidate, Speculator

MAX_IN_FLIGHT = 2


class Scheduler:
    """Plans the sequences of `queues`, and turns the sampled tokens of a plan into events."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: Blocks,
        speculator: Speculator | None = None,
        encoder: EncoderBudget | None = None,
    ) -> None:
        self.config, self.blocks, self.speculator, self.encoder = config, blocks, speculator, encoder
        self.queues = SequenceQueues(config, blocks, speculator)
        self._step_tokens = config.max_num_batched_tokens  # lower after a step that ran out of memory
        self._number = count()

    def plan(self) -> Plan | None:
        """The next step; None if there is nothing to run, or a plan in flight must be committed first.

        Every plan must be run, in order: later plans read the KV that it writes.
        """
        if len(self.queues.in_flight) >= MAX_IN_FLIGHT or any(plan.num_drafts for plan in self.queues.in_flight):
            return None
        builder = PlanBuilder()
        if self.encoder is not None:
            self.encoder.begin()
        # Below 0 if the choices of one request are more than `limit_step` allows: each gets a token nevertheless.
        spare = max(self._step_tokens - len(self.queues.running), 0)
        preempted = self.queues.preemptions
        spare = self._advance(builder, spare, self._drafts(spare))
        if preempted == self.queues.preemptions:  # else the freed blocks are for running sequences, not a new one
            self._admit(builder, spare)
        if not builder.decodes and not builder.short and not builder.chunks:
            return None
        plan = builder.finish(next(self._number), self.queues.take_writes())
        self.queues.in_flight.append(plan)
        return plan

    def commit(
        self,
        plan: Plan,
        tokens: Seq[int],
        logprobs: Seq[float | TokenLogprob | None] | None = None,
        forced: Mapping[Sequence, Seq[int]] | None = None,
    ) -> list[TokenEvent]:
        """Record that a plan was run and sampled `tokens`, one for each of `plan.sampled`. Returns their events. What
        was sampled after a rejected draft is ignored. `forced` are the tokens that must follow those of a sequence.

        On return, sequences that finish here or were aborted while the plan was in flight have released their blocks.
        """
        if not self.queues.in_flight or self.queues.in_flight[0] is not plan:
            raise ArgumentError(
                f"plan {plan.number} is not the oldest in flight", hint="commit plans in the order of their creation"
            )
        if len(tokens) != len(plan.sampled):
            raise ArgumentError(f"{len(tokens)} tokens for a plan that samples {len(plan.sampled)}")
        self.queues.in_flight.popleft()
        events = [event for piece in plan.slices if (event := self._commit_slice(piece)) is not None]
        rejected: Sequence | None = None
        for i, (sequence, token, draft) in enumerate(zip(plan.sampled, tokens, plan.next_drafts, strict=True)):
            sequence.pending -= 1
            if sequence.finished or sequence is rejected:
                continue
            detail = logprobs[i] if logprobs is not None else None
            events.append(self._append_token(sequence, token, detail))
            if forced and sequence in forced:
                events += self._append_forced(sequence, forced[sequence])
            if token == draft:
                self._accept_draft(sequence)
            elif draft != NO_DRAFT:
                rejected = sequence
        return events

    def cancel(self) -> None:
        """Drop the plans in flight. All KV is computed again: blocks that a plan was to fill may already be in the
        prefix cache."""
        while self.queues.in_flight:
            plan = self.queues.in_flight.popleft()
            for sequence in plan.sampled:
                sequence.pending -= 1
            for piece in plan.slices:
                piece.sequence.in_flight -= 1
                if piece.sequence.finished and not piece.sequence.in_flight:
                    self.queues.release(piece.sequence)
        self.queues.restart()

    def limit_step(self, tokens: int) -> int:
        """Plan steps of at most `tokens` tokens from now on, or fewer if that was the limit; returns the limit."""
        self._step_tokens = min(self._step_tokens, max(tokens, 1))
        return self._step_tokens

    def _drafts(self, spare: int) -> Mapping[Sequence, Seq[int]]:
        """Drafts for running sequences whose next slice would be one token, at most `spare` in all."""
        if self.speculator is None:
            return {}
        candidates = []
        for sequence in self.queues.running:
            start, table = sequence.planned, sequence.table
            if start + 1 == len(sequence.tokens) + sequence.pending and not sequence.forks and table is not None:
                candidates.append(Candidate(sequence, min(sequence.end - start - 1, self._draft_room(table, start))))
        return self.speculator.drafts(candidates, len(self.queues.running), spare)

    def _draft_room(self, table: Table, start: int) -> int:
        """How many drafts may follow position `start`: in blocks that the table has, or that would be left if every
        running sequence took one more."""
        columns = table.columns + max(self.blocks.available // len(table.blocks) - len(self.queues.running), 0)
        return max(columns * self.blocks.block_size - start - 1, 0)

    def _advance(self, builder: PlanBuilder, spare: int, drafts: Mapping[Sequence, Seq[int]]) -> int:
        """Plan the next tokens of the running sequences, by rank; returns the rest of the token budget."""
        running, B, i = self.queues.running, self.blocks.block_size, 0
        while i < len(running):  # preemption removes sequences from the end
            sequence = running[i]
            i += 1
            start, known = sequence.planned, len(sequence.tokens) + sequence.pending
            if sequence.waits and sequence.pending:
                continue
            todo = (known if known < sequence.end else sequence.end) - start
            if todo <= 0 or (sequence.forks and sequence.pending):  # the last token is in flight, or the fork is
                continue
            length = self._encodable(sequence, start, 1 if todo == 1 else min(todo, spare + 1))
            if not length:
                continue
            table = sequence.table
            assert table is not None
            if table.shared or start + length > table.columns * B:
                length = self._make_room(builder, sequence, table, length)
                if not length:
                    continue
            drafted = drafts.get(sequence, ()) if todo == 1 else ()
            if drafted:
                drafted = drafted[: self._draft_room(table, start)]  # less than for `_drafts`, if others took blocks
                self.queues.reserve(builder, sequence, table, start + 1 + len(drafted))
            samples = start + length == known and sequence.draws
            length += len(drafted)
            spare -= length - 1
            self._add_slice(builder, table, Slice(sequence, start, length, samples, drafted))
        return spare

    def _add_slice(self, builder: PlanBuilder, table: Table, piece: Slice) -> None:
        if piece.drafts:
            builder.short.append(piece)
            return
        if piece.length == 1:  # its token may be LATE, so a block that it fills is registered in `commit`
            builder.decodes.append(piece)
            return
        is_short = piece.length <= SHORT and piece.start >= piece.sequence.num_prompt
        (builder.short if is_short else builder.chunks).append(piece)
        self.queues.register(table, piece.sequence, piece.start + piece.length)

    def _make_room(self, builder: PlanBuilder, sequence: Sequence, table: Table, length: int) -> int:
        """Reserve blocks for the next `length` tokens, preempting lower ranks. Returns how many tokens have room."""
        start = sequence.planned
        while self.blocks.blocks_needed(table, start, start + length) > self.blocks.available:
            victim = next((s for s in reversed(self.queues.running) if not s.in_flight or s is sequence), sequence)
            if victim.rank <= sequence.rank:
                length = max(0, min(length, self.blocks.positions_available(table, start)))
                break
            self.queues.preempt(victim)
        if length:
            self.queues.reserve(builder, sequence, table, start + length)
        return length

    def _admit(self, builder: PlanBuilder, spare: int) -> None:
        """Start waiting sequences, by rank, while there are tokens, rows and blocks for the first of the queue."""
        while self.queues.waiting and spare > 0:
            sequence = self.queues.waiting[0]
            known = min(len(sequence.tokens), sequence.end)
            choices = 1 + len(sequence.forks)
            if choices > len(self.queues.free_rows):
                return
            running = len(self.queues.running)
            if running and running + choices > self._step_tokens:  # each needs a token per step
                return
            limit = self._hit_limit(sequence, known)
            prefix = self.blocks.match(sequence.content, sequence.keys, limit=limit, root=sequence.root)
            at = prefix.columns * self.blocks.block_size
            most = self._encodable(sequence, at, min(known - at, spare))
            if not most or not self.blocks.fits(prefix, known):
                return
            self.queues.waiting.pop(0)
            self.queues.begin(sequence, prefix)
            table = sequence.table
            assert table is not None
            start = sequence.planned
            room = self.blocks.positions_available(table, start)
            length = min(most, room)
            assert length > 0, "admitted a sequence without room for a token"
            self.queues.reserve(builder, sequence, table, start + length)
            spare -= length
            samples = start + length == len(sequence.tokens) and sequence.draws
            self._add_slice(builder, table, Slice(sequence, start, length, samples))

    def _encodable(self, sequence: Sequence, start: int, length: int) -> int:
        """How many of `length` positions the step may compute: images to encode have a budget of their own."""
        images = sequence.request.images
        return length if self.encoder is None or not images else self.encoder.cut(images, start, length)

    def _hit_limit(self, sequence: Sequence, known: int) -> int:
        """How many leading tokens may come from the prefix cache: not the last one, whose logits are needed, and none
        from the first position on whose prompt logprob is still to be computed."""
        limit = known - 1
        return min(limit, sequence.score_next) if sequence.scores else limit

    def _commit_slice(self, piece: Slice) -> TokenEvent | None:
        """Record that a slice's KV is computed: register full blocks, release blocks outside the window, fork. Returns
        an event if this ends the choice: with max_tokens = 0 it ends without a token."""
        sequence, start, length, samples, drafts = piece
        sequence.in_flight -= 1
        if sequence.finished:
            if not sequence.in_flight:
                self.queues.release(sequence)
            return None
        computed = sequence.computed = start + length - len(drafts)
        table = sequence.table
        assert table is not None
        if drafts:
            sequence.planned = computed  # the drafts that are accepted add to it
        if computed // self.blocks.block_size > table.registered:
            self.queues.register(table, sequence, computed)
        self.blocks.release_outside(table, computed)
        if sequence.scores and computed > sequence.score_next:
            sequence.score_next = computed
        if samples and sequence.forks:
            self.queues.fork(sequence, table)
        if computed < sequence.end or sequence.draws:
            return None
        self.queues.finish(sequence)
        return TokenEvent(sequence.request.id, sequence.index, None, None, None, "length", None, sequence.cached or 0)

    def _accept_draft(self, sequence: Sequence) -> None:
        """The last token of the sequence was drafted: its KV is computed already."""
        assert self.speculator is not None
        self.speculator.accepted_tokens += 1
        table = sequence.table
        if sequence.finished or table is None:
            return
        sequence.computed += 1
        sequence.planned = sequence.computed
        if sequence.computed // self.blocks.block_size > table.registered:
            self.queues.register(table, sequence, sequence.computed)

    def _append_forced(self, sequence: Sequence, tokens: Seq[int]) -> list[TokenEvent]:
        """Append tokens that need no sample, up to the end of the choice."""
        assert not sequence.pending, "a plan in flight samples what follows the last token, not the forced ones"
        events: list[TokenEvent] = []
        for token in tokens:
            if sequence.finished:
                break
            events.append(self._append_token(sequence, token, None))
        return events

    def _append_token(self, sequence: Sequence, token: int, detail: float | TokenLogprob | None) -> TokenEvent:
        """Append a sampled token, and end the choice if it is the last."""
        request, tokens = sequence.request, sequence.tokens
        tokens.append(token)
        if sequence.content is not tokens:
            sequence.content.append(token)
        num_output, reason = len(tokens) - sequence.num_prompt, None
        finish: Finish | None = None
        # With a grammar, a stop token is sampled before min_tokens only if no other token can follow.
        if token in sequence.stops and (num_output >= request.sampling.min_tokens or request.sampling.grammar):
            finish = "stop"
            reason = token if token in request.sampling.stop_token_ids else None
        elif len(tokens) > sequence.end:  # max_tokens is reached; the KV of the last token is not computed
            finish = "length"
        if finish is not None:
            self.queues.finish(sequence)
        logprob, top = detail if isinstance(detail, TokenLogprob) else (detail, None if detail is None else ())
        if num_output > 1:
            return TokenEvent(request.id, sequence.index, token, logprob, top, finish, reason)
        cached, started = sequence.cached or 0, sequence.started  # a forked choice has neither
        return TokenEvent(request.id, sequence.index, token, logprob, top, finish, reason, cached, started)
