"""PyTorch's blocked attention kernel for a CPU, in the dtype in which it is fast and accurate.

It takes [B, heads, L, features], heads in groups and an additive mask, and also returns the logsumexp. Here tensors are
[B, L, heads, features], and a value may have another number of features than a key.

With AVX-512 the kernel multiplies 16-bit matrices as such. On other CPUs it has no 16-bit product: it multiplies
element by element, and its exp for 16-bit inputs is good to 2^-13 only. There 16-bit inputs are converted to fp32. One
core of a Neoverse-N1, 4096 tokens in segments of 256, 4 heads of 64, ms of a forward in the dtype / by way of fp32:
bf16 37,000 / 320, fp16 2,100 / 290; lse is off by 1.4e-4 / 5e-7.
"""

from __future__ import annotations

import torch

from bagu.ops.attention.shape import side_by_side
from bagu.ops.eager import constant
from bagu.ops.signature import accumulator

__all__ = ["backward", "forward", "widens"]

# Longest segments whose 16-bit backward is done in fp32 on every CPU. The 16-bit kernel packs its blocks anew for each
# segment and head. One core of a Xeon with AMX, 4096 tokens, 4 heads of 64, bf16 against fp32 with the copies to and
# from it: 16 long 90 / 10 ms, 102 long 63 / 18 ms, 256 long 34 / 31 ms, 512 long 47 / 49 ms, 1024 long 52 / 82 ms.
WIDEN = 256


@constant
def _multiplies_16_bits() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def widens(length: int) -> bool:
    """Whether the backward of 16-bit segments of this length is done in fp32."""
    return length <= WIDEN or not _multiplies_16_bits()


def forward(
    scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[B, L, H, E] and lse[B, L, H]. `added` is fp32 beside 16-bit inputs too: slope * distance needs the digits."""
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
    """dq, dk and dv, in the dtype of the inputs; the caller converts these where `widens` says so."""
    D, E = q.shape[-1], v.shape[-1]
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_heads_first(x, max(D, E)) for x in (dout, q, k, v, out)), lse.transpose(1, 2), 0.0, causal, attn_mask=added,
        scale=scale,
    )  # fmt: skip
    dq, dk, dv = (g.transpose(1, 2)[..., :n] for g, n in zip(grads, (D, D, E), strict=True))
    return dq, dk, dv


def _heads_first(x: torch.Tensor, features: int) -> torch.Tensor:
    """[B, L, heads, F] as [B, heads, L, features], padded with zeros: the kernel wants as many for q and k as for v."""
    x = side_by_side(x).transpose(1, 2)
    return x if x.shape[-1] == features else torch.nn.functional.pad(x, (0, features - x.shape[-1]))
