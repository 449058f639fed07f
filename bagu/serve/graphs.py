"""Decode steps on a GPU as CUDA graphs: one launch per step instead of hundreds. Steps with a few tokens of a sequence
too: drafts, and tokens that a grammar forces.

A graph has fixed shapes, so a step is padded to a bucket: the number of sequences to a power of two (above 32 to a
multiple of 32), the context to a power of two. If sequences have several tokens, the number of all tokens is a power of
two, and additional sequences have the padding tokens. The buckets of such steps are larger: their sizes have many
combinations, and a capture takes as long as many steps. Padding tokens are written to a block that is in no table. Rows
are independent, so they do not change other rows. A graph is captured by warm_up.py, or else at the first step of its
bucket, and all graphs share one memory pool. A context has at least 256 positions: attention reads so few in one part.

The inputs of a graph are views of one buffer, so a step fills them with one copy from the host. With a copy and a fill
for each of them, the host of an H200 takes 0.48 ms for 32 decodes instead of 0.28.
"""

from typing import NamedTuple

import numpy as np
import torch

from bagu.serve.adapters.layers import NO_ADAPTER, Rows
from bagu.serve.inputs import Late, StepArrays
from bagu.serve.kv.paged import Batch, PagedKV
from bagu.serve.plan import SHORT

CONTEXT = 256  # positions of the smallest bucket
SEQUENCES, TOKENS = 8, 8  # of the smallest buckets of a step with several tokens of a sequence
ALIGNMENT = 16  # bytes: Triton compiles another kernel for an address that is not a multiple


class Bucket(NamedTuple):
    """The sizes of a graph."""

    sequences: int
    tokens: int
    max_len: int  # a bound of the tokens of any sequence
    context: int  # positions
    adapters: bool  # whether tokens have adapters


class Padding(NamedTuple):
    """What follows the sequences of a step, so that it fills its bucket. Host arrays."""

    tokens: int
    ends: np.ndarray  # int32: of the sequences of padding, in the tokens of the step
    lengths: np.ndarray  # int32
    max_len: int  # a bound of the tokens of any sequence

    def bucket(self, step: StepArrays, longest: int) -> Bucket:
        """The bucket that a step fills with this padding. `longest`: the most positions that a sequence may have."""
        context = min(max(bucket(step.max_context, coarse=True), CONTEXT), longest)
        return Bucket(
            sequences=len(step.context_lens) + len(self.ends),
            tokens=len(step.ids) + self.tokens,
            max_len=self.max_len,
            context=max(context, self.max_len),
            adapters=step.adapters is not None,
        )


