"""A chunk's logits to its scores and its gradient in one kernel: a program owns a row.

The row is read twice, first for the logsumexp, then for the gradient, which is written over it. Two programs of 16
warps run on a multiprocessor, so 264 rows of an H200 are in use at a time: up to a vocabulary of 40,000 the second read
comes from the L2. Between two kernels it comes from memory: at 1024 x 32,768 they take 43 and 50 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.cross_entropy.triton_backend import exp
from bagu.ops.launch import next_power_of_2, triton_acc
from bagu.ops.launcher import available_launcher
from bagu.ops.plan import Results
from bagu.ops.replay import Replayed

__all__ = ["score_and_slope", "weighted_losses"]


@triton.jit
def _base(high):
    """The value to subtract before exp: the maximum, or 0 if it is infinite (inf - inf is NaN)."""
    return tl.where(tl.abs(high) == float("inf"), 0.0, high)


@triton.jit
def _score_and_slope(
    x_ptr, y_ptr, t_ptr, weight_ptr, target_logit_ptr, lse_ptr, V, width, x_stride, y_stride, ignore_index, z_loss,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradient of the weighted loss replaces the logits of a row, in the order that `triton_backend._slope` proves
    to be safe: a block is stored where no later block is loaded from."""
    m = tl.program_id(0)
    target = tl.load(t_ptr + m)
    kept = target != ignore_index
    inside = (target >= 0) & (target < V)
    x_row, y_row = x_ptr + m.to(tl.int64) * x_stride, y_ptr + m.to(tl.int64) * y_stride
    target_logit = tl.load(x_row + target, inside & kept, float("nan")).to(ACC)
    high, total = tl.full([], float("-inf"), ACC), tl.zeros([BLOCK], ACC)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        # masked by the width, a multiple of 16, so that loads are wide
        x = tl.load(x_row + v, ((v < width) & kept) != 0, float("-inf")).to(ACC)
        x = tl.where(v < V, x, float("-inf"))
        higher = tl.maximum(high, tl.max(x, axis=0))
        base = _base(higher)
        total = total * exp(high - base) + exp(x - base)
        high = higher
    lse = tl.where(kept, _base(high) + tl.log(tl.sum(total, axis=0)), 0.0)
    tl.store(target_logit_ptr + m, tl.where(kept, target_logit, 0.0))
    tl.store(lse_ptr + m, lse)
    weight = tl.where(kept, tl.load(weight_ptr + m), 0.0).to(ACC)
    dlse = weight
    if z_loss != 0.0:  # 0 * inf is NaN
        dlse += weight * 2.0 * z_loss * lse
    word = tl.where(inside, target, -1).to(tl.int32)
    for start in range(0, width, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + v, ((v < width) & kept) != 0, 0.0).to(ACC)
        tl.debug_barrier()
        y = tl.where(v < V, dlse * exp(x - lse), 0.0)
        tl.store(y_row + v, tl.where(v == word, y - weight, y), v < width)


@triton.jit
def _weighted_losses(
    target_logit_ptr, lse_ptr, weight_ptr, t_ptr, loss_ptr, M, ignore_index, z_loss, BLOCK: tl.constexpr
):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lse = tl.load(lse_ptr + m, m < M, 0.0)
    loss = lse - tl.load(target_logit_ptr + m, m < M, 0.0)
    if z_loss != 0.0:
        loss += z_loss * lse * lse
    loss *= tl.load(weight_ptr + m, m < M, 0.0)
    kept = tl.load(t_ptr + m, m < M, 0) != ignore_index
    tl.store(loss_ptr + m, tl.where(kept, loss, 0.0), m < M)


def _score_and_slope_host(values: Sequence[Any]) -> Results:
    memory, dlogits, targets, weights, V, z_loss, ignore_index = values
    target_logit, lse = (torch.empty(len(memory), dtype=memory.dtype, device=memory.device) for _ in range(2))
    width, block = memory.shape[1], min(8192, next_power_of_2(memory.shape[1]))
    _score_and_slope[(len(memory),)](
        memory, dlogits, targets, weights, target_logit, lse, V, width, memory.stride(0), dlogits.stride(0),
        ignore_index, z_loss, BLOCK=block, ACC=triton_acc(memory.dtype), num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return target_logit, lse


def _weighted_losses_host(values: Sequence[Any]) -> Results:
    target_logit, lse, weights, targets, z_loss, ignore_index = values
    losses = torch.empty_like(lse)
    if len(lse):
        _weighted_losses[(triton.cdiv(len(lse), 256),)](
            target_logit, lse, weights, targets, losses, len(lse), ignore_index, z_loss, BLOCK=256, num_warps=4
        )
    return (losses,)


# The products between these launches cannot be replayed, so the launches are, each by itself: the host of an H200 takes
# 0.1 ms for a launch by Triton's own entry.
_replayed_scores = Replayed(_score_and_slope_host, available_launcher)
_replayed_losses = Replayed(_weighted_losses_host, available_launcher)


def score_and_slope(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, z_loss: float, ignore_index: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """target_logit, lse, and the gradient of the weighted loss by the logits [m, V], in `dtype` in their memory.

    The columns after V, up to the length of the rows in memory, are zeros."""
    (M, V), width = logits.shape, logits.stride(0)
    memory = logits.as_strided((M, width), (width, 1))
    dlogits = memory.view(dtype)
    scores: Any = _replayed_scores(
        memory, dlogits, targets.contiguous(), weights.contiguous(), V, float(z_loss), ignore_index
    )
    return *scores, dlogits[:, :width]


def weighted_losses(
    target_logit: torch.Tensor, lse: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor, z_loss: float,
    ignore_index: int,
) -> torch.Tensor:  # fmt: skip
    """weights * (lse - target_logit + z_loss * lse²) of each token; 0 for an ignored one."""
    tensors = (t.contiguous() for t in (target_logit, lse, weights, targets))
    made: Any = _replayed_losses(*tensors, float(z_loss), ignore_index)
    losses: torch.Tensor = made[0]
    return losses
