"""Attention with PyTorch's own kernels, chosen by device, and with all scores in memory for all other calls.

CPU                               cpu.py: one call for segments of one length, else one per run of equal lengths
CUDA, 16 bits, at most a window   cuda.py: cuDNN or FlashAttention-2
other calls (DTensor, torch.func) dense.py, ordinary PyTorch; ragged segments need H * T^2 numbers
"""

from __future__ import annotations

from enum import Enum, auto

import torch

from bagu.ops.attention import cpu, cuda, dense
from bagu.ops.attention.shape import Shape, segment_of, uniform
from bagu.ops.attention.spec import Args
from bagu.ops.call import eager
from bagu.ops.contract.signature import accumulator
from bagu.ops.contract.values import check_offsets


class Path(Enum):
    """The implementation of a call: the device, and whether all segments have one length."""

    CPU_EQUAL = auto()
    CPU_RAGGED = auto()
    CUDA_EQUAL = auto()
    CUDA_PACKED = auto()
    DENSE_EQUAL = auto()
    DENSE_RAGGED = auto()


def path(q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int, shape: Shape) -> Path:
    # DTensor, torch.func and forward-mode AD need ordinary PyTorch
    plain = type(q) in (torch.Tensor, torch.nn.Parameter) and not eager.transformed()
    same = uniform(q.shape[0], cu_seqlens, max_len)
    if plain and q.device.type == "cpu":
        return Path.CPU_EQUAL if same else Path.CPU_RAGGED
    if plain and q.device.type == "cuda" and q.shape[0] > 0 and cuda.fits(q, v, shape):
        return Path.CUDA_EQUAL if same and cuda.prefers_equal(q, v, shape, max_len) else Path.CUDA_PACKED
    return Path.DENSE_EQUAL if same else Path.DENSE_RAGGED


def _check_equal(cu_seqlens: torch.Tensor, max_len: int) -> None:
    """Raise unless every segment has length max_len. S * max_len == T is not sufficient: one segment may be longer and
    another shorter. On a CPU the offsets can be read. A compiled graph asserts it."""
    if torch.compiler.is_compiling():
        torch._assert_async(
            (cu_seqlens.diff() == max_len).all(), "attention: cu_seqlens has a segment longer than max_len"
        )
    elif not eager.traced(cu_seqlens):
        check_offsets("attention", cu_seqlens.tolist(), (cu_seqlens.shape[0] - 1) * max_len, max_len)


def _split(x: torch.Tensor, length: int) -> torch.Tensor:
    """The packed x[T, …] as [T / length, length, …]."""
    return x.unsqueeze(0) if x.shape[0] == length else x.unflatten(0, (-1, length))


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    q, cu_seqlens, shape, scale = a.q, a.cu_seqlens, cpu.shape_of(a), cpu.scale_of(a)
    way = path(q, a.v, cu_seqlens, a.max_len, shape)
    if way is Path.CPU_RAGGED:
        return cpu.ragged(a)
    if way is Path.CUDA_PACKED:
        return cuda.packed(shape, scale, q, a.k, a.v, cu_seqlens, a.max_len)
    length = q.shape[0] if way is Path.DENSE_RAGGED else a.max_len
    parts = [_split(x, length) for x in (q, a.k, a.v)]
    if way is Path.CPU_EQUAL:
        _check_equal(cu_seqlens, a.max_len)
        out, lse = cpu.equal(shape, scale, *parts)
    elif way is Path.CUDA_EQUAL:
        out, lse = cuda.equal(shape, scale, *parts)
    else:
        added = _added(q, cu_seqlens, a.max_len, shape)
        out, lse = dense.forward(added, scale, *parts, sinks=a.sinks, softcap=a.softcap)
    return out.flatten(0, 1), lse.flatten(0, 1)


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    return cpu.Tiled.apply(*a)


def _added(q: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int, shape: Shape) -> torch.Tensor | None:
    """The term to add to all scores: for one segment if all have one length, else for the whole batch."""
    like, T = q.new_empty(0, dtype=accumulator(q.dtype)), q.shape[0]
    if uniform(T, cu_seqlens, max_len):
        return shape.additive(max_len, like)
    return shape.additive(T, like, segment_of(cu_seqlens, T))


def backward(
    a: Args, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The backward with all scores in memory, for the forward of another backend; each path above has its own."""
    q, shape, scale = a.q, cpu.shape_of(a), cpu.scale_of(a)
    length = a.max_len if uniform(q.shape[0], a.cu_seqlens, a.max_len) else q.shape[0]
    parts = [_split(x, length) for x in (dout, q, a.k, a.v)]
    added = _added(q, a.cu_seqlens, a.max_len, shape)
    grads = dense.backward(added, scale, *parts, sinks=a.sinks, softcap=a.softcap)
    dbias = None if a.bias is None else shape.bias_gradient(grads.scores).to(a.bias.dtype)
    dsinks = None if a.sinks is None or grads.sinks is None else grads.sinks.to(a.sinks.dtype)
    return grads.q.flatten(0, 1), grads.k.flatten(0, 1), grads.v.flatten(0, 1), dbias, dsinks
