"""The weights of a model's linear layers in fp8, rounded anew after every update (nn/fp8.py multiplies with them)."""

import torch

from bagu.errors import ArgumentError, BackendError
from bagu.nn.fp8 import MULTIPLE, rounded
from bagu.nn.linear import Linear, linears_of
from bagu.nn.model import Transformer


class Fp8Weights:
    """Makes every linear layer of a model's blocks train in fp8. Embedding and head keep their dtype: rounding them
    costs the most accuracy, and they are few FLOPs of a large model."""

    def __init__(self, model: Transformer, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            raise BackendError(
                "precision fp8 needs a GPU of compute capability 8.9 or more", hint="leave precision out"
            )
        if model.config.moe is not None:
            raise ArgumentError(
                "precision fp8 and a mixture of experts do not go together: the products of experts have no fp8 kernel",
                hint="leave precision out",
            )
        self.linears = linears_of(model.blocks)
        for name, linear in self.linears.items():
            _check(name, linear)

    def round(self) -> None:
        """Round all weights. Called whenever they have changed."""
        for linear in self.linears.values():
            linear.rounded = rounded(linear.weight.detach())

    def release(self) -> None:
        for linear in self.linears.values():
            linear.rounded = None


def _check(name: str, linear: Linear) -> None:
    """Raise if cuBLAS cannot multiply with this weight, or if the layer's product is not with the weight itself."""
    found = f"blocks.{name} is {list(linear.weight.shape)}"
    if linear.gain is not None or linear.weight_scale is not None:
        kind = "weight normalization" if linear.gain is not None else "an int8 weight"
        raise ArgumentError(f"precision fp8: blocks.{name} has {kind}", hint="leave one of them out")
    if any(size % MULTIPLE for size in linear.weight.shape):
        raise ArgumentError(
            f"precision fp8: {found}, and cuBLAS needs multiples of {MULTIPLE}", hint="leave precision out"
        )
