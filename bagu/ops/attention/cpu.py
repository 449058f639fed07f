"""Attention on a CPU: PyTorch's blocked kernel (flash.py), over segments of one length at a time.

If all segments have one length, the kernel is called once, and the compiler can trace the call. Otherwise it is called
once per run of equal lengths, which are read from `cu_seqlens` on the host. A compiled graph cannot contain that, so
traced calls run a custom op with its own backward. Eager calls run the same two functions as an autograd node: the
first call of a custom op imports the compiler (1.6 s on a Neoverse-N1). A run of segments is a view of the packed
tokens, so nothing is padded.

A window or ALiBi is passed to the kernel as a mask, for some queries at a time (pieces.py).

The kernel returns no gradient for a learned bias, so segments with a bias are computed with all scores in memory. So
are pieces of segments with a softcap. A sink is added to the kernel's result afterwards.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from bagu.ops.attention import dense, flash, tiles
from bagu.ops.attention.pieces import pieces
from bagu.ops.attention.shape import Shape, add_sinks
from bagu.ops.attention.spec import SPEC, Args
from bagu.ops.call.custom import needs_custom_op
from bagu.ops.call.eager import once_differentiable, without_autocast
from bagu.ops.contract.signature import accumulator
from bagu.ops.contract.values import check_offsets
from bagu.ops.invariant import invariant_rows

Pair = tuple[torch.Tensor, torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


def _like(q: torch.Tensor) -> torch.Tensor:
    """A tensor with q's device and the dtype of scores."""
    return q.new_empty(0, dtype=accumulator(q.dtype))


