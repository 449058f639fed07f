"""Layers that drop into PyTorch: torch.nn's names, constructors, state dicts and numbers, with bagu's kernels.

from bagu.nn import drop_in
print(drop_in.replace(model))            # swaps the layers of any model in place, and says which
layer = drop_in.LayerNorm(1024)          # or build with them
"""

from bagu.nn.drop_in.attention import MultiheadAttention
from bagu.nn.drop_in.encoder import TransformerEncoderLayer
from bagu.nn.drop_in.layers import BatchNorm2d, Conv2d, Embedding, GroupNorm, Int8Linear, LayerNorm, Linear, RMSNorm
from bagu.nn.drop_in.swap import LAYERS, Replacement, replace

__all__ = [
    "LAYERS",
    "BatchNorm2d",
    "Conv2d",
    "Embedding",
    "GroupNorm",
    "Int8Linear",
    "LayerNorm",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "Replacement",
    "TransformerEncoderLayer",
    "replace",
]
