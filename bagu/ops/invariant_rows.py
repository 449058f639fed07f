"""Batch-invariant products and attention on a CPU by invariant_rows.cpp: one row costs one row, not a block of 16.

The choice between this and blocks must not depend on the batch, so it depends only on the dtype and the terms of a
score. The C++ computes fp32, and bf16 if the CPU has no bf16 products: with AMX a block of 16 rows is one instruction.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import torch

from bagu.machine import native
from bagu.machine.device import onednn_has_bf16

__all__ = ["attend", "available", "product"]

SOURCE = "ops/invariant_rows.cpp"
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
CONTIGUOUS = 1 << 40  # positions per block of keys that are not in blocks


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("M", "N", "K", "x_stride", "w_stride", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "w", "bias", "y")),
    )


class _Queries(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("T", "H", "G", "D", "E", "B", "columns", "threads")),
        *((name, ctypes.c_int64) for name in ("k_place", "k_head", "v_place", "v_head")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "begins", "ends", "row", "slot", "tables", "out", "lse")),
    )


def available(dtype: torch.dtype) -> bool:
    """Whether the C++ computes this dtype on this machine."""
    narrow = dtype == torch.bfloat16 and not onednn_has_bf16()
    return (dtype == torch.float32 or narrow) and native.library(SOURCE) is not None


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x[M, K] wᵀ + bias in fp32, [M, N]."""
    dtype = torch.promote_types(x.dtype, w.dtype)  # a head may be widened already
    x, w = _unit_stride(x.to(dtype)), _unit_stride(w.to(dtype))
    bias = None if bias is None else bias.detach().float().contiguous()
    (M, K), N = x.shape, w.shape[0]
    y = torch.empty(M, N)
    call = _Product(
        M, N, K, x.stride(0), w.stride(0), torch.get_num_threads(), x.data_ptr(), w.data_ptr(),
        None if bias is None else bias.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    getattr(native.library(SOURCE), f"bagu_product_{NAMES[x.dtype]}")(ctypes.byref(call))
    return y


def attend(
    window: int | None, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: Sequence[int],
    lengths: Sequence[int], tables: torch.Tensor | None = None, block_size: int = CONTIGUOUS, *, causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out[T, H, E] and lse[T, H] of q[T, H, D] over keys k[·, G, D] and values v[·, G, E].

    q[offsets[s] : offsets[s + 1]] are the last of the lengths[s] tokens of sequence s. Its keys are the rows that its
    block table lists; without tables, they are the rows from offsets[s] on.
    """
    (T, H, D), (_, G, E) = q.shape, v.shape
    q, k, v = _unit_stride(q).contiguous(), _unit_stride(k), _unit_stride(v)
    spans = list(zip(pairwise(offsets), lengths, strict=True))
    counts = torch.tensor([end - begin for (begin, end), _ in spans])
    each = lambda values: torch.tensor(values).repeat_interleave(counts)  # noqa: E731
    # position of a query: its row, minus the row of its sequence's first token if all of its tokens were rows
    at = torch.arange(T) - each([end - length for (_, end), length in spans])
    ends = at + 1 if causal else each(list(lengths)) if window is None else torch.minimum(at + window, each(lengths))
    begins = torch.zeros_like(ends) if window is None else (at + 1 - window).clamp(min=0)
    if tables is None:
        row, slot = torch.zeros_like(at), each([begin for (begin, _), _ in spans])
        tables = torch.zeros(1, 1, dtype=torch.int32)
    else:
        row, slot, tables = each(list(range(len(spans)))), torch.zeros_like(at), tables.contiguous()
    out, lse = torch.empty(T, H, E, dtype=q.dtype), torch.empty(T, H)
    call = _Queries(
        T, H, G, D, E, block_size, tables.shape[1], torch.get_num_threads(), k.stride(0), k.stride(1), v.stride(0),
        v.stride(1), scale, *(x.data_ptr() for x in (q, k, v, begins, ends, row, slot, tables, out, lse)),
    )  # fmt: skip
    if T:
        getattr(native.library(SOURCE), f"bagu_attention_{NAMES[q.dtype]}")(ctypes.byref(call))
    return out, lse
