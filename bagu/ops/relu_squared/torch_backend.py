"""The square of a ReLU in PyTorch. Every operation except one product is exact, so no wider dtype is needed."""

import torch

from bagu.ops.call import eager


def formula(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.relu(x).square(),)


def backward(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.addcmul(dy.new_zeros(()), torch.relu(x), dy, value=2),)


forward = eager.node(formula, formula, backward, grads=("x",))
