"""Decode steps on a GPU as CUDA graphs: one launch per step instead of hundreds. Steps with a few tokens of a sequence
too: drafts, and tokens that a grammar forces.

A graph has fixed shapes, so a step is padded to a bucket: the number of sequences to a power of two (above 32 to a
multiple of 32), the context to a power of two. If sequences have several tokens, the number of all tokens is a power of
two, and sequences of padding have the rest; such steps have larger buckets, since a capture takes longer than many of
them. Padding tokens are written to a block that is in no table. Rows are
independent, so they do not change other rows. A graph is captured at the first step of its bucket, and all graphs share
one memory pool.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from bagu.serve.adapters.layers import NO_ADAPTER, Rows
from bagu.serve.kv.paged import Batch, PagedKV
from bagu.serve.plan import SHORT

__all__ = ["Captured", "GraphDecode", "Padding", "bucket", "copy_padded", "pad", "padding"]

# The smallest buckets of a step with several tokens of a sequence.
SEQUENCES, TOKENS, CONTEXT = 8, 8, 256


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: Batch  # the inputs, filled before each replay
    hidden: torch.Tensor  # the output, of the padded tokens


def bucket(count: int, *, coarse: bool = False) -> int:
    """The size that `count` is padded to."""
    if count > 32 and not coarse:
        return -(-count // 32) * 32
    return 1 << (count - 1).bit_length()


def pad(batch: Batch, rows: int, context: int, block_size: int, spare: int) -> Batch:
    """Pad the batch to `rows` sequences, and tables of `context` positions; the new sequences have one token each and
    use block `spare`. A batch with several tokens of a sequence has its new sequences already (`padding`)."""
    each, device = batch.max_len, batch.ids.device
    tokens = rows if each == 1 else len(batch.ids)
    ids, positions, slots, adapters = (torch.empty(tokens, dtype=torch.int64, device=device) for _ in range(4))
    padded = Batch(
        ids=ids,
        positions=positions,
        slots=slots,
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.empty(rows, dtype=torch.int32, device=device),
        block_tables=torch.zeros(rows, -(-context // block_size), dtype=torch.int32, device=device),
        max_len=each,
        max_context=context,
        num_decodes=rows if each == 1 else 0,
        decode_context=context if each == 1 else 0,
        adapters=None if batch.adapters is None else adapters,
    )
    copy_padded(padded, batch, block_size, spare)
    return padded


def copy_padded(into: Batch, batch: Batch, block_size: int, spare: int) -> None:
    """Copy a batch into one that `pad` has made for its bucket. Table entries behind the batch's context stay as they
    are: no kernel reads them."""
    values = (0, 0, spare * block_size, 1, spare, NO_ADAPTER)
    for old, new, value in zip(_inputs(into), _inputs(batch), values, strict=True):
        if old is not None and new is not None:
            (old[: len(new)] if new.dim() == 1 else old[: len(new), : new.shape[1]]).copy_(new)
            if len(new) < len(old):
                old[len(new) :].fill_(value)
    if into.max_len > 1:
        into.cu_seqlens.copy_(batch.cu_seqlens)


def _inputs(batch: Batch) -> tuple[torch.Tensor | None, ...]:
    """What differs between batches of one bucket."""
    return batch.ids, batch.positions, batch.slots, batch.context_lens, batch.block_tables, batch.adapters


class Padding(NamedTuple):
    """What follows the sequences of a step, so that it fills its bucket. Host arrays."""

    tokens: int
    ends: np.ndarray  # int32: of the sequences of padding, in the tokens of the step
    lengths: np.ndarray  # int32
    max_len: int  # a bound of the tokens of any sequence


def padding(tokens: int, sequences: int, max_len: int) -> Padding:
    """The padding of a step with several tokens of a sequence. The numbers of all tokens and of all sequences depend
    on their buckets alone."""
    total, each = max(bucket(tokens, coarse=True), TOKENS), max(bucket(max_len), SHORT)
    rows = max(bucket(sequences), SEQUENCES) - sequences + max(1, total // each)  # enough if all tokens are padding
    ends = np.minimum(tokens + each * np.arange(1, rows + 1, dtype=np.int32), total)
    return Padding(total - tokens, ends, np.diff(ends, prepend=np.int32(tokens)), each)


def addresses(model: torch.nn.Module) -> list[int]:
    """Where the weights of a model are. Quantized weights are buffers of their layers."""
    return [t.data_ptr() for t in (*model.parameters(), *model.buffers())]


class GraphDecode:
    """The forward of a batch as a graph replay."""

    def __init__(self, model: torch.nn.Module, kv: PagedKV, max_model_len: int, adapters: Rows | None = None) -> None:
        self.model, self.kv, self.max_model_len, self.adapters = model, kv, max_model_len, adapters
        self.spare = kv.num_blocks - 1
        # by sequences, tokens, most tokens of a sequence, context, and whether tokens have adapters
        self.captured: dict[tuple[int, int, int, int, bool], Captured] = {}
        self.memory = torch.cuda.graph_pool_handle()
        self._addresses = addresses(model)

    def reads(self, model: torch.nn.Module) -> bool:
        """Whether the graphs read the weights of `model`. A trainer moves weights once, into flat buffers. Quantized
        weights are new tensors after every change; the old ones still exist here, so that their addresses differ."""
        return self._addresses == addresses(model)

    def load(self, batch: Batch) -> Captured:
        """The graph for this batch, captured if it is the first of its bucket, with the batch as its input. Replay it
        before the next call."""
        rows, tokens = len(batch.context_lens), len(batch.ids)
        if batch.max_len == 1:
            rows = tokens = bucket(rows)
        least = 1 if batch.max_len == 1 else CONTEXT
        context = max(min(max(bucket(batch.max_context, coarse=True), least), self.max_model_len), batch.max_len)
        key = rows, tokens, batch.max_len, context, batch.adapters is not None
        found = self.captured.get(key)
        if found is None:
            padded = pad(batch, rows, context, self.kv.block_size, self.spare)
            found = self.captured[key] = self._capture(padded)
        else:
            copy_padded(found.batch, batch, self.kv.block_size, self.spare)
        return found

    def _capture(self, batch: Batch) -> Captured:
        self.kv.load(batch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up: initialization (cuBLAS, tables, kernels) must not be in the graph
            self._forward(batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            hidden = self._forward(batch)
        return Captured(graph, batch, hidden)

    def _forward(self, batch: Batch) -> torch.Tensor:
        if self.adapters is not None:
            self.adapters.load(batch.adapters)
        hidden: torch.Tensor = self.model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len, self.kv).hidden
        return hidden
