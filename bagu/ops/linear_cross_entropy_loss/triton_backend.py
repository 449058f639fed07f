"""The one-pass loss on Triton: the head's kernels and two or three GEMMs, and a kernel that scales a gradient.

At 4096 x 4096 x 128,256 in bf16, dweight has 1.05 GB, so scaling it into a new tensor moves 2.1 GB: 0.5 ms beside
17 ms of GEMMs. It is not scaled in place: a custom op may neither change nor return its inputs, and a second
backward over a retained graph would scale it twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import num_sms, triton_acc
from bagu.ops.kernels.scalars import int64
from bagu.ops.linear_cross_entropy import tile_kernels
from bagu.ops.linear_cross_entropy.chunked import EVERY
from bagu.ops.linear_cross_entropy.triton_backend import INVARIANT, KERNELS
from bagu.ops.linear_cross_entropy_loss import one_pass
from bagu.ops.linear_cross_entropy_loss.spec import Args

TUNABLE = {"backward": {"block": (2048, 4096), "num_warps": (4, 8)}}  # the tests run every combination


@triton.jit
def _scale(x_ptr, g_ptr, y_ptr, N, blocks, BLOCK: tl.constexpr, ACC: tl.constexpr):
    g = tl.load(g_ptr).to(ACC)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        n = int64(block) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + n, n < N, 0.0).to(ACC)
        tl.store(y_ptr + n, x * g, n < N)


def _scaled(x: torch.Tensor, factor: torch.Tensor, block: int | None, num_warps: int | None) -> torch.Tensor:
    """x * factor for a contiguous x; a few programs per multiprocessor share the blocks."""
    y, block = torch.empty_like(x), block or 4096
    blocks = triton.cdiv(x.numel(), block)
    if blocks:
        _scale[(min(blocks, 8 * num_sms(x.device)),)](
            x, factor, y, x.numel(), blocks, BLOCK=block, ACC=triton_acc(x.dtype), num_warps=num_warps or 4
        )
    return y


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, targets, ignore_index = a.hidden, a.targets, a.ignore_index
    if a.grad_hidden or a.grad_weight or not tile_kernels.fits(hidden, a.weight):
        return one_pass.forward(a, KERNELS)
    weights = KERNELS.mean_weights(targets, ignore_index, torch.float32) if a.token_weights is None else a.token_weights
    target_logit, lse = tile_kernels.scores(hidden, a.weight, targets, ignore_index)
    loss = KERNELS.loss(target_logit, lse, weights.float(), targets, a.z_loss, ignore_index)
    return loss, target_logit, lse, hidden.new_empty(0), hidden.new_empty(0)


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each token's logit and lse are batch-invariant; the loss is a sum over the batch."""
    return one_pass.forward(a, INVARIANT)


def backward(
    a: Args,
    dloss: torch.Tensor,
    hidden_grad: torch.Tensor,
    weight_grad: torch.Tensor,
    needs: Mapping[str, bool] = EVERY,
    *,
    block: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    one_pass.check_made(needs, grad_hidden=a.grad_hidden, grad_weight=a.grad_weight)
    scale = lambda g: _scaled(g, dloss, block, num_warps)  # noqa: E731
    return scale(hidden_grad) if needs["hidden"] else None, scale(weight_grad) if needs["weight"] else None
