"""An encoder layer from the torch backends of its blocks."""

import torch

from bagu.ops.encoder_layer.parts import Parts
from bagu.ops.layer_norm import torch_backend as layer_norm
from bagu.ops.mlp import torch_backend as mlp
from bagu.ops.self_attention import torch_backend as self_attention


def _norm(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float, addend: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    s = x if addend is None else x + addend
    y, mean, rstd = layer_norm.forward(s, w, b, eps)
    return y, s, mean, rstd


def _norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    plus: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    dx, dw, db = layer_norm.backward(dy, x, w, b, mean, rstd, eps)
    return dx if plus is None else dx + plus, dw, db


_parts = Parts(attention=self_attention, mlp=mlp, norm=_norm, norm_backward=_norm_backward)
forward, backward = _parts.forward, _parts.backward
