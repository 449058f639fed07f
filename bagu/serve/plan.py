"""What one step computes: a `Plan` of slices of sequences, made by the scheduler and run by the engine.

There is no prefill and no decode here, only sequences whose KV is behind their tokens: a slice is the next tokens of
one of them. A slice that reaches the last token yields a sample; a chunk of a long prompt does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from bagu.serve.kv.blocks import Table
from bagu.serve.request import Request

__all__ = ["LATE", "Draft", "Plan", "Sequence", "Slice"]

LATE = -1  # stands in `Plan.ids` for a token that the plan before is still to draw


class Sequence:
    """One choice of a request: its tokens, how far its KV is, and where it lives. Changed by the scheduler alone."""

    __slots__ = (
        "cached", "computed", "draws", "end", "finished", "forks", "hit_tokens", "in_flight", "index", "keys",
        "late_at", "num_prompt", "pending", "planned", "rank", "request", "score_next", "scores", "seat",
        "started", "stops", "table", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, rank: tuple[float, int, int], stops: frozenset[int]) -> None:
        sampling = request.sampling
        self.request, self.index, self.rank = request, index, rank
        self.tokens = list(request.prompt)
        self.num_prompt = len(request.prompt)
        self.end = self.num_prompt + max(sampling.max_tokens - 1, 0)  # positions of KV: the last token is never read
        self.draws = sampling.max_tokens > 0
        self.stops = stops
        self.planned = 0  # positions that are computed or in a plan
        self.computed = 0  # positions whose KV is there
        self.pending = 0  # tokens that plans in flight are to draw
        self.late_at = 0  # where in the last plan's samples the pending token will be
        self.in_flight = 0  # plans not committed that use this sequence's blocks
        self.finished = False
        self.table: Table | None = None  # while it runs
        self.seat = -1  # while it runs: its row in a table of max_num_seqs rows, unchanged until it stops running
        self.forks: list[Sequence] = []  # choices that wait for this one's prefill, to share its blocks
        self.keys: list[bytes] = []  # of its full blocks
        self.hit_tokens = 0  # found in the prefix cache when it last began to run
        self.cached: int | None = None  # the same when it first began to run, before anything was drawn or preempted
        self.started: float | None = None  # when it first began to run, by time.perf_counter; None of a fork
        self.scores = sampling.prompt_logprobs is not None and index == 0
        self.score_next = max(request.score_start - 1, 0)  # the first position whose logits are still wanted

    @property
    def output(self) -> list[int]:
        """The tokens drawn so far (a copy)."""
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def __repr__(self) -> str:
        done = "finished" if self.finished else f"{self.computed} of {len(self.tokens)} tokens computed"
        return f"Sequence({self.request.id!r}, {self.index}, {done})"


class Slice(NamedTuple):
    """Positions `start` to `start + length` of a sequence are computed now."""

    sequence: Sequence
    start: int
    length: int
    samples: bool  # whether it reaches the last token, so that its last row yields the next one

    @property
    def scored(self) -> range:
        """The positions of this slice whose logits give a prompt logprob that is wanted (of the token after each).

        To be read before the plan is committed. A sequence that was preempted is not asked twice.
        """
        s = self.sequence
        if not s.scores:
            return range(0)
        return range(max(self.start, s.score_next), min(self.start + self.length, s.num_prompt - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One step, as host lists. T = tokens, S = slices, N = samples.

    Slices of one token come first (`num_decodes` of them), so that decodes can run as one batch of equal shape.
    `block_tables` are the lists of the scheduler itself, without a copy: read them before the next `plan()`. An engine
    that keeps block tables on the device writes `table_writes` to rows `seats` instead, a few entries a step.
    """

    number: int
    slices: list[Slice]
    copies: list[tuple[int, int]]  # blocks (source, destination): done before anything is written, in this order
    ids: list[int]  # [T]; LATE where the plan before is still to draw the token
    positions: list[int]  # [T]
    cu_seqlens: list[int]  # [S + 1]
    context_lens: list[int]  # [S]: past and new tokens
    seats: list[int]  # [S]
    table_writes: list[tuple[int, int, int]]  # (seat, entry, block): what changed in the tables since the last plan
    sampled: list[Sequence]  # [N]: whose next token is drawn; the n choices of one prompt share a row the first time
    sample_rows: list[int]  # [N]: rows of T
    late: list[tuple[int, int]]  # (row of T, sample of the plan before): where ids is LATE
    num_decodes: int
    max_len: int
    max_context: int

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def block_tables(self) -> list[list[int]]:
        """[S]; entries before the window of a windowed model are DEAD."""
        return [s.sequence.table.blocks for s in self.slices if s.sequence.table is not None]


@dataclass(kw_only=True, slots=True)
class Draft:
    """The slices of a plan while it is made."""

    decodes: list[Slice] = field(default_factory=list)
    chunks: list[Slice] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def finish(self, number: int, table_writes: list[tuple[int, int, int]]) -> Plan:
        """Lay the slices out flat, and mark their sequences as planned."""
        slices = self.decodes + self.chunks
        ids: list[int] = []
        positions: list[int] = []
        cu_seqlens = [0]
        context_lens: list[int] = []
        sampled: list[Sequence] = []
        sample_rows: list[int] = []
        late: list[tuple[int, int]] = []
        for sequence, start, length, samples in slices:
            end = start + length
            if length == 1:
                positions.append(start)
                tokens = sequence.tokens
                if start < len(tokens):
                    ids.append(tokens[start])
                else:
                    late.append((len(ids), sequence.late_at))
                    ids.append(LATE)
            else:
                positions.extend(range(start, end))
                ids.extend(sequence.tokens[start:end])
            cu_seqlens.append(len(ids))
            context_lens.append(end)
            sequence.planned = end
            sequence.in_flight += 1
            if samples:
                for choice in (sequence, *sequence.forks) if sequence.forks else (sequence,):
                    choice.late_at = len(sampled)
                    choice.pending += 1
                    sampled.append(choice)
                    sample_rows.append(len(ids) - 1)
        return Plan(
            number=number,
            slices=slices,
            copies=self.copies,
            ids=ids,
            positions=positions,
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            seats=[s.sequence.seat for s in slices],
            table_writes=table_writes,
            sampled=sampled,
            sample_rows=sample_rows,
            late=late,
            num_decodes=len(self.decodes),
            max_len=max(s.length for s in self.chunks) if self.chunks else 1,
            max_context=max(context_lens),
        )
