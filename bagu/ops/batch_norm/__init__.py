"""BatchNorm. spec.py has the definition and the cost."""

import torch

from bagu.ops.batch_norm.spec import SPEC
from bagu.ops.call.dispatch import call


def batch_norm(
    x: torch.Tensor,
    w: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    relu: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, new_mean, new_var): normalise x over all dims except dim 1, by the batch's statistics, or in inference
    by the running statistics. Nothing changes in place. new_mean and new_var, fp32, are the running statistics after
    this batch, the batch's own statistics if no running ones are given, or the unchanged running ones in inference.
    With `relu`, y is max(y, 0), computed in the same kernels.
    """
    return call(
        SPEC, backend, x=x, w=w, b=b, running_mean=running_mean, running_var=running_var,
        training=training, momentum=momentum, eps=eps, relu=relu,
    )  # fmt: skip
