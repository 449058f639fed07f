"""Attention on a GPU by the kernels that ship with PyTorch. Nothing is read back.

    segments of one length, no window     cuDNN on Hopper and newer (H200, d128, causal: about 1.6x FlashAttention-2)
    anything else                         FlashAttention-2 over `cu_seqlens`

Both take 16-bit inputs, heads in groups, and no term but the window; the rest runs with all scores in memory.
"""

from __future__ import annotations

import torch

from bagu.ops.attention.shape import Shape
from bagu.ops.eager import constant

__all__ = ["equal", "fits", "hopper", "on_16_bytes", "packed", "prefers_equal"]

WIDEST = 256  # features of a head that FlashAttention-2 takes
CUDNN_WIDEST = 128  # and that cuDNN's backward takes on every release since Hopper


def fits(q: torch.Tensor, v: torch.Tensor, shape: Shape) -> bool:
    """Whether a fused kernel can run this call."""
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and max(q.shape[-1], v.shape[-1]) <= WIDEST
        and all(x is None for x in (shape.slopes, shape.bias, shape.sinks, shape.softcap))
    )


def prefers_equal(q: torch.Tensor, v: torch.Tensor, shape: Shape) -> bool:
    """Whether segments of one length are better done by cuDNN. Its backward does not promise the same bits twice."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    narrow = all(x.shape[-1] % 8 == 0 and x.shape[-1] <= CUDNN_WIDEST for x in (q, v))
    return shape.plain and narrow and not strict and hopper(q.device.index or 0)


@constant
def hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0) and torch.backends.cudnn.is_available()


def on_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """x with unit stride along its features, and its first element and every row at a multiple of 16 bytes.

    The fused kernels load 16 bytes at a time and do not check it: other strides are a misaligned address.
    """
    each = 16 // x.element_size()
    fits = x.stride(-1) == 1 and x.storage_offset() % each == 0 and all(s % each == 0 for s in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def equal(
    shape: Shape, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[B, L, H, E] and lse[B, L, H] of B segments of length L."""
    q, k, v = (on_16_bytes(x).transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, shape.causal, False, scale=scale
    )[:2]
    return out.transpose(1, 2), lse.reshape(q.shape[:3]).transpose(1, 2)


def packed(
    shape: Shape, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor,
    max_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out[T, H, E] and lse[T, H]. The kernel wants q, k and v of one width, a multiple of 8: zeros fill it up."""
    E, wide = v.shape[-1], -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    q, k, v = (
        torch.nn.functional.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else on_16_bytes(x) for x in (q, k, v)
    )
    cu_seqlens = cu_seqlens.contiguous()  # the kernel raises for other strides
    side = -1 if shape.window is None else shape.window - 1  # the kernel counts keys beside the query's own
    out, lse = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, shape.causal, False, scale=scale,
        window_size_left=side, window_size_right=0 if shape.causal else side,
    )[:2]  # fmt: skip
    return out[..., :E], lse.T
