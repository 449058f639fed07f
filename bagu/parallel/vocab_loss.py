"""The loss of a head whose vocabulary is divided over ranks.

Each rank has V / t rows of the head and computes two values per token from them: the logit of the target, if it has
that row, and the logsumexp of its logits. Two all-reduces of these values give those of the whole vocabulary; logits
are not exchanged.

    target_logit = sum_r target_logit_r        lse = m + log(sum_r exp(lse_r - m)),   m = max_r lse_r

Every rank has the same result. `token_losses` computes loss, z-loss and logprobs from it, as on one rank.
"""

from typing import Any

import torch
import torch.distributed as dist

from bagu import ops
from bagu.parallel.collectives import all_reduce
from bagu.parallel.mesh import Mesh


def vocab_range(vocab_size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first row of a rank's share of the vocabulary, and the row after its last. The sizes of shares differ by at
    most one, so nothing is padded."""
    size, more = divmod(vocab_size, ranks)
    start = rank * size + min(rank, more)
    return start, start + size + (rank < more)


class _MergeRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, target_logit: torch.Tensor, lse: torch.Tensor, mesh: Mesh
    ) -> tuple[torch.Tensor, torch.Tensor]:
        largest = lse.clone()
        all_reduce(mesh, largest, "tp", op=dist.ReduceOp.MAX)
        both = torch.stack((target_logit, (lse - largest).exp()))
        all_reduce(mesh, both, "tp")
        merged = largest + both[1].log()
        ctx.save_for_backward(lse, merged)
        return both[0], merged

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        lse, merged = ctx.saved_tensors
        return grads[0], grads[1] * (lse - merged).exp(), None


def vocab_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    mesh: Mesh,
    ignore_index: int = -100,
    memory: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.linear_cross_entropy` for a head whose rows are divided over tp: (target_logit, lse) of each token.

    `hidden[T, D]` and `targets[T]` are the same on all ranks, `weight` is this rank's share of `vocab_size` rows. The
    gradient of `hidden` is this rank's part; `tensor_parallel` sums the parts.
    """
    start, stop = vocab_range(vocab_size, mesh.coordinate("tp"), mesh.size("tp"))
    kept = targets != ignore_index
    mine = (targets >= start) & (targets < stop) & kept
    # A target of another rank gets row 0 here, and its logit is replaced: the op makes both values 0 if it is ignored.
    local = torch.where(kept, torch.where(mine, targets - start, 0), ignore_index)
    target_logit, lse = ops.linear_cross_entropy(hidden, weight, local, ignore_index, memory)
    target_logit, lse = _MergeRanks.apply(torch.where(mine, target_logit, 0.0), lse, mesh)
    return target_logit, torch.where(kept, lse, 0.0)  # ranks of zeros have merged to log(t)