def bucket(count: int, *, coarse: bool = False) -> int:
    """The size that `count` is padded to."""
    if count > 32 and not coarse:
        return -(-count // 32) * 32
    return 1 << (count - 1).bit_length()


def padding(tokens: int, sequences: int, max_len: int) -> Padding:
    """The padding of a step. The numbers of all tokens and of all sequences depend on their buckets alone."""
    if max_len == 1:
        total, each = bucket(tokens), 1
        rows = total - tokens
    else:
        total, each = max(bucket(tokens, coarse=True), TOKENS), max(bucket(max_len), SHORT)
        rows = max(bucket(sequences), SEQUENCES) - sequences + max(1, total // each)  # enough for tokens of padding
    ends = np.minimum(tokens + each * np.arange(1, rows + 1, dtype=np.int32), total)
    return Padding(total - tokens, ends, np.diff(ends, prepend=np.int32(tokens)), each)


def rehearsed_decodes(sequences: int, context: int, num_groups: int, spare: int, block_size: int) -> StepArrays:
    """A step of decodes in block `spare`, as if a sequence had `context` positions."""
    zeros = np.zeros(sequences, dtype=np.int64)
    return StepArrays(
        ids=zeros,
        positions=zeros,
        slots=np.full((num_groups, sequences), spare * block_size, dtype=np.int64),
        adapters=None,
        cu_seqlens=np.arange(sequences + 1, dtype=np.int32),
        context_lens=np.ones(sequences, dtype=np.int32),
        tables=np.full((num_groups, 1, 1), spare, dtype=np.int32),
        table_rows=zeros,
        late=np.empty((0, 2), dtype=np.int64),
        sample_rows=None,
        max_len=1,
        max_context=context,
    )


class GraphInputs:
    """The inputs of the graph of a bucket, in one buffer on the device."""

    def __init__(
        self, size: Bucket, block_size: int, max_num_seqs: int, device: torch.device, num_groups: int = 1
    ) -> None:
        tokens = (np.int64, (size.tokens,))
        blocks = -(-size.context // block_size)
        fields: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "ids": tokens,
            "positions": tokens,
            "late_rows": tokens,
            "late_samples": tokens,
            "sample_rows": (np.int64, (size.tokens + max_num_seqs,)),  # the choices of a prompt share a row
            "cu_seqlens": (np.int32, (size.sequences + 1,)),
            "context_lens": (np.int32, (size.sequences,)),
            **{f"slots{g}": tokens for g in range(num_groups)},
            **{f"tables{g}": (np.int32, (size.sequences, blocks)) for g in range(num_groups)},
        }
        if size.adapters:
            fields["adapters"] = tokens
        self.layout = _layout(fields)
        self.buffer = torch.zeros(self.layout.itemsize, dtype=torch.uint8, device=device)
        views = _views(self.buffer, self.layout)
        only_decodes = size.max_len == 1
        self.batch = Batch(
            ids=views["ids"],
            positions=views["positions"],
            slots=tuple(views[f"slots{g}"] for g in range(num_groups)),
            cu_seqlens=views["cu_seqlens"],
            context_lens=views["context_lens"],
            block_tables=tuple(views[f"tables{g}"] for g in range(num_groups)),
            max_len=size.max_len,
            max_context=size.context,
            num_decodes=size.sequences if only_decodes else 0,
            decode_context=size.context if only_decodes else 0,
            adapters=views.get("adapters"),
        )
        self._late, self._sample_rows = Late(views["late_rows"], views["late_samples"]), views["sample_rows"]

    def fill(self, step: StepArrays, more: Padding, spare: int, block_size: int) -> None:
        """Copy a step to the device, with its padding in block `spare`."""
        host = torch.empty(len(self.buffer), dtype=torch.uint8, pin_memory=self.buffer.is_cuda)
        into = host.numpy().view(self.layout)[0]
        T, S, P = len(step.ids), len(step.context_lens), into["tables0"].shape[1]
        for name, array, value in (
            ("ids", step.ids, 0),
            ("positions", step.positions, 0),
            *((f"slots{g}", slots, spare * block_size) for g, slots in enumerate(step.slots)),
            ("adapters", step.adapters, NO_ADAPTER),
        ):
            if array is not None:
                into[name][:T] = array
                into[name][T:] = value
        into["cu_seqlens"][: S + 1], into["cu_seqlens"][S + 1 :] = step.cu_seqlens, more.ends
        into["context_lens"][:S], into["context_lens"][S:] = step.context_lens, more.lengths
        # Entries behind the context of a sequence are blocks of the pool too: a kernel may compute their addresses.
        for g, tables in enumerate(step.tables[:, step.table_rows, :P]):
            into[f"tables{g}"][:S, : tables.shape[1]] = tables
            into[f"tables{g}"][:S, tables.shape[1] :] = into[f"tables{g}"][S:] = spare
        into["late_rows"][: len(step.late)], into["late_samples"][: len(step.late)] = step.late.T
        if step.sample_rows is not None:
            into["sample_rows"][: len(step.sample_rows)] = step.sample_rows
        self.buffer.copy_(host, non_blocking=True)

    def late(self, count: int) -> Late:
        return Late(self._late.rows[:count], self._late.samples[:count])

    def sample_rows(self, count: int) -> torch.Tensor:
        return self._sample_rows[:count]


def _layout(fields: dict[str, tuple[type[np.generic], tuple[int, ...]]]) -> np.dtype[np.void]:
    """A record of arrays, each at a multiple of `ALIGNMENT`."""
    formats = [np.dtype(field) for field in fields.values()]
    ends = np.cumsum([-(-f.itemsize // ALIGNMENT) * ALIGNMENT for f in formats])
    return np.dtype(
        {"names": list(fields), "formats": formats, "offsets": [0, *ends[:-1].tolist()], "itemsize": int(ends[-1])}
    )


def _views(buffer: torch.Tensor, layout: np.dtype[np.void]) -> dict[str, torch.Tensor]:
    """The arrays of a record as tensors."""
    views = {}
    for name, (format, offset, *_) in (layout.fields or {}).items():
        dtype = torch.int64 if format.base == np.int64 else torch.int32
        views[name] = buffer[offset : offset + format.itemsize].view(dtype).view(format.shape)
    return views


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: GraphInputs
    hidden: torch.Tensor  # the output, of the padded tokens


class LoadedGraph(NamedTuple):
    """A graph with a step as its input."""

    captured: Captured
    late: Late | None
    sample_rows: torch.Tensor | None  # None: all


def addresses(model: torch.nn.Module) -> list[int]:
    """Where the weights of a model are. Quantized weights are buffers of their layers."""
    return [t.data_ptr() for t in (*model.parameters(), *model.buffers())]


class GraphDecode:
    """The forward of a batch as a graph replay."""

    def __init__(
        self, model: torch.nn.Module, kv: PagedKV, max_model_len: int, max_num_seqs: int, adapters: Rows | None = None
    ) -> None:
        self.model, self.kv, self.adapters = model, kv, adapters
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        self.spare = kv.num_blocks - 1
        self.captured: dict[Bucket, Captured] = {}
        self.memory = torch.cuda.graph_pool_handle()
        self._addresses = addresses(model)

    def reads(self, model: torch.nn.Module) -> bool:
        """Whether the graphs read the weights of `model`. A trainer moves weights once, into flat buffers. Quantized
        weights are new tensors after every change; the old ones still exist here, so that their addresses differ."""
        return self._addresses == addresses(model)

    def load(self, step: StepArrays) -> LoadedGraph:
        """The graph for this step, captured if it is the first of its bucket, with the step as its input. Replay it
        before the next call."""
        more = padding(len(step.ids), len(step.context_lens), step.max_len)
        size = more.bucket(step, self.max_model_len)
        found = self.captured.get(size)
        inputs = self._inputs(size) if found is None else found.inputs
        inputs.fill(step, more, self.spare, self.kv.block_size)
        if found is None:
            found = self.captured[size] = self._capture(inputs)
        return LoadedGraph(
            found,
            inputs.late(len(step.late)) if len(step.late) else None,
            None if step.sample_rows is None else inputs.sample_rows(len(step.sample_rows)),
        )

    def capture_decodes(self, sequences: int, context: int) -> None:
        """Capture the graph of this many decodes now, if it is not captured yet. Its sequences read and write the
        block of padding."""
        self.load(rehearsed_decodes(sequences, context, len(self.kv.groups), self.spare, self.kv.block_size))

    def _inputs(self, size: Bucket) -> GraphInputs:
        device = self.kv.tensors[0].device
        return GraphInputs(size, self.kv.block_size, self.max_num_seqs, device, len(self.kv.groups))

    def _capture(self, inputs: GraphInputs) -> Captured:
        batch = inputs.batch
        self.kv.load(batch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up: initialization (cuBLAS, tables, kernels) must not be in the graph
            self._forward(batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            hidden = self._forward(batch)
        return Captured(graph, inputs, hidden)

    def _forward(self, batch: Batch) -> torch.Tensor:
        if self.adapters is not None:
            self.adapters.load(batch.adapters)
        hidden: torch.Tensor = self.model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len, self.kv).hidden
        return hidden
