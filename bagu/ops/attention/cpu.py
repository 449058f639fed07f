"""Attention on a CPU: PyTorch's blocked kernel (flash.py), over segments of one length at a time.

Segments that are all of one length are one call of it, in the sight of the compiler. Others are a call for each run of
equal lengths, read from `cu_seqlens` on the host: a graph cannot hold that, so it is a custom op with its own backward.
A run of segments is a view of the packed tokens, so that nothing is padded.

A window or ALiBi goes to the kernel as a mask, for some queries at a time (pieces.py).

A learned bias has a gradient, which the kernel does not give: those segments are done with all scores in memory.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from bagu.ops.attention import dense, flash, tiles
from bagu.ops.attention.pieces import pieces
from bagu.ops.attention.shape import Shape
from bagu.ops.eager import once_differentiable, without_autocast
from bagu.ops.signature import accumulator
from bagu.ops.values import check_offsets

__all__ = ["Tiled", "equal", "ragged"]

Pair = tuple[torch.Tensor, torch.Tensor]


def _like(q: torch.Tensor) -> torch.Tensor:
    """A tensor with q's device and the dtype of scores."""
    return q.new_empty(0, dtype=accumulator(q.dtype))


def _forward(shape: Shape, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    """out[B, L, H, E] and lse[B, L, H] of segments that are all L long."""
    if shape.bias is not None:
        return dense.forward(shape.additive(q.shape[1], _like(q)), scale, q, k, v)
    if shape.plain:
        return flash.forward(scale, q, k, v, None, causal=shape.causal)
    found = [
        flash.forward(scale, q[:, p.queries], k[:, p.keys], v[:, p.keys], p.added, causal=False)
        for p in pieces(shape, 0, q.shape[1], _like(q))
    ]
    return found[0] if len(found) == 1 else (torch.cat([o for o, _ in found], 1), torch.cat([n for _, n in found], 1))


def _backward(
    shape: Shape, scale: float, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """dq, dk, dv, and dbias where there is a bias, of segments that are all L long."""
    L, dtype, acc = q.shape[1], q.dtype, accumulator(q.dtype)
    if shape.bias is not None:
        dq, dk, dv, dscores = dense.backward(shape.additive(L, _like(q)), scale, dout, q, k, v)
        return dq, dk, dv, shape.bias_gradient(dscores)
    dout, q, k, v, out = (x.to(acc) if flash.widens(L) else x for x in (dout, q, k, v, out))
    if shape.plain:
        grads = flash.backward(scale, dout, q, k, v, out, lse, None, causal=shape.causal)
        dq, dk, dv = (g.to(dtype) for g in grads)
        return dq, dk, dv, None
    parts = []
    dk, dv = (torch.zeros_like(x, dtype=acc) for x in (k, v))  # a key is seen by several pieces
    for p in pieces(shape, 0, L, _like(q)):
        of_queries, of_keys = (x[:, p.queries] for x in (dout, q, out, lse)), (x[:, p.keys] for x in (k, v))
        (d, queries, o, n), (keys, values) = of_queries, of_keys
        dq, more_k, more_v = flash.backward(scale, d, queries, keys, values, o, n, p.added, causal=False)
        parts.append(dq.to(dtype))
        dk[:, p.keys] += more_k
        dv[:, p.keys] += more_v
    return torch.cat(parts, 1), dk.to(dtype), dv.to(dtype), None


class _Equal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, causal: bool,
        window: int | None, scale: float,
    ) -> Pair:  # fmt: skip
        out, lse = _forward(Shape(causal=causal, window=window, slopes=slopes), scale, q, k, v)
        ctx.save_for_backward(q, k, v, slopes, out, lse)
        ctx.rest = causal, window, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable("attention")
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, slopes, out, lse = ctx.saved_tensors
        causal, window, scale = ctx.rest
        shape = Shape(causal=causal, window=window, slopes=slopes)
        return *_backward(shape, scale, douts[0], q, k, v, out, lse)[:3], None, None, None, None


def equal(shape: Shape, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    """out[B, L, H, E] and lse[B, L, H] of B segments of length L; differentiable, and in the compiler's sight."""
    if shape.bias is not None:
        return _forward(shape, scale, q, k, v)  # autograd sees through it
    return _Equal.apply(q, k, v, shape.slopes, shape.causal, shape.window, scale)


def runs(cu_seqlens: torch.Tensor, T: int, max_len: int) -> list[tuple[int, int, int]]:
    """(begin, segments, length) of each run of neighbours of one length, empty segments left out.

    The offsets are at hand here, so wrong ones are refused; other devices trust the host that built the batch.
    """
    offsets: list[int] = cu_seqlens.tolist()
    check_offsets("attention", offsets, T, max_len)
    lengths = [b - a for a, b in pairwise(offsets)]
    found: list[tuple[int, int, int]] = []
    for at, length in zip(offsets, lengths, strict=False):
        if found and length == found[-1][2]:
            found[-1] = (found[-1][0], found[-1][1] + 1, length)
        elif length:
            found.append((at, 1, length))
    return found


def _part(x: torch.Tensor, begin: int, count: int, length: int) -> torch.Tensor:
    """A run of segments of the packed x[T, …] as [count, length, …]."""
    return x[begin : begin + count * length].unflatten(0, (count, length))


@torch.library.custom_op("bagu::attention_ragged", mutates_args=())
def ragged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, slopes: torch.Tensor | None,
    bias: torch.Tensor | None, max_len: int, causal: bool, window: int | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out[T, H, E] and lse[T, H] of segments of any lengths."""
    out, lse = _ragged_like(q, k, v, cu_seqlens, slopes, bias, max_len, causal, window, scale)
    shape = Shape(causal=causal, window=window, slopes=slopes, bias=bias)
    for run in runs(cu_seqlens, q.shape[0], max_len):
        found = _forward(shape, scale, *(_part(x, *run) for x in (q, k, v)))
        for whole, part in zip((out, lse), found, strict=True):
            _part(whole, *run).copy_(part)
    return out, lse


@ragged.register_fake
def _ragged_like(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, slopes: torch.Tensor | None,
    bias: torch.Tensor | None, max_len: int, causal: bool, window: int | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    T, H, _ = q.shape
    return q.new_empty(T, H, v.shape[-1]), q.new_empty(T, H, dtype=accumulator(q.dtype))


@torch.library.custom_op("bagu::attention_ragged_backward", mutates_args=())
@without_autocast
def _ragged_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor,
    slopes: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, max_len: int,
    causal: bool, window: int | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk, dv, and dbias, which is empty where there is no bias."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    shape = Shape(causal=causal, window=window, slopes=slopes, bias=bias)
    dbias = q.new_zeros(() if bias is None else bias.shape, dtype=accumulator(q.dtype))
    for run in runs(cu_seqlens, q.shape[0], max_len):
        *found, more = _backward(shape, scale, *(_part(x, *run) for x in (dout, q, k, v, out, lse)))
        for whole, part in zip((dq, dk, dv), found, strict=True):
            _part(whole, *run).copy_(part)
        if more is not None:
            dbias += more
    return dq, dk, dv, q.new_empty(0) if bias is None else dbias.to(bias.dtype)


@_ragged_backward.register_fake
def _ragged_backward_like(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor,
    slopes: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, max_len: int,
    causal: bool, window: int | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, cu_seqlens, slopes, bias, *rest = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens, slopes, bias, *output)
    ctx.rest = rest
    ctx.mark_non_differentiable(output[1])


def _link(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: a recomputed block makes them again at each look, and refuses the second
    dq, dk, dv, dbias = _ragged_backward(dout, *saved, *ctx.rest)
    return dq, dk, dv, None, None, None if saved[5] is None else dbias, None, None, None, None


ragged.register_autograd(_link, setup_context=_keep)


class Tiled(torch.autograd.Function):
    """The forward of invariant mode, with the backward of ragged segments."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Pair:
        q, k, v, cu_seqlens, slopes, bias, max_len, causal, window, scale = args
        runs(cu_seqlens, q.shape[0], max_len)  # refuses wrong offsets
        shape, offsets = Shape(causal=causal, window=window, slopes=slopes, bias=bias), cu_seqlens.tolist()
        begins = cu_seqlens.long()
        rows_of = lambda sequence, place: begins[sequence].unsqueeze(1) + place  # noqa: E731
        lengths = [b - a for a, b in pairwise(offsets)]
        output = tiles.attend(shape, scale, q, k, v, rows_of, offsets, lengths)
        _keep(ctx, args, output)
        return output

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _link(ctx, *douts)
