"""Initial weights, drawn per parameter name: equal for a seed on any device, in any order, for any part of the model.

matrices, embeddings     normal, init_std (0.02, as GPT-2 and Llama)
output projections       init_std / sqrt(2 * layers): the 2 * layers of them sum to the variance of one (GPT-2)
score head               0: every text has the same score until training
gains 1, biases 0        with weight normalization the gain is the length of the drawn row, so W is the drawn matrix
model without norms      1 / sqrt(inputs) for matrices: a block keeps the variance of its input
"""

import math
import zlib
from collections.abc import Sequence

import torch
from torch import nn

from bagu.nn.hollow import Values
from bagu.nn.linear import Linear
from bagu.nn.model import ScoreHead, Transformer
from bagu.nn.moe import MoE
from bagu.nn.norm import Norm, RMSNorm, ScaleNorm


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> Transformer:
    """Initialize all weights of `model` in place, and return it."""
    values = initial_values(model, seed)
    for name, p in model.named_parameters():
        p.copy_(values(name))
    return model


def initial_values(model: Transformer, seed: int) -> Values:
    """The initial value of each parameter by its name. `model` may be hollow: only its modules and shapes are read."""
    owners = {
        f"{path}.{name}" if path else name: (module, path, name)
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }

    @torch.no_grad()
    def value(full: str) -> torch.Tensor:
        module, path, name = owners[full]
        p = module.get_parameter(name)
        if isinstance(module, Norm) and name == "weight":
            return torch.full(p.shape, _first_gain(module, model.config.hidden_size))
        if name.endswith("bias") or isinstance(module, ScoreHead):
            return torch.zeros(p.shape)
        if name == "gain":  # of the weight in the model's dtype
            return value(f"{path}.weight").to(p.dtype).float().norm(dim=1)
        return draw(p.shape, full, seed).mul_(_std(model, module, path, name, p))

    return value


def _first_gain(norm: Norm, hidden_size: int) -> float:
    if isinstance(norm, ScaleNorm):
        return math.sqrt(hidden_size)
    return 0.0 if isinstance(norm, RMSNorm) and norm.unit_offset else 1.0


def draw(shape: Sequence[int], name: str, seed: int) -> torch.Tensor:
    """Standard normal, fp32 on the CPU, from a stream that depends on (seed, name) only."""
    key = zlib.crc32(f"{seed} {name}".encode())  # the generator uses only 32 bits of its seed
    stream = torch.Generator().manual_seed(key)
    return torch.randn(tuple(shape), generator=stream)


def _std(model: Transformer, module: nn.Module, path: str, name: str, p: torch.Tensor) -> float:
    config = model.config
    matrix = isinstance(module, (Linear, MoE))
    if matrix and config.norm.placement == "none":
        return 1.0 / math.sqrt(p.shape[-1])
    back = matrix and f"{path}.{name}".endswith((".attention.out.weight", ".down.weight", ".ffn.down"))
    return config.init_std / math.sqrt(2 * config.num_layers) if back else config.init_std
