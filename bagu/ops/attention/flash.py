"""PyTorch's blocked attention kernel for CPUs, run in the dtype in which it is fast and accurate.

The kernel takes [B, heads, L, features], grouped heads and an additive mask, and also returns the logsumexp. In this
file tensors are [B, L, heads, features], and values may have a different number of features than keys.

With AVX-512 the kernel multiplies 16-bit matrices directly. On other CPUs it has no 16-bit matrix product: it
multiplies element by element, and its exp for 16-bit inputs is accurate only to 2^-13. On these CPUs 16-bit inputs are
converted to fp32. One core of a Neoverse-N1, 4096 tokens in segments of 256, 4 heads of 64, ms of a forward in the
dtype / through fp32: bf16 37,000 / 320, fp16 2,100 / 290; the error of lse is 1.4e-4 / 5e-7.
"""

import torch

from bagu.ops.attention.shape import side_by_side
from bagu.ops.call.eager import constant
from bagu.ops.contract.signature import accumulator

# Allowed error of lse. With AVX-512 and 16-bit inputs the kernel's exp(0) differs from 1 by 5.4e-5: 453 ulps of fp32.
LSE_ULPS = 512

# The longest segments whose 16-bit backward runs in fp32 on every CPU. The 16-bit kernel repacks its blocks for each
# segment and head. One core of a Xeon with AMX, 4096 tokens, 4 heads of 64, bf16 / fp32 including conversions, by
# segment length: 16: 90 / 10 ms, 102: 63 / 18 ms, 256: 34 / 31 ms, 512: 47 / 49 ms, 1024: 52 / 82 ms.
WIDEN = 256


@constant
def _multiplies_16_bits() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def widens(length: int) -> bool:
    """Whether the backward of 16-bit segments of this length runs in fp32."""
    return length <= WIDEN or not _multiplies_16_bits()


def forward(
    scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[B, L, H, E] and lse[B, L, H]. `added` is fp32 for 16-bit inputs too: slope * distance needs the precision."""
    dtype, features = q.dtype, max(q.shape[-1], v.shape[-1])
    if not _multiplies_16_bits():
        q, k, v = (x.to(accumulator(dtype)) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(_heads_first(x, features) for x in (q, k, v)), 0.0, causal, attn_mask=added, scale=scale
    )
    return out.transpose(1, 2)[..., : v.shape[-1]].to(dtype), lse.transpose(1, 2)


def backward(
    scale: float, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, added: torch.Tensor | None, *, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv, in the dtype of the inputs; the caller converts the inputs if `widens` is true."""
    D, E = q.shape[-1], v.shape[-1]
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_heads_first(x, max(D, E)) for x in (dout, q, k, v, out)),
        lse.transpose(1, 2),
        0.0,
        causal,
        attn_mask=added,
        scale=scale,
    )
    dq, dk, dv = (g.transpose(1, 2)[..., :n] for g, n in zip(grads, (D, D, E), strict=True))
    return dq, dk, dv


def _heads_first(x: torch.Tensor, features: int) -> torch.Tensor:
    """[B, L, heads, F] as [B, heads, L, features], zero-padded: the kernel needs q, k and v of one width."""
    x = side_by_side(x).transpose(1, 2)
    return x if x.shape[-1] == features else torch.nn.functional.pad(x, (0, features - x.shape[-1]))
