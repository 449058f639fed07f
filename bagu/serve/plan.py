"""The plan of one step: slices of sequences, chosen by the scheduler and run by the engine.

Prefill and decode have the same form: a slice is the next tokens of a sequence whose KV is not computed yet. A token is
sampled after a slice that includes the last known token; after a chunk of a long prompt it is not.

With speculation (serve/speculation) a slice may end with drafted tokens: guesses of what follows the last known token.
A token is sampled after each of them too, and the sampled tokens are kept up to the first that differs from its draft.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from bagu.serve.adapters.info import Resident
from bagu.serve.images.prompt import Piece, keyed, pieces
from bagu.serve.kv.blocks import ROOT, Table
from bagu.serve.request import Request

LATE = -1  # placeholder in `Plan.ids` for a token that the previous plan has not sampled yet
NO_DRAFT = -1  # in `Plan.next_drafts`, where no drafted token follows
SHORT = 16  # tokens of an output in one slice that a GPU computes with the decodes, in one CUDA graph


class Sequence:
    """One choice of a request: its tokens, its progress and its blocks. Only the scheduler changes it."""

    __slots__ = (
        "adapter", "cached", "computed", "content", "draws", "end", "finished", "forks", "in_flight", "index", "keys",
        "late_at", "num_prompt", "pending", "planned", "rank", "request", "score_next", "scores",
        "started", "stops", "table", "table_row", "tokens", "waits",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        index: int,
        rank: tuple[float, int, int],
        stops: frozenset[int],
        adapter: Resident | None = None,
    ) -> None:
        sampling = request.sampling
        self.adapter = adapter  # the weights that it started with, also after its name is gone
        self.request, self.index, self.rank = request, index, rank
        self.tokens = list(request.prompt)
        # what the keys of its blocks are made of: the same list, unless images have placeholders in it
        self.content = keyed(self.tokens, request.images) if request.images else self.tokens
        self.num_prompt = len(request.prompt)
        self.end = max(self.num_prompt + sampling.max_tokens - 1, 1)  # KV positions: the last token needs none
        self.draws = sampling.max_tokens > 0
        self.stops = stops
        self.waits = sampling.grammar is not None  # it is planned only when all its tokens are known
        self.planned = 0  # positions computed or in a plan in flight
        self.computed = 0  # positions whose KV is computed
        self.pending = 0  # tokens that plans in flight will sample
        self.late_at = 0  # index of the pending token among the samples of the last plan
        self.in_flight = 0  # plans in flight that use this sequence's blocks
        self.finished = False
        self.table: Table | None = None  # while it runs
        self.table_row = -1  # while it runs: its row in a table of max_num_seqs rows, unchanged until it stops running
        self.forks: list[Sequence] = []  # choices that will share this one's blocks after its prefill
        self.keys: list[bytes] = []  # prefix cache keys of its full blocks
        self.cached: int | None = None  # prompt tokens found in the prefix cache at its first admission
        self.started: float | None = None  # time.perf_counter at its first admission; None for a fork
        self.scores = sampling.prompt_logprobs is not None and index == 0
        self.score_next = max(request.score_start - 1, 0)  # first position whose logits are needed for a prompt logprob

    @property
    def root(self) -> bytes:
        """The root of its prefix cache keys."""
        return ROOT if self.adapter is None else self.adapter.root

    @property
    def output(self) -> list[int]:
        """The tokens sampled so far (a copy)."""
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def __repr__(self) -> str:
        done = "finished" if self.finished else f"{self.computed} of {len(self.tokens)} tokens computed"
        return f"Sequence({self.request.id!r}, {self.index}, {done})"


class Slice(NamedTuple):
    """Positions `start` to `start + length` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    length: int
    samples: bool  # whether it includes the last known token, so that the next one is sampled from its last row
    drafts: Seq[int] = ()  # its last tokens, if they are drafted: a token is sampled before and after each of them

    @property
    def scored(self) -> range:
        """The positions of this slice whose logits give a requested prompt logprob (of the token after each).

        Read it before the plan is committed. After a preemption, positions that were already scored are left out.
        """
        s = self.sequence
        if not s.scores:
            return range(0)
        return range(max(self.start, s.score_next), min(self.start + self.length, s.num_prompt - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One step, as host lists. T = tokens, S = slices, N = samples.

    Slices of one token come first (`num_decodes` of them), so that decodes can run as one batch of equal shape, then
    those of a few tokens (drafts, or tokens that a grammar forces), then chunks of prompts.
    `block_tables` are the scheduler's own lists, not copies: read them before the next `plan()`. An engine that keeps
    block tables on the device writes `table_writes` instead, a few entries a step: group g of slice s has row
    g * max_num_seqs + table_rows[s].
    """

    number: int
    slices: list[Slice]
    copies: list[tuple[int, int]]  # blocks (source, destination) to copy in this order, before the step writes KV
    ids: list[int]  # [T]; LATE for a token that the previous plan has not sampled yet
    positions: list[int]  # [T]
    cu_seqlens: list[int]  # [S + 1]
    context_lens: list[int]  # [S]: past and new tokens
    table_rows: list[int]  # [S]
    table_writes: list[tuple[int, int, int]]  # (row, entry, block): changes since the last plan
    sampled: list[Sequence]  # [N]: sequences to sample; the n choices of one prompt share a row for their first token
    sample_rows: list[int]  # [N]: rows of T
    next_drafts: list[int]  # [N]: the drafted token that follows the row, or NO_DRAFT
    late: list[tuple[int, int]]  # (row of T, index among the previous plan's samples), where ids is LATE
    num_decodes: int
    num_drafts: int  # drafted tokens
    num_prompts: int  # chunks of prompts
    max_len: int
    max_context: int
    images: list[Piece] = field(default_factory=list)  # vectors that take the place of tokens

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def drafts_before(self) -> list[list[int]]:
        """[N]: the drafted tokens between the last known token of a sequence and the sampled one."""
        before: list[list[int]] = []
        for i, (sequence, row) in enumerate(zip(self.sampled, self.sample_rows, strict=True)):
            follows = i and sequence is self.sampled[i - 1] and row == self.sample_rows[i - 1] + 1
            before.append([*before[-1], self.next_drafts[i - 1]] if follows else [])
        return before

    @property
    def block_tables(self) -> list[list[list[int]]]:
        """[S, groups]; with a sliding window, entries before the window are DEAD."""
        return [s.sequence.table.blocks for s in self.slices if s.sequence.table is not None]


@dataclass(kw_only=True, slots=True)
class PlanBuilder:
    """The slices of a plan under construction."""

    decodes: list[Slice] = field(default_factory=list)
    short: list[Slice] = field(default_factory=list)  # a few tokens of an output
    chunks: list[Slice] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def finish(self, number: int, table_writes: list[tuple[int, int, int]]) -> Plan:
        """Flatten the slices into a plan, and mark their sequences as planned."""
        # Longest first: a GPU that starts long sequences last waits for them at the end. On an H200, 256 sequences of
        # 100 to 2,000 tokens are read at 0.94 of copy bandwidth in any order, and at 0.99 in this one.
        slices = sorted(self.decodes, key=lambda s: -s.start) + self.short + self.chunks
        ids: list[int] = []
        positions: list[int] = []
        cu_seqlens = [0]
        context_lens: list[int] = []
        sampled: list[Sequence] = []
        sample_rows: list[int] = []
        next_drafts: list[int] = []
        late: list[tuple[int, int]] = []
        images: list[Piece] = []
        for sequence, start, length, samples, drafts in slices:
            end = start + length
            if length == 1 or drafts:
                positions.extend(range(start, end))
                tokens = sequence.tokens
                if start < len(tokens):
                    ids.append(tokens[start])
                else:
                    late.append((len(ids), sequence.late_at))
                    ids.append(LATE)
                ids.extend(drafts)
            else:
                positions.extend(range(start, end))
                ids.extend(sequence.tokens[start:end])
            if sequence.request.images and start < sequence.num_prompt:
                images.extend(pieces(sequence.request.images, start, end, cu_seqlens[-1]))
            cu_seqlens.append(len(ids))
            context_lens.append(end)
            sequence.planned = end
            sequence.in_flight += 1
            if drafts:
                sequence.pending += length
                sampled.extend([sequence] * length)
                sample_rows.extend(range(len(ids) - length, len(ids)))
                next_drafts.extend((*drafts, NO_DRAFT))
            elif samples:
                for choice in (sequence, *sequence.forks) if sequence.forks else (sequence,):
                    choice.late_at = len(sampled)
                    choice.pending += 1
                    sampled.append(choice)
                    sample_rows.append(len(ids) - 1)
                    next_drafts.append(NO_DRAFT)
        return Plan(
            number=number,
            slices=slices,
            copies=self.copies,
            ids=ids,
            positions=positions,
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            table_rows=[s.sequence.table_row for s in slices],
            table_writes=table_writes,
            sampled=sampled,
            sample_rows=sample_rows,
            next_drafts=next_drafts,
            late=late,
            num_decodes=len(self.decodes),
            num_drafts=sum(len(s.drafts) for s in self.short),
            num_prompts=len(self.chunks),
            max_len=max((s.length for s in (*self.short, *self.chunks)), default=1),
            max_context=max(context_lens),
            images=images,
        )