def _forward(shape: Shape, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    """out[B, L, H, E] and lse[B, L, H] of B segments of length L."""
    sinks, softcap = shape.sinks, shape.softcap
    if shape.bias is not None:
        return dense.forward(shape.additive(q.shape[1], _like(q)), scale, q, k, v, sinks=sinks, softcap=softcap)
    if replace(shape, sinks=None).plain:
        return add_sinks(flash.forward(scale, q, k, v, None, causal=shape.causal), shape.sinks)
    found = []
    for p in pieces(shape, 0, q.shape[1], _like(q)):
        part = q[:, p.queries], k[:, p.keys], v[:, p.keys]
        if shape.softcap is not None:
            found.append(dense.forward(p.added, scale, *part, sinks=sinks, softcap=softcap))
        else:
            found.append(add_sinks(flash.forward(scale, *part, p.added, causal=False), shape.sinks))
    return found[0] if len(found) == 1 else (torch.cat([o for o, _ in found], 1), torch.cat([n for _, n in found], 1))


class _Gradients(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


def _backward(
    shape: Shape,
    scale: float,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> _Gradients:
    """The gradients of segments of length L. The gradients of bias and sinks have the dtype of scores."""
    L, dtype, acc = q.shape[1], q.dtype, accumulator(q.dtype)
    sinks, softcap = shape.sinks, shape.softcap
    if shape.bias is not None:
        grads = dense.backward(shape.additive(L, _like(q)), scale, dout, q, k, v, sinks=sinks, softcap=softcap)
        return _Gradients(grads.q, grads.k, grads.v, shape.bias_gradient(grads.scores), grads.sinks)
    dsinks = None
    if shape.sinks is not None:
        delta = (dout.to(acc) * out.to(acc)).sum(-1)
        dsinks = -((shape.sinks.to(acc) - lse).exp() * delta).sum((0, 1))
    dout, q, k, v, out = (x.to(acc) if flash.widens(L) else x for x in (dout, q, k, v, out))
    if replace(shape, sinks=None).plain:  # out and lse include the sink, and so do the weights computed from lse
        dq, dk, dv = flash.backward(scale, dout, q, k, v, out, lse, None, causal=shape.causal)
        return _Gradients(dq.to(dtype), dk.to(dtype), dv.to(dtype), sinks=dsinks)
    parts = []
    dk, dv = (torch.zeros_like(x, dtype=acc) for x in (k, v))  # several pieces attend to a key
    for p in pieces(shape, 0, L, _like(q)):
        of_queries, of_keys = (x[:, p.queries] for x in (dout, q, out, lse)), (x[:, p.keys] for x in (k, v))
        (d, queries, o, n), (keys, values) = of_queries, of_keys
        if shape.softcap is not None:
            grads = dense.backward(p.added, scale, d, queries, keys, values, sinks=sinks, softcap=softcap)
            dq, more_k, more_v = grads.q, grads.k, grads.v
        else:
            dq, more_k, more_v = flash.backward(scale, d, queries, keys, values, o, n, p.added, causal=False)
        parts.append(dq.to(dtype))
        dk[:, p.keys] += more_k
        dv[:, p.keys] += more_v
    return _Gradients(torch.cat(parts, 1), dk.to(dtype), dv.to(dtype), sinks=dsinks)


class _Equal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Pair:
        slopes, sinks, causal, window, scale, softcap = rest
        shape = Shape(causal=causal, window=window, slopes=slopes, sinks=sinks, softcap=softcap)
        out, lse = _forward(shape, scale, q, k, v)
        ctx.save_for_backward(q, k, v, slopes, sinks, out, lse)
        ctx.rest = causal, window, scale, softcap
        ctx.mark_non_differentiable(lse)
        return out.detach(), lse  # without detach, torch.compile of torch 2.11 gives zero gradients

    @staticmethod
    @once_differentiable("attention")
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, slopes, sinks, out, lse = ctx.saved_tensors
        causal, window, scale, softcap = ctx.rest
        shape = Shape(causal=causal, window=window, slopes=slopes, sinks=sinks, softcap=softcap)
        grads = _backward(shape, scale, douts[0], q, k, v, out, lse)
        dsinks = None if sinks is None or grads.sinks is None else grads.sinks.to(sinks.dtype)
        return grads.q, grads.k, grads.v, None, dsinks, None, None, None, None


def equal(shape: Shape, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    """out[B, L, H, E] and lse[B, L, H] of B segments of length L; differentiable, and the compiler can trace it."""
    if shape.bias is not None:
        return _forward(shape, scale, q, k, v)  # differentiable PyTorch
    return _Equal.apply(q, k, v, shape.slopes, shape.sinks, shape.causal, shape.window, scale, shape.softcap)


def runs(cu_seqlens: torch.Tensor, T: int, max_len: int) -> list[tuple[int, int, int]]:
    """(begin, segments, length) of each run of adjacent segments of one length, without empty segments.

    The offsets are on the host here, so wrong ones raise; other devices trust the code that built the batch.
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


def shape_of(a: Args) -> Shape:
    return Shape(causal=a.causal, window=a.window, slopes=a.slopes, bias=a.bias, sinks=a.sinks, softcap=a.softcap)


def scale_of(a: Args) -> float:
    return a.q.shape[-1] ** -0.5 if a.scale is None else a.scale


def _ragged(*values: Any) -> Pair:
    """out[T, H, E] and lse[T, H] of segments of any lengths."""
    a = Args(*values)
    out, lse = _ragged_like(*values)
    for run in runs(a.cu_seqlens, a.q.shape[0], a.max_len):
        found = _forward(shape_of(a), scale_of(a), *(_part(x, *run) for x in (a.q, a.k, a.v)))
        for whole, part in zip((out, lse), found, strict=True):
            _part(whole, *run).copy_(part)
    return out, lse


def _ragged_like(*values: Any) -> Pair:
    a = Args(*values)
    T, H, _ = a.q.shape
    return a.q.new_empty(T, H, a.v.shape[-1]), a.q.new_empty(T, H, dtype=accumulator(a.q.dtype))


@without_autocast
def _ragged_backward(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *values: Any) -> Tensors:
    """dq, dk, dv, dbias and dsinks; the last two are empty if there is no bias or sink."""
    a = Args(*values)
    dq, dk, dv, dbias, dsinks = _ragged_backward_like(dout, out, lse, *values)
    total_bias, total_sinks = (torch.zeros_like(x, dtype=accumulator(a.q.dtype)) for x in (dbias, dsinks))
    for run in runs(a.cu_seqlens, a.q.shape[0], a.max_len):
        parts = (_part(x, *run) for x in (dout, a.q, a.k, a.v, out, lse))
        found = _backward(shape_of(a), scale_of(a), *parts)
        for whole, part in zip((dq, dk, dv), found[:3], strict=True):
            _part(whole, *run).copy_(part)
        for total, more in zip((total_bias, total_sinks), found[3:], strict=True):
            if more is not None:
                total += more
    return dq, dk, dv, dbias.copy_(total_bias), dsinks.copy_(total_sinks)


def _ragged_backward_like(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *values: Any) -> Tensors:
    a = Args(*values)
    return tuple(
        a.q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (a.q, a.k, a.v, a.bias, a.sinks)
    )


TENSORS = len(SPEC.sig.tensors)  # the first fields of Args


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    ctx.save_for_backward(*output, *inputs[:TENSORS])
    ctx.rest = inputs[TENSORS:]
    ctx.mark_non_differentiable(output[1])


_schema = SPEC.sig.schema(SPEC.sig.inputs, 2)
_op = torch.library.custom_op("bagu::attention_ragged", _ragged, mutates_args=(), schema=_schema)
_op.register_fake(_ragged_like)
_schema = SPEC.sig.schema(SPEC.sig.inputs, 5).replace("(", "(Tensor dout, Tensor out, Tensor lse, ", 1)
_backward_op = torch.library.custom_op(
    "bagu::attention_ragged_backward", _ragged_backward, mutates_args=(), schema=_schema
)
_backward_op.register_fake(_ragged_backward_like)


def ragged_backward(a: Args, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Tensors:
    """dq, dk, dv, dbias and dsinks, as `_ragged_backward` returns them."""
    return (_backward_op if needs_custom_op((dout, *a)) else _ragged_backward)(dout, out, lse, *a)


def _link(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    out, lse, *saved = ctx.saved_tensors  # once: a checkpointed block recomputes them at each access
    a = Args(*saved, *ctx.rest)
    dq, dk, dv, dbias, dsinks = ragged_backward(a, dout, out, lse)
    given = None if a.bias is None else dbias, None if a.sinks is None else dsinks
    return dq, dk, dv, None, None, *given, *(None for _ in ctx.rest)


_op.register_autograd(_link, setup_context=_keep)


class _Ragged(torch.autograd.Function):
    """The custom op, for calls that nothing traces or intercepts."""

    forward = staticmethod(_ragged)
    setup_context = staticmethod(_keep)
    backward = staticmethod(once_differentiable("attention")(_link))


def ragged(a: Args) -> Pair:
    """out[T, H, E] and lse[T, H] of segments of any lengths; differentiable."""
    return _op(*a) if needs_custom_op(a) else _Ragged.apply(*a)


class Tiled(torch.autograd.Function):
    """The forward of invariant mode, with the backward of ragged segments."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Pair:
        a = Args(*args)
        runs(a.cu_seqlens, a.q.shape[0], a.max_len)  # raises for wrong offsets
        shape, scale, packed = shape_of(a), scale_of(a), (a.q, a.k, a.v)
        offsets = a.cu_seqlens.tolist()
        lengths = [end - begin for begin, end in pairwise(offsets)]
        if invariant_rows.available(a.q.dtype) and replace(shape, window=None).plain:
            output = invariant_rows.attend(a.window, scale, *packed, offsets, lengths, causal=a.causal)
        else:
            begins = a.cu_seqlens.long()
            rows_of = lambda sequence, place: begins[sequence].unsqueeze(1) + place  # noqa: E731
            output = tiles.attend(shape, scale, *packed, rows_of, offsets, lengths)
        _keep(ctx, args, output)
        return output

    @staticmethod
    @once_differentiable("attention")
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _link(ctx, *douts)
