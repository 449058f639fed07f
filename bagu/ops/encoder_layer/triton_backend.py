"""An encoder layer from the Triton backends of its blocks, with residuals added by the kernels of the norms."""

import torch

from bagu.ops.encoder_layer.parts import Parts
from bagu.ops.kernels.norms import run_backward, run_forward
from bagu.ops.layer_norm.triton_backend import forward_tile
from bagu.ops.mlp import triton_backend as mlp
from bagu.ops.self_attention import triton_backend as self_attention


def _norm(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float, addend: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return run_forward("layer", x, w, eps, forward_tile(x), b=b, addend=addend)


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
    return run_backward("layer", dy, x, w, rstd, eps, None, None, mean=mean, b=b, ds=plus)


_parts = Parts(attention=self_attention, mlp=mlp, norm=_norm, norm_backward=_norm_backward)
forward, backward = _parts.forward, _parts.backward
