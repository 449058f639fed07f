"""torch.nn's TransformerEncoderLayer from the layers of this package. Masks run torch's own forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bagu.nn.drop_in.attention import MultiheadAttention, weights_of
from bagu.nn.drop_in.layers import LayerNorm, Linear, supported
from bagu.ops.dispatch import calls_torch

__all__ = ["TransformerEncoderLayer"]

# Up to this many values, inference is limited by the host, and torch's fast path, which is one call, is the faster way:
# 1024 x 1024 take an H200 95 us either way, and its host 2 to 4 times that.
SMALL = 2**22


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """Its attention, norms and linear layers are those of this package; dropout is torch's. On a GPU a relu or an exact
    gelu is applied by the kernel of the product before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt(self)

    def forward(
        self, src: torch.Tensor, src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None, is_causal: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        if src_mask is not None or src_key_padding_mask is not None or is_causal or src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        if src.is_cuda and src.numel() <= SMALL and self._in_one_call(src):
            return self._one_call(src)
        x = src
        if self.norm_first:
            x = x + self._attention(self.norm1(x))
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._attention(x))
        return self.norm2(x + self._ff_block(x))

    def _in_one_call(self, x: torch.Tensor) -> bool:
        """Whether torch's fast path computes this layer on x: inference, with this package's layers and no hooks."""
        if torch.is_grad_enabled() or self.training or x.ndim != 3 or not calls_torch(x, on_gpu=True):
            return False
        attention, norms, products = self.self_attn, (self.norm1, self.norm2), (self.linear1, self.linear2)
        kinds = (MultiheadAttention, LayerNorm, LayerNorm, Linear, Linear)
        inside = (attention, *norms, *products)
        return (
            all(_without_hooks(layer, kind) for layer, kind in zip(inside, kinds, strict=True))
            and all(_without_hooks(layer, nn.Dropout) for layer in (self.dropout, self.dropout1, self.dropout2))
            and attention.batch_first
            and attention._qkv_same_embed_dim
            and attention.num_heads % 2 == 0
            and self.norm1.eps == self.norm2.eps
            and bool(self.activation_relu_or_gelu)
            and all(layer.bias is not None for layer in (*norms, *products))
            and supported(*weights_of(attention, x), *(layer.weight for layer in (*norms, *products)))
        )

    def _one_call(self, x: torch.Tensor) -> torch.Tensor:
        attention, out = self.self_attn, self.self_attn.out_proj
        y: torch.Tensor = torch._transformer_encoder_layer_fwd(
            x, attention.embed_dim, attention.num_heads, attention.in_proj_weight, attention.in_proj_bias, out.weight,
            out.bias, self.activation_relu_or_gelu == 2, self.norm_first, self.norm1.eps, self.norm1.weight,
            self.norm1.bias, self.norm2.weight, self.norm2.bias, self.linear1.weight, self.linear1.bias,
            self.linear2.weight, self.linear2.bias, None, None,
        )  # fmt: skip
        return y

    def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
        name = _fused_name(self.activation)
        if name is None or not x.is_cuda or not _without_hooks(self.linear1, Linear):
            return super()._ff_block(x)
        return self.dropout2(self.linear2(self.dropout(self.linear1(x, name))))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout1(self.self_attn(x, x, x, need_weights=False)[0])


def _fused_name(activation: object) -> str | None:
    """The name of an activation that `Linear` applies itself."""
    if activation is F.relu or isinstance(activation, nn.ReLU):
        return "relu"
    exact = isinstance(activation, nn.GELU) and activation.approximate == "none"
    return "gelu" if activation is F.gelu or exact else None


def _without_hooks(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is of this very class, and no hook expects its input or result."""
    return type(layer) is kind and not layer._forward_hooks and not layer._forward_pre_hooks


def adopt(layer: nn.TransformerEncoderLayer) -> None:
    """Make torch's layers inside an encoder layer those of this package."""
    inside = {nn.Linear: Linear, nn.LayerNorm: LayerNorm, nn.MultiheadAttention: MultiheadAttention}
    for child in layer.children():
        if type(child) in inside:
            child.__class__ = inside[type(child)]
