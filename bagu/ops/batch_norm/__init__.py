"""BatchNorm. What it means and costs is in spec.py."""

from __future__ import annotations

import torch

from bagu.errors import ArgumentError
from bagu.ops.batch_norm.spec import SPEC
from bagu.ops.dispatch import call


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
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, new_mean, new_var): dim 1 of x normalised over all the others by the batch's statistics, or in inference by
    the running ones (fp32). Nothing is changed in place: new_mean and new_var are the running statistics after this
    batch, or its own where none are given, or the same ones in inference.
    """
    if (running_mean is None) != (running_var is None):
        given, absent = ("running_mean", "running_var") if running_var is None else ("running_var", "running_mean")
        raise ArgumentError(
            f"batch_norm: {given} is given and {absent} is None",
            hint="give both, or neither to normalise by the batch alone",
        )
    if not training and running_mean is None:
        raise ArgumentError(
            "batch_norm: training is False and running_mean is None, and inference normalises by running statistics",
            hint="give running_mean and running_var, or pass training=True to use the batch's own",
        )
    if training and isinstance(x, torch.Tensor) and x.ndim > 1 and x.numel() and x.numel() == x.shape[1]:
        raise ArgumentError(
            f"batch_norm: x has shape {list(x.shape)}, one value per channel, and training wants two or more",
            hint="a single value has no variance: give a larger batch, or training=False",
        )
    return call(
        SPEC, backend, x=x, w=w, b=b, running_mean=running_mean, running_var=running_var,
        training=training, momentum=momentum, eps=eps,
    )  # fmt: skip
