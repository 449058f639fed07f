"""Paged attention of decodes on a CPU by decode.cpp: keys and values are read once, in place in the pool."""

import ctypes

import torch

from bagu.machine import native
from bagu.ops.paged_attention.pages import Pages

SOURCE = "ops/paged_attention/decode.cpp"
NAMES = {torch.float32: "bagu_decode_fp32", torch.bfloat16: "bagu_decode_bf16"}
SIZES = ("S", "H", "G", "D", "E", "B", "columns", "window", "threads", "k_place", "k_head", "v_place", "v_head")
POINTERS = ("q", "k", "v", "tables", "lengths", "out", "lse")


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in SIZES),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in POINTERS),
    )


def fits(q: torch.Tensor, pages: Pages) -> bool:
    """Whether the kernel supports this dtype and these strides, and can be compiled on this machine."""
    pools = (pages.k, pages.v)
    dense = all(p.stride(3) == 1 and p.stride(0) == p.shape[1] * p.stride(1) and not p.is_neg() for p in pools)
    return q.dtype in NAMES and dense and native.library(SOURCE) is not None


def decode(window: int | None, scale: float, q: torch.Tensor, pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """out[S, H, E] and lse[S, H] of the last token of each sequence, q[S, H, D]."""
    (S, H, D), (_, B, G, E) = q.shape, pages.v.shape
    q, tables, lengths = q.resolve_neg().contiguous(), pages.tables.contiguous(), pages.lengths.contiguous()
    out, lse = q.new_empty(S, H, E), q.new_empty(S, H, dtype=torch.float32)
    strides = (*pages.k.stride()[1:3], *pages.v.stride()[1:3])
    call = _Call(
        S, H, G, D, E, B, tables.shape[1], window or 0, torch.get_num_threads(), *strides, scale,
        *(x.data_ptr() for x in (q, pages.k, pages.v, tables, lengths, out, lse)),
    )  # fmt: skip
    getattr(native.library(SOURCE), NAMES[q.dtype])(ctypes.byref(call))
    return out, lse
