"""The tensors of a step: a plan's host lists, and the blocks of its sequences, as arrays and tensors on the device."""

from typing import NamedTuple

import numpy as np
import torch

from bagu.nn.kv import CacheError
from bagu.serve.adapters.layers import NO_ADAPTER
from bagu.serve.cpu.compiled import Decodes
from bagu.serve.kv.paged import Batch, PagedKV
from bagu.serve.plan import Plan


class Late(NamedTuple):
    """The tokens of a step that the previous step has not sampled yet."""

    rows: torch.Tensor  # in the ids of the step
    samples: torch.Tensor  # indices into the tokens that the previous step samples

    def fill(self, ids: torch.Tensor, tokens: torch.Tensor) -> None:
        ids.index_copy_(0, self.rows, tokens.index_select(0, self.samples))


def sample_rows(plan: Plan) -> np.ndarray | None:
    """The rows of the tokens after which one is sampled; None if these are all."""
    rows = plan.sample_rows
    if len(rows) == len(plan.ids) and rows == list(range(len(rows))):
        return None
    return np.array(rows, dtype=np.int64)


class StepArrays(NamedTuple):
    """The inputs of a step on the host. T = tokens, S = sequences, R = groups of layers, L = late tokens,
    N = samples."""

    ids: np.ndarray  # [T] int64; any token where it is late
    positions: np.ndarray  # [T] int64
    slots: np.ndarray  # [R, T] int64: in the KV pool, as in `Batch`
    adapters: np.ndarray | None  # [T] int64: slots of their adapters
    cu_seqlens: np.ndarray  # [S + 1] int32
    context_lens: np.ndarray  # [S] int32
    tables: np.ndarray  # [R, max_num_seqs, blocks] int32: the block tables of all running sequences, by groups
    table_rows: np.ndarray  # [S]: their rows
    late: np.ndarray  # [L, 2] int64: rows of T, and indices into the tokens that the previous step samples
    sample_rows: np.ndarray | None  # [N] int64
    max_len: int
    max_context: int


class StepInputs:
    """Owns the block tables, one row per running sequence and group of layers, and updates a few entries per step; a
    step allocates only its results and small index tensors."""

    def __init__(
        self, kv: PagedKV, device: torch.device, max_num_seqs: int, max_model_len: int, *, adapters: bool
    ) -> None:
        """`adapters`: sequences may have LoRA adapters."""
        self.kv, self.device, self._has_adapters = kv, device, adapters
        rows, columns = len(kv.groups) * max_num_seqs, -(-max_model_len // kv.block_size)
        self.tables = np.zeros((rows, columns), dtype=np.int32)

    @property
    def table_positions(self) -> int:
        """How many positions of a sequence a row of the tables has room for."""
        return self.tables.shape[1] * self.kv.block_size

    def write_tables(self, plan: Plan) -> None:
        for row, entry, block in plan.table_writes:
            if not 0 <= block < self.kv.num_blocks:  # kernels use this table without a bounds check
                raise CacheError(f"a block table names block {block}, and the pool has 0 to {self.kv.num_blocks - 1}")
            self.tables[row, entry] = block

    def to_device(self, *values: np.ndarray) -> list[torch.Tensor]:
        """Move host arrays of one dtype to the model's device; to a GPU with one async copy from pinned memory."""
        if self.device.type != "cuda":
            return [torch.from_numpy(v) for v in values]
        flat = torch.from_numpy(np.concatenate([v.ravel() for v in values])).pin_memory()
        pieces = flat.to(self.device, non_blocking=True).split([v.size for v in values])
        return [piece.view(v.shape) for piece, v in zip(pieces, values, strict=True)]

    def adapter_slots(self, plan: Plan) -> np.ndarray | None:
        """[T]: the slot of each token's adapter; None if no token has one."""
        if not self._has_adapters:
            return None
        each = [NO_ADAPTER if s.sequence.adapter is None else s.sequence.adapter.slot for s in plan.slices]
        if all(slot == NO_ADAPTER for slot in each):
            return None
        return np.array(each, dtype=np.int64).repeat(np.diff(plan.cu_seqlens))

    def decodes(self, plan: Plan) -> Decodes:
        """The plan as arrays with an entry per token. Late tokens are not in it yet."""
        if plan.max_len == 1:
            new = np.array((plan.ids, plan.context_lens, plan.table_rows))
        else:
            rows = np.array(plan.table_rows).repeat(np.diff(plan.cu_seqlens))
            new = np.stack((np.array(plan.ids), np.array(plan.positions) + 1, rows))
        return Decodes(new, self.tables, plan.max_len > 1, self.adapter_slots(plan))

    def batch(self, plan: Plan) -> tuple[Batch, Late | None, torch.Tensor | None]:
        """The plan as tensors on the device, what is still to be put into them, and `sample_rows`."""
        host, n = self.arrays(plan), plan.num_decodes
        sampled = np.empty(0, dtype=np.int64) if host.sample_rows is None else host.sample_rows
        ids, positions, slots, *which, rows = self.to_device(
            host.ids, host.positions, host.slots, *host.late.T, sampled
        )
        tables = host.tables[:, host.table_rows, : -(-plan.max_context // self.kv.block_size)]
        cu_seqlens, context_lens, block_tables = self.to_device(host.cu_seqlens, host.context_lens, tables)
        batch = Batch(
            ids=ids,
            positions=positions,
            slots=slots.unbind(),
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            block_tables=block_tables.unbind(),
            max_len=plan.max_len,
            max_context=plan.max_context,
            num_decodes=n,
            decode_context=max(plan.context_lens[:n], default=0),
            adapters=None if host.adapters is None else self.to_device(host.adapters)[0],
        )
        return batch, Late(*which) if plan.late else None, None if host.sample_rows is None else rows

    def arrays(self, plan: Plan) -> StepArrays:
        B = self.kv.block_size
        if plan.max_len == 1:  # as many tokens as sequences: convert all lists at once
            ids, places, lengths, rows = np.array((plan.ids, plan.positions, plan.context_lens, plan.table_rows))
            owner, offsets = rows, np.arange(len(rows) + 1, dtype=np.int32)
        else:
            ids, places, lengths, rows = map(np.array, (plan.ids, plan.positions, plan.context_lens, plan.table_rows))
            offsets = np.array(plan.cu_seqlens, dtype=np.int32)
            owner = rows.repeat(np.diff(offsets))
        block, place = np.divmod(places, B)
        tables = self.tables.reshape(len(self.kv.groups), -1, self.tables.shape[1])
        return StepArrays(
            ids=ids.clip(min=0),
            positions=places,
            slots=tables[:, owner, block] * np.int64(B) + place,
            adapters=self.adapter_slots(plan),
            cu_seqlens=offsets,
            context_lens=lengths.astype(np.int32),
            tables=tables,
            table_rows=rows,
            late=np.array(plan.late, dtype=np.int64).reshape(-1, 2),
            sample_rows=sample_rows(plan),
            max_len=plan.max_len,
            max_context=plan.max_context,
        )
