"""Attention on a GPU with the kernels that ship with PyTorch, without synchronizing with the host.

    segments of one length, no window     cuDNN on Hopper and newer (H200, d128, causal: about 1.6x FlashAttention-2)
    anything else                         FlashAttention-2 over `cu_seqlens`

Both take 16-bit inputs, grouped heads, and no term except the window; other calls run with all scores in memory.
"""

import torch

from bagu.ops.attention.shape import Shape
from bagu.ops.call.eager import constant

WIDEST = 256  # the most features of a head that FlashAttention-2 supports
CUDNN_WIDEST = 128  # the same for cuDNN's backward, in every release since Hopper


def fits(q: torch.Tensor, v: torch.Tensor, shape: Shape) -> bool:
    """Whether a fused kernel can run this call."""
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and max(q.shape[-1], v.shape[-1]) <= WIDEST
        and all(x is None for x in (shape.slopes, shape.bias, shape.sinks, shape.softcap))
    )


def prefers_equal(q: torch.Tensor, v: torch.Tensor, shape: Shape, length: int) -> bool:
    """Whether cuDNN should run segments of one length. Its backward is not guaranteed to be deterministic, and refuses
    segments of one token."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    narrow = all(x.shape[-1] % 8 == 0 and x.shape[-1] <= CUDNN_WIDEST for x in (q, v))
    return length > 1 and shape.plain and narrow and not strict and hopper(q.device.index or 0)


@constant
def hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0) and torch.backends.cudnn.is_available()


def on_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """x with unit stride along its features, and its first element and every row at a multiple of 16 bytes.

    The fused kernels load 16 bytes at a time without a check: other strides cause a misaligned address error.
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
    shape: Shape,
    scale: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[T, H, E] and lse[T, H]. Zeros pad q, k and v to one width, a multiple of 8, as the kernel requires."""
    E, wide = v.shape[-1], -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    q, k, v = (
        torch.nn.functional.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else on_16_bytes(x) for x in (q, k, v)
    )
    cu_seqlens = cu_seqlens.contiguous()  # the kernel raises for other strides
    side = -1 if shape.window is None else shape.window - 1  # the kernel does not count the query's own key
    out, lse = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, shape.causal, False, scale=scale,
        window_size_left=side, window_size_right=0 if shape.causal else side,
    )[:2]  # fmt: skip
    return out[..., :E], lse.T
