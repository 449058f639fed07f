"""Cross-entropy per token. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.cross_entropy.spec import SPEC


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """The loss of each token in fp32, 0 where its target is `ignore_index`; `z_loss` is the weight of logsumexp².

    The result is not reduced: the mean over targets is `losses.sum() / (targets != ignore_index).sum()`.
    """
    return call(
        SPEC,
        backend,
        logits=logits,
        targets=targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
