"""torch.nn's TransformerEncoderLayer from the layers of this package. Masks run torch's own forward."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bagu import ops
from bagu.nn.drop_in.attention import MultiheadAttention
from bagu.nn.drop_in.layers import LayerNorm, Linear, supported
from bagu.ops.call.dispatch import calls_torch
from bagu.ops.call.eager import autocasting
from bagu.ops.kernels.launch import few_rows

INSIDE: dict[str, type[nn.Module]] = {
    "self_attn": MultiheadAttention,
    "norm1": LayerNorm,
    "norm2": LayerNorm,
    "linear1": Linear,
    "linear2": Linear,
    "dropout": nn.Dropout,
    "dropout1": nn.Dropout,
    "dropout2": nn.Dropout,
}


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """Its attention, norms and linear layers are those of this package; dropout is torch's. On a GPU a relu or an exact
    gelu is applied by the kernel of the product before it, and with few rows the whole layer is one op."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt(self)

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        if src_mask is not None or src_key_padding_mask is not None or is_causal or src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        if src.is_cuda and few_rows(src, self.linear1.weight) and (weights := self._weights(src)) is not None:
            return self._in_one_op(src, weights)
        x = src
        if self.norm_first:
            x = x + self._attention(self.norm1(x))
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._attention(x))
        return self.norm2(x + self._ff_block(x))

    def _weights(self, x: torch.Tensor) -> Sequence[torch.Tensor] | None:
        """The weights in the order of `encoder_layer`; None if it does not compute this layer on x: there is dropout, a
        layer that is not this package's, or a hook. By dicts and in loops, since the host's time is the limit."""
        inside: list[Any] = [self._modules[name] for name in INSIDE]
        for layer, kind in zip(inside, INSIDE.values(), strict=True):
            if not _without_hooks(layer, kind):
                return None
        attention, norm1, norm2, linear1, linear2, *drops = inside
        if x.ndim != 3 or not calls_torch(x, on_gpu=True) or autocasting(x) or _fused_name(self.activation) is None:
            return None
        if not (attention.batch_first and attention.packed and norm1.eps == norm2.eps):
            return None
        if self.training and (attention.dropout or any(layer.p for layer in drops)):
            return None
        out = attention.out_proj
        found = [attention.in_proj_weight, attention.in_proj_bias, out.weight, out.bias]
        for layer in (linear1, linear2, norm1, norm2):
            found += layer._parameters.values()  # the weight and the bias
        there = all(weight is not None for weight in found)
        return found if there and supported(x, *found) else None

    def _in_one_op(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        name = _fused_name(self.activation)
        assert name is not None, "_weights checks it"
        return ops.encoder_layer(
            x, *weights, heads=self.self_attn.num_heads, activation=name, norm_first=self.norm_first, eps=self.norm1.eps
        )

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
    ours = {nn.Linear: Linear, nn.LayerNorm: LayerNorm, nn.MultiheadAttention: MultiheadAttention}
    for child in layer.children():
        if type(child) in ours:
            child.__class__ = ours[type(child)]
