"""Cross-entropy on held-out batches, as the callable that `fit` takes: it returns metrics by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch

from bagu import ops
from bagu.errors import BaguError
from bagu.nn.model import Transformer
from bagu.types import IGNORE, Batch

__all__ = ["held_out_loss", "nll_sum"]


@torch.no_grad()
def nll_sum(model: Transformer, batch: Batch) -> torch.Tensor:
    """Summed negative log-likelihood of a batch's targets, in nats, on the model's device."""
    batch = batch.to(model.embedding.weight.device, non_blocking=True)
    hidden = model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len).hidden
    target_logit, lse = ops.linear_cross_entropy(hidden, model.head_weight, batch.targets, ignore_index=IGNORE)
    return (lse - target_logit).double().sum()  # both are 0 for an ignored token


def held_out_loss(
    batches: Callable[[], Iterable[Batch]], *, prefix: str = "val"
) -> Callable[[Transformer], Mapping[str, float]]:
    """An evaluation over the same batches every time: `<prefix>_loss_nats` per target and `<prefix>_bits_per_byte`."""

    def evaluate(model: Transformer) -> Mapping[str, float]:
        total: torch.Tensor | None = None
        targets = size = 0
        for batch in batches():
            nll = nll_sum(model, batch)
            total = nll if total is None else total + nll
            targets, size = targets + batch.num_targets, size + batch.target_bytes
        if total is None:
            raise BaguError("there is no held-out batch to evaluate on", hint="hold out more documents")
        nats = float(total)
        found = {f"{prefix}_loss_nats": nats / targets}
        return found | ({f"{prefix}_bits_per_byte": nats / math.log(2) / size} if size else {})

    return evaluate
