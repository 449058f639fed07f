"""A draft model: a smaller model of the same vocabulary that proposes its most probable tokens, one after the other.

It has its own KV pool and its own block tables, so nothing of the engine's depends on it. What it has not read yet of
a sequence (the prompt at first, later the token that replaced a rejected draft) is computed with the first drafted
token; every further token is one decode step of the draft model. Its tokens go from step to step on the device, and
come to the host once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.nn.model import Transformer
from bagu.ops.sample.torch_backend import argmax
from bagu.serve.config import EngineConfig
from bagu.serve.kv.blocks import Blocks, Table
from bagu.serve.kv.paged import PagedKV
from bagu.serve.kv.pool import Pool
from bagu.serve.plan import LATE, NO_DRAFT, SHORT, Plan, Sequence
from bagu.serve.runner import Runner
from bagu.types import Tokenizer


class DraftSource(NamedTuple):
    """A draft model and its tokenizer, as loaded. Without a tokenizer only the size of the vocabulary is checked."""

    model: Transformer
    tokenizer: Tokenizer | None = None


def check_draft(model: Transformer, tokenizer: Tokenizer | None, draft: DraftSource) -> None:
    """Raise ArgumentError unless token ids mean the same in both models."""
    own, other = model.config.vocab_size, draft.model.config.vocab_size
    hint = "use a draft model of the same family, with the same tokenizer"
    if own != other:
        raise ArgumentError(f"speculative: the draft model has {other} tokens, and the model has {own}", hint=hint)
    if not draft.model.config.causal or draft.model.score is not None:
        raise ArgumentError("speculative: the draft model predicts no next token", hint="use a causal language model")
    if tokenizer is None or draft.tokenizer is None or tokenizer is draft.tokenizer:
        return
    for id in range(own):
        a, b = tokenizer.bytes_of(id), draft.tokenizer.bytes_of(id)
        if a != b:
            raise ArgumentError(
                f"speculative: the draft model has another tokenizer: its token {id} is {b!r}, the model's is {a!r}",
                hint=hint,
            )


class _Row(NamedTuple):
    """New tokens of a sequence for the draft model, from position `start` on."""

    state: _State
    start: int
    tokens: Seq[int]


class _State:
    """What the draft model has computed of a sequence."""

    def __init__(self, table: Table, row: int) -> None:
        self.table, self.row = table, row
        self.tokens: list[int] = []  # those whose keys and values are in the pool
        self.agreed = 0  # how many of them are known to be the sequence's

    def start(self, tokens: Seq[int]) -> int:
        """The first position to compute: after what is the same, and not after the last token."""
        while self.agreed < min(len(self.tokens), len(tokens)) and self.tokens[self.agreed] == tokens[self.agreed]:
            self.agreed += 1
        return min(self.agreed, len(tokens) - 1)


class DraftModel:
    """Satisfies `Proposer`."""

    free = False

    def __init__(self, model: Transformer, config: EngineConfig, pool: Pool) -> None:
        model = model.eval().for_length(config.max_model_len)
        table = model.embedding.weight
        self.max_len = min(pool.max_model_len, model.config.max_len)
        kv = PagedKV(
            model.config, pool.num_blocks + int(table.is_cuda), pool.block_size, device=table.device, dtype=table.dtype
        )
        self.runner = Runner(model, kv, replace(config, invariant=False), self.max_len)
        self.blocks = Blocks(pool.num_blocks, pool.block_size, prefix_cache=False)
        self.chunk = config.step_tokens(table.device.type)
        self._states: dict[Sequence, _State] = {}  # in the order of their last use
        self._free_rows = list(range(config.max_num_seqs))
        self._writes: list[tuple[int, int, int]] = []

    def propose(self, sequences: Seq[Sequence], count: int) -> list[list[int]]:
        states: list[_State | None] = []
        for at, s in enumerate(sequences):
            states.append(self._prepared(s, len(s.tokens) + count - 1, sequences[:at]))
        rows = [
            _Row(state, at := state.start(s.tokens), s.tokens[at:])
            for s, state in zip(sequences, states, strict=True)
            if state is not None
        ]
        if not rows:
            return [[] for _ in sequences]
        drafted = iter(self._draft(rows, count))
        proposals = [[] if state is None else next(drafted) for state in states]
        for sequence, state, proposal in zip(sequences, states, proposals, strict=True):
            if state is not None:
                state.tokens = [*sequence.tokens, *proposal[:-1]]
                state.agreed = len(sequence.tokens)
        return proposals

    def forget(self, sequence: Sequence) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            self.blocks.release(state.table)
            self._free_rows.append(state.row)

    def _prepared(self, sequence: Sequence, upto: int, keep: Seq[Sequence]) -> _State | None:
        """The state of a sequence with blocks for `upto` positions; None if there is no room for them beside the
        sequences `keep`, whose drafts are computed in the same steps."""
        if upto > self.max_len:
            return None
        state = self._states.pop(sequence, None)
        if state is None:
            if not self._free_rows:
                self.forget(next(iter(self._states)))
            state = _State(self.blocks.new_table(), self._free_rows.pop())
        self._states[sequence] = state
        blocks, table = self.blocks, state.table
        while blocks.blocks_needed(table, 0, upto) > blocks.available:
            oldest = next(iter(self._states))  # those of `keep` are the newest
            if oldest is sequence or oldest in keep:
                self.forget(sequence)
                return None
            self.forget(oldest)
        before = table.columns
        blocks.reserve(table, 0, upto)
        self._writes += [(state.row, at, table.blocks[0][at]) for at in range(before, table.columns)]
        return state

    def _draft(self, rows: Seq[_Row], count: int) -> list[list[int]]:
        """`count` tokens after each of these rows."""
        for i, row in enumerate(rows):
            if len(row.tokens) > self.chunk:
                rows = [*rows[:i], self._read(row), *rows[i + 1 :]]
        tokens = self._argmax(self._plan(rows), None)
        drafted = [tokens]
        for i in range(1, count):
            later = [_Row(r.state, r.start + len(r.tokens) + i - 1, (LATE,)) for r in rows]
            tokens = self._argmax(self._plan(later), tokens)
            drafted.append(tokens)
        found: list[list[int]] = torch.stack(drafted, 1).tolist()
        return found

    def _read(self, row: _Row) -> _Row:
        """Compute all but the last chunk of a long row; returns the rest."""
        state, start, tokens = row
        while len(tokens) > self.chunk:
            self.runner.run(self._plan([_Row(state, start, tokens[: self.chunk])]))
            start, tokens = start + self.chunk, tokens[self.chunk :]
        return _Row(state, start, tokens)

    def _argmax(self, plan: Plan, late: torch.Tensor | None) -> torch.Tensor:
        out = self.runner.run(plan, late)
        return argmax(out.logits) if out.argmax is None else out.argmax

    def _plan(self, rows: Seq[_Row]) -> Plan:
        """A step of the draft model: a token is sampled after each row."""
        order = sorted(rows, key=lambda r: len(r.tokens) > 1)  # a plan has its decodes first
        cu_seqlens = [0]
        for row in order:
            cu_seqlens.append(cu_seqlens[-1] + len(row.tokens))
        ends = {id(row): end - 1 for row, end in zip(order, cu_seqlens[1:], strict=True)}
        writes, self._writes = self._writes, []
        ids = [t for r in order for t in r.tokens]
        contexts = [r.start + len(r.tokens) for r in order]
        return Plan(
            number=0, slices=[], copies=[], ids=ids,
            positions=[p for r in order for p in range(r.start, r.start + len(r.tokens))],
            cu_seqlens=cu_seqlens, context_lens=contexts, table_rows=[r.state.row for r in order], table_writes=writes,
            sampled=[], sample_rows=[ends[id(r)] for r in rows], next_drafts=[NO_DRAFT] * len(rows),
            late=[(i, i) for i in range(len(ids))] if ids[0] == LATE else [],
            num_decodes=sum(len(r.tokens) == 1 for r in order), num_drafts=0,
            num_prompts=sum(len(r.tokens) > SHORT for r in order), max_len=max(len(r.tokens) for r in order),
            max_context=max(contexts),
        )  # fmt: skip
