"""A head's loss from the scores of its tokens, and the weights of a mean, each in one launch of one program.

The scores of 32,768 tokens are 0.5 MB. torch would take several launches, and the products around them cannot be
replayed, so these launches are, each by itself: the host of an H200 takes 0.1 ms for a launch by Triton's own entry.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import triton_acc
from bagu.ops.kernels.scalars import reciprocal
from bagu.ops.replay.launcher import available_launcher
from bagu.ops.replay.plan import Results
from bagu.ops.replay.replay import Replayed


@triton.jit(do_not_specialize=["M"])
def _weighted_loss(
    target_logit_ptr, lse_ptr, weight_ptr, t_ptr, loss_ptr, M, ignore_index, z_loss, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK], ACC)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        lse = tl.load(lse_ptr + m, m < M, 0.0)
        loss = lse - tl.load(target_logit_ptr + m, m < M, 0.0)
        if z_loss != 0.0:  # 0 * inf is NaN
            loss += z_loss * lse * lse
        loss *= tl.load(weight_ptr + m, m < M, 0.0)
        kept = (m < M) & (tl.load(t_ptr + m, m < M, 0) != ignore_index)
        total += tl.where(kept, loss, 0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["M"])
def _mean_weights(t_ptr, weight_ptr, M, ignore_index, BLOCK: tl.constexpr, ACC: tl.constexpr):
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        kept = (m < M) & (tl.load(t_ptr + m, m < M, 0) != ignore_index)
        count += kept.to(tl.int32)
    weight = reciprocal(tl.maximum(tl.sum(count, axis=0), 1), ACC)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        tl.store(weight_ptr + m, tl.zeros([BLOCK], ACC) + weight, m < M)


def weighted_loss_host(values: Sequence[Any]) -> Results:
    target_logit, lse, weights, targets, z_loss, ignore_index = values
    loss = torch.empty((), dtype=lse.dtype, device=lse.device)
    _weighted_loss[(1,)](
        target_logit, lse, weights, targets, loss, len(lse), ignore_index, z_loss,
        BLOCK=2048, ACC=triton_acc(lse.dtype), num_warps=16,
    )  # fmt: skip
    return (loss,)


def _mean_weights_host(values: Sequence[Any]) -> Results:
    targets, ignore_index, dtype = values
    weights = torch.empty(len(targets), dtype=dtype, device=targets.device)
    _mean_weights[(1,)](targets, weights, len(targets), ignore_index, BLOCK=2048, ACC=triton_acc(dtype), num_warps=16)
    return (weights,)


_replayed_loss = Replayed(weighted_loss_host, available_launcher)
_replayed_mean = Replayed(_mean_weights_host, available_launcher)


def weighted_loss(
    target_logit: torch.Tensor,
    lse: torch.Tensor,
    weights: torch.Tensor,
    targets: torch.Tensor,
    z_loss: float,
    ignore_index: int,
) -> torch.Tensor:
    """The sum of weights * (lse - target_logit + z_loss * lse²) over the tokens that are not ignored."""
    tensors = (t.contiguous() for t in (target_logit, lse, weights, targets))
    made: Any = _replayed_loss(*tensors, float(z_loss), ignore_index)
    loss: torch.Tensor = made[0]
    return loss


def mean_weights(targets: torch.Tensor, ignore_index: int, dtype: torch.dtype) -> torch.Tensor:
    """1 / the number of tokens that are not ignored, for each token."""
    made: Any = _replayed_mean(targets.contiguous(), ignore_index, dtype)
    weights: torch.Tensor = made[0]
    return weights
