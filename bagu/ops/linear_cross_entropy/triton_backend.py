"""The head on Triton. 16-bit operands that TMA can read have no logits: see tile_kernels.py.

For all others cuBLAS computes the logits of a chunk, one kernel reads them, and one replaces them by their gradient.
`score` is cross_entropy's forward without the loss. `slope` writes the gradient in the inputs' dtype over the logits:
16-bit values of a row go to the first half of that row's fp32 memory. The two GEMMs read a [m, V] tensor with twice the
row stride, and there is no second buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.contract.signature import accumulator
from bagu.ops.cross_entropy.spec import Args as CrossEntropy
from bagu.ops.cross_entropy.triton_backend import exp, reduce_rows
from bagu.ops.kernels.launch import next_power_of_2, triton_acc
from bagu.ops.linear_cross_entropy import chunked, loss_kernels, tile_kernels
from bagu.ops.linear_cross_entropy.chunked import EVERY, Kernels
from bagu.ops.linear_cross_entropy.spec import Args
from bagu.ops.matmul.triton_backend import Epilogue, product
from bagu.ops.replay.launcher import available_launcher
from bagu.ops.replay.plan import Results
from bagu.ops.replay.replay import Replayed

TUNABLE = {"backward": {"block": (1024, 4096, 8192), "num_warps": (4, 8)}}  # the tests run every combination
ALIGN = 16  # row lengths of the logits' memory are a multiple of this, so that loads are 128 bits wide
PAD = 64  # an odd vocabulary is padded to a multiple of this: a GEMM of 50,257 columns has no fast kernel


@triton.jit
def _slope(
    x_ptr, y_ptr, t_ptr, lse_ptr, dt_ptr, dlse_ptr, V, width, x_stride, y_stride, ignore_index,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y = dlse * exp(x - lse) + dt at the target, in the memory of x; one program owns a row and reads it upwards.

    No store overwrites a logit that is still to be read. Let a block be B words of 4 bytes in x and 2 in y. Block b is
    read from bytes [4bB, 4(b+1)B) of the row and written to [2bB, 2(b+1)B). For b > 0 that ends at or before 4bB, so
    it covers only blocks read earlier; for b = 0 it covers the block itself. The barrier makes every thread's loads
    of blocks 0 to b come before any thread's stores of block b. Loads may run ahead (a pipelined loop does that):
    they read past 4bB, and no store of block b or an earlier one writes there.
    """
    m = tl.program_id(0)
    target = tl.load(t_ptr + m)
    kept = target != ignore_index
    word = tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)
    lse = tl.load(lse_ptr + m)
    dt = tl.where(kept, tl.load(dt_ptr + m), 0.0)
    dlse = tl.where(kept, tl.load(dlse_ptr + m), 0.0)
    x_row, y_row = x_ptr + m.to(tl.int64) * x_stride, y_ptr + m.to(tl.int64) * y_stride
    for start in range(0, width, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + v, ((v < width) & kept) != 0, 0.0).to(ACC)
        tl.debug_barrier()
        y = tl.where(v < V, dlse * exp(x - lse), 0.0)
        tl.store(y_row + v, tl.where(v == word, y + dt, y), v < width)


def _pad(weight: torch.Tensor) -> torch.Tensor:
    """The weight with rows of zeros up to a multiple of PAD, if its number of rows is not a multiple of 8."""
    V = weight.shape[0]
    return weight if V % 8 == 0 else torch.nn.functional.pad(weight, (0, 0, 0, -V % PAD))


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden @ weight.T in the accumulator's dtype, in rows padded to ALIGN words."""
    out = _logits_memory(hidden, weight)
    if hidden.dtype == out.dtype:
        return torch.mm(hidden, weight.T, out=out)
    return torch.mm(hidden, weight.T, out_dtype=out.dtype, out=out)


