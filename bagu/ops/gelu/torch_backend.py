"""GELU in PyTorch. PyTorch's kernels take 16-bit inputs, compute in fp32 and round once, so nothing is widened here."""

import torch
import torch.nn.functional as F

from bagu.ops.call import eager
from bagu.ops.contract.signature import accumulator
from bagu.ops.geglu.torch_backend import step, twice
from bagu.ops.invariant.mode import times_sigmoid


def forward(x: torch.Tensor, approximate: bool) -> tuple[torch.Tensor]:
    return (F.gelu(x, approximate="tanh" if approximate else "none"),)


def backward(dy: torch.Tensor, x: torch.Tensor, approximate: bool) -> tuple[torch.Tensor]:
    return (torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if approximate else "none"),)


def invariant_passes(x: torch.Tensor, approximate: bool) -> tuple[torch.Tensor]:
    z = x.to(accumulator(x.dtype))
    return ((times_sigmoid(z, twice(z)) if approximate else z * step(z, "none")).to(x.dtype),)


invariant_forward = eager.node(forward, invariant_passes, backward, grads=("x",))
