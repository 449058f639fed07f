"""torch.nn's MultiheadAttention with bagu's kernels. Masks, weights and other rare arguments run torch's forward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bagu import ops
from bagu.nn.drop_in.layers import autocast, supported
from bagu.ops.call.dispatch import calls_torch
from bagu.ops.call.eager import autocasting
from bagu.ops.kernels.launch import few_rows


class MultiheadAttention(nn.MultiheadAttention):
    """Self-attention without a mask, or with a causal one that `is_causal` announces, and with need_weights=False."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        plain = not need_weights and key_padding_mask is None and (attn_mask is None or is_causal)
        if not (plain and query is key and key is value and self._covered(query)):
            return super().forward(
                query,
                key,
                value,
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        x = query if self.batch_first or query.ndim == 2 else query.transpose(0, 1)
        y = self.attend(x.unsqueeze(0) if x.ndim == 2 else x, causal=is_causal)
        y = y.squeeze(0) if query.ndim == 2 else y
        return (y if self.batch_first or query.ndim == 2 else y.transpose(0, 1)), None

    def _covered(self, x: torch.Tensor) -> bool:
        """Whether `attend` computes what torch's forward does on x."""
        dropout = self.training and self.dropout > 0
        return self.packed and not dropout and supported(*weights_of(self, x)) and x.ndim in (2, 3) and x.numel() > 0

    @property
    def packed(self) -> bool:
        """Whether one weight makes queries, keys and values, and nothing is added to the keys."""
        return self._qkv_same_embed_dim and self.bias_k is None and not self.add_zero_attn

    def attend(self, x: torch.Tensor, *, causal: bool) -> torch.Tensor:
        """Self-attention of x[B, S, N] within each sequence, from one product for queries, keys and values."""
        (B, S, N), H = x.shape, self.num_heads
        if _by_torch(x):
            w_in, b_in, out = self.in_proj_weight, self.in_proj_bias, self.out_proj
            if x.is_cuda and few_rows(x, w_in):
                return ops.self_attention(x, w_in, out.weight, b_in, out.bias, heads=H, causal=causal)
            one = x.is_cuda and x.is_contiguous() and b_in is not None and not causal
            if one and not torch.is_grad_enabled():  # the same in one call: half of the host's time
                y: torch.Tensor = torch._native_multi_head_attention(
                    x, x, x, N, H, w_in, b_in, out.weight, out.bias, None, False
                )[0]
                return y
            packed = F.linear(x, w_in, b_in).view(B, S, 3, H, N // H)
            q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))  # in this order their gradients need one copy
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
            return F.linear(mixed.reshape(B, S, N), out.weight, out.bias)
        x, w_in, b_in, w_out, b_out = weights_of(self, x)
        q, k, v = ops.matmul(x.reshape(B * S, N), w_in, b_in).view(B * S, 3, H, N // H).unbind(1)
        offsets = torch.arange(0, B * S + 1, S, dtype=torch.int32, device=x.device)
        mixed, _ = ops.attention(q, k, v, offsets, S, causal=causal)
        return ops.matmul(mixed.reshape(B, S, N), w_out, b_out)


def _by_torch(x: torch.Tensor) -> bool:
    """Whether the ops would run torch's own kernels on x, which are then called without dispatch: for sequences of one
    length on a GPU in 16 bits cuDNN or FlashAttention-2, and where the backward must be deterministic Triton."""
    return (
        calls_torch(x, on_gpu=True)
        and not autocasting(x)
        and (x.is_cpu or (x.element_size() == 2 and not torch.are_deterministic_algorithms_enabled()))
    )


def weights_of(layer: nn.MultiheadAttention, x: torch.Tensor) -> Any:
    """x and the layer's four weights, in autocast's dtype inside autocast."""
    return autocast(x, layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias)