def _logits_memory(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (M, V), acc = (hidden.shape[0], weight.shape[0]), accumulator(hidden.dtype)
    return torch.empty(M, triton.cdiv(V, ALIGN) * ALIGN, dtype=acc, device=hidden.device)[:, :V]


def _logits_by_row(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same by the product kernel, whose rows are batch-invariant. (`chunked.operands` widens the weight on other
    devices than CUDA, also on meta tensors.)"""
    return product(hidden, weight.to(hidden.dtype), Epilogue(), _logits_memory(hidden, weight))


def _score_host(values: Sequence[Any]) -> Results:
    logits, targets, ignore_index, splits = values
    target_logit = torch.empty(logits.shape[0], dtype=logits.dtype, device=logits.device)
    lse = torch.empty_like(target_logit)
    rows = CrossEntropy(logits, targets, ignore_index, label_smoothing=0.0, z_loss=0.0)
    reduce_rows(rows, target_logit, lse, splits=splits)
    return target_logit, lse


_replayed_score = Replayed(_score_host, available_launcher)


def _score(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, *, splits: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores: Any = _replayed_score(logits, targets.contiguous(), ignore_index, splits)
    target_logit, lse = scores
    return target_logit, lse


def _overwrite(
    logits: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, dtarget_logit: torch.Tensor, dlse: torch.Tensor,
    ignore_index: int, dtype: torch.dtype, *, block: int | None = None, num_warps: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """The gradient of `logits` in `dtype`, and zeros in the padding of the rows, in the logits' own memory."""
    (M, V), width = logits.shape, logits.stride(0)
    memory = logits.as_strided((M, width), (width, 1))
    dlogits = memory.view(dtype)
    block = min(block or 4096, next_power_of_2(width))
    _slope[(M,)](
        memory, dlogits, targets.contiguous(), lse.contiguous(), dtarget_logit.contiguous(), dlse.contiguous(),
        V, width, width, dlogits.stride(0), ignore_index,
        BLOCK=block, ACC=triton_acc(logits.dtype), num_warps=num_warps or min(max(block // 512, 1), 4),
    )  # fmt: skip
    return dlogits[:, :width]


class _Kernels(Kernels):
    """With one kernel for the loss; and, if the operands allow it, exps of tiles in place of logits."""

    def slope_itemsize(self, hidden: torch.Tensor, weight: torch.Tensor) -> int:
        return 2 if tile_kernels.fits(hidden, weight) else super().slope_itemsize(hidden, weight)

    def product_slope(
        self, hidden: torch.Tensor, weight: torch.Tensor, V: int, targets: torch.Tensor, lse: torch.Tensor,
        dtarget_logit: torch.Tensor, dlse: torch.Tensor, ignore_index: int, dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        x, w = hidden.to(dtype), weight.to(dtype)  # `chunked.operands` widens them on other devices than CUDA
        if tile_kernels.fits(x, w):
            return tile_kernels.slope(x, w, V, targets, lse, dtarget_logit, dlse, ignore_index)
        return super().product_slope(hidden, weight, V, targets, lse, dtarget_logit, dlse, ignore_index, dtype)

    def loss_and_slope(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        V: int,
        targets: torch.Tensor,
        weights: torch.Tensor,
        z_loss: float,
        ignore_index: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x, w = hidden.to(dtype), weight.to(dtype)
        if tile_kernels.fits(x, w):
            return tile_kernels.loss_and_slope(x, w, V, targets, weights, z_loss, ignore_index)
        return super().loss_and_slope(hidden, weight, V, targets, weights, z_loss, ignore_index, dtype)

    def loss(
        self,
        target_logit: torch.Tensor,
        lse: torch.Tensor,
        weights: torch.Tensor,
        targets: torch.Tensor,
        z_loss: float,
        ignore_index: int,
    ) -> torch.Tensor:
        return loss_kernels.weighted_loss(target_logit, lse, weights, targets, z_loss, ignore_index)

    def mean_weights(self, targets: torch.Tensor, ignore_index: int, dtype: torch.dtype) -> torch.Tensor:
        return loss_kernels.mean_weights(targets, ignore_index, dtype)


KERNELS = _Kernels(logits=_logits, score=_score, slope=_overwrite, pad=_pad)
# `score_and_slope` is the plain version here, so that the one-pass loss gives a token's lse the same bits as `score`.
INVARIANT = Kernels(logits=_logits_by_row, score=partial(_score, splits=1), slope=_overwrite, pad=_pad)


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    if tile_kernels.fits(a.hidden, a.weight):
        return tile_kernels.scores(a.hidden, a.weight, a.targets, a.ignore_index)
    return chunked.forward(a, KERNELS)


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    return chunked.forward(a, INVARIANT)


def backward(
    a: Args,
    dtarget_logit: torch.Tensor,
    dlse: torch.Tensor,
    lse: torch.Tensor,
    needs: Mapping[str, bool] = EVERY,
    *,
    block: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    kernels = replace(KERNELS, slope=partial(_overwrite, block=block, num_warps=num_warps))
    return chunked.backward(a, dtarget_logit, dlse, lse, needs, kernels)


def invariant_backward(
    a: Args, dtarget_logit: torch.Tensor, dlse: torch.Tensor, lse: torch.Tensor, needs: Mapping[str, bool] = EVERY
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """With the forward's logits: exp(logit - lse) of logits of another kernel has the rounding errors of both."""
    return chunked.backward(a, dtarget_logit, dlse, lse, needs, INVARIANT)
