"""Implementations in other libraries, for the benchmark."""

import torch
import torch.nn.functional as F


def eager(x: torch.Tensor, scale: float, mask: torch.Tensor | None, lengths: torch.Tensor | None) -> torch.Tensor:
    """The usual PyTorch code: scale and fill if needed, then F.softmax (NaN for a row without columns)."""
    return F.softmax(_scores(x, scale, mask, lengths), -1)


def liger(x: torch.Tensor, scale: float, mask: torch.Tensor | None, lengths: torch.Tensor | None) -> torch.Tensor:
    """Liger has no scale and no mask; both are applied as in `eager`, at the same cost."""
    from liger_kernel.transformers.functional import liger_softmax

    return liger_softmax(_scores(x, scale, mask, lengths))


def _scores(x: torch.Tensor, scale: float, mask: torch.Tensor | None, lengths: torch.Tensor | None) -> torch.Tensor:
    if scale != 1.0:
        x = x * scale
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf)
    if lengths is not None:
        x = x.masked_fill(torch.arange(x.shape[-1], device=x.device) >= lengths.unsqueeze(-1), -torch.inf)
    return x
