"""Batch-invariant ops on a CPU by invariant_rows.cpp: one row costs one row, not a block of 16.

The choice between this and PyTorch must not depend on the batch, so it depends only on the dtype and the terms of a
score. The C++ computes fp32, and bf16 if the CPU has no bf16 instructions: AMX multiplies 16 rows in one.

A `Program` is a list of calls over fixed memory that runs as one call of C++: a decode step of a small model has about
100 ops, and Python takes longer for them than the C++ (serve/cpu/invariant_decode.py).
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch

from bagu.machine import native
from bagu.machine.device import has_bf16_instructions

SOURCE = "ops/invariant/invariant_rows.cpp"
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
CONTIGUOUS = 1 << 40  # positions per block of keys that are not in blocks
POINTER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Kind(IntEnum):
    """The functions of a program, in the order of invariant_program.h, which has the meaning of their arguments."""

    PRODUCT = 0
    ATTENTION = 1
    NORM = 2
    ROTATE = 3
    GATE = 4
    COPY = 5
    NARROW = 6


def _arguments(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    named = [(name, kind) for names, kind in fields for name in names.split()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": named})


ARGUMENTS = {
    Kind.PRODUCT: _arguments(("M N K x_stride w_stride threads", LONG), ("x w bias y", POINTER)),
    Kind.ATTENTION: _arguments(
        ("T H G D E B columns threads k_place k_head v_place v_head", LONG),
        ("scale", FLOAT),
        ("q k v begins ends row slot tables out lse", POINTER),
    ),
    Kind.NORM: _arguments(("M N threads", LONG), ("eps", FLOAT), ("x residual w y s r", POINTER)),
    Kind.ROTATE: _arguments(("M H D threads", LONG), ("x cos sin at y", POINTER)),
    Kind.GATE: _arguments(("M N threads", LONG), ("x y act", POINTER)),
    Kind.COPY: _arguments(("M N", LONG), ("source from_rows to_rows to", POINTER)),
    Kind.NARROW: _arguments(("count", LONG), ("x y", POINTER)),
}


class _Call(ctypes.Structure):
    _fields_ = (("kind", LONG), ("args", POINTER))


class Program:
    """Calls of the C++ over fixed memory, in order."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._run = getattr(native.library(SOURCE), f"bagu_run_{NAMES[dtype]}")
        self._calls: list[_Call] = []
        self._kept: list[Any] = []  # the arguments and tensors that the calls point to
        self._list: Any = None

    def add(self, kind: Kind, **args: Any) -> None:
        """Append a call. Tensors are passed by address, and must not be freed or moved."""
        given = {n: v.data_ptr() if isinstance(v, torch.Tensor) else v for n, v in args.items()}
        arguments = ARGUMENTS[kind](**given)
        self._kept += [arguments, args]
        self._calls.append(_Call(kind, ctypes.addressof(arguments)))
        self._list = None

    def run(self) -> None:
        if self._list is None:
            self._list = (_Call * len(self._calls))(*self._calls)
        self._run(self._list, LONG(len(self._calls)))


def _run(kind: Kind, dtype: torch.dtype, **args: Any) -> None:
    """One call. The caller holds the tensors."""
    given = {n: v.data_ptr() if isinstance(v, torch.Tensor) else v for n, v in args.items()}
    arguments = ARGUMENTS[kind](**given)
    call = _Call(kind, ctypes.addressof(arguments))
    getattr(native.library(SOURCE), f"bagu_run_{NAMES[dtype]}")(ctypes.byref(call), LONG(1))


def available(dtype: torch.dtype) -> bool:
    """Whether the C++ computes this dtype on this machine."""
    narrow = dtype == torch.bfloat16 and not has_bf16_instructions()
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
    _run(
        Kind.PRODUCT, x.dtype, M=M, N=N, K=K, x_stride=x.stride(0), w_stride=w.stride(0),
        threads=torch.get_num_threads(), x=x, w=w, bias=bias, y=y,
    )  # fmt: skip
    return y


def norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x[*M, N]: y in x's dtype, and r[*M] in fp32."""
    x, w, N = x.detach().resolve_neg().contiguous(), w.detach().float().contiguous(), x.shape[-1]
    y, r = torch.empty_like(x), torch.empty(x.shape[:-1])
    _run(
        Kind.NORM, x.dtype, M=r.numel(), N=N, threads=torch.get_num_threads(), eps=eps, x=x, residual=None, w=w, y=y,
        s=None, r=r,
    )  # fmt: skip
    return y, r


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """RoPE of x[*M, H, D] by the rows at[*M] of cos and sin [·, D / 2], features i and i + D / 2 a pair."""
    x, (H, D) = x.detach().resolve_neg().contiguous(), x.shape[-2:]
    cos, sin = (t.detach().float().resolve_neg().contiguous() for t in (cos, sin))
    y, at = torch.empty_like(x), at.long().contiguous()
    _run(
        Kind.ROTATE, x.dtype, M=at.numel(), H=H, D=D, threads=torch.get_num_threads(), x=x, cos=cos, sin=sin, at=at, y=y
    )
    return y


def gate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(x[…, :N]) * x[…, N:] in x's dtype, and silu(x[…, :N]) in fp32."""
    x, N = x.detach().resolve_neg().contiguous(), x.shape[-1] // 2
    y, act = x.new_empty(*x.shape[:-1], N), torch.empty(*x.shape[:-1], N)
    _run(Kind.GATE, x.dtype, M=x.shape[:-1].numel(), N=N, threads=torch.get_num_threads(), x=x, y=y, act=act)
    return y, act


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
    if T:
        _run(
            Kind.ATTENTION, q.dtype, T=T, H=H, G=G, D=D, E=E, B=block_size, columns=tables.shape[1],
            threads=torch.get_num_threads(), k_place=k.stride(0), k_head=k.stride(1), v_place=v.stride(0),
            v_head=v.stride(1), scale=scale, q=q, k=k, v=v, begins=begins, ends=ends, row=row, slot=slot, tables=tables,
            out=out, lse=lse,
        )  # fmt: skip
    return out, lse
