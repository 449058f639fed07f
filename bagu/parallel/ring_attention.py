"""Causal ring attention over packed documents, with the zig-zag division of context.py.

Rank r has an early chunk, number r, and a late one, number 2c - 1 - r, of each document, both of L tokens. Keys and
values of rank s arrive after (r - s) mod c steps. Chunks are equal, so each step is an ordinary attention call:

    s = r    causal attention over the 2L tokens: early chunks are before late ones
    s < r    all queries attend to all keys of the early chunk of s, and to none of the late one
    s > r    late queries attend to all keys of s, early ones to none

Each step costs 2 L^2 pairs on every rank. Partial results are merged with out = sum_s exp(lse_s - lse) out_s. The
backward uses the merged out and lse in each block, as FlashAttention does. Gradients of keys and values travel behind
them, from the first rank that adds to them until they arrive at home.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bagu import ops
from bagu.ops.attention import cpu
from bagu.ops.attention.spec import Args
from bagu.ops.contract.signature import accumulator
from bagu.parallel.collectives import wait_for
from bagu.parallel.mesh import Mesh

Pair = tuple[torch.Tensor, torch.Tensor]


class _Chunks(NamedTuple):
    """Where the chunks of a rank's tokens are."""

    whole: torch.Tensor  # [S + 1] int32: offsets of the documents, each an early and a late chunk
    halves: torch.Tensor  # [2S + 1] int32: offsets of the chunks
    is_late: torch.Tensor  # [T] bool
    early: torch.Tensor  # [T] int64: the row of each token's counterpart in the early chunk, or itself
    late: torch.Tensor  # [T] int64: likewise in the late chunk
    max_len: int  # of a chunk

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, max_len: int, T: int) -> _Chunks:
        half = cu_seqlens.diff() // 2
        halves = torch.cat((torch.stack((cu_seqlens[:-1], cu_seqlens[:-1] + half), 1).flatten(), cu_seqlens[-1:]))
        chunk = torch.repeat_interleave(halves.diff(), output_size=T)  # the number of each token's chunk
        is_late, length = chunk % 2 == 1, half.repeat_interleave(2)[chunk]
        row = torch.arange(T, device=cu_seqlens.device)
        early, late = torch.where(is_late, row - length, row), torch.where(is_late, row, row + length)
        return cls(cu_seqlens, halves.to(torch.int32), is_late, early, late, max_len // 2)


class _Shift:
    """Tensors on their way to the next rank, while those of the previous rank arrive: one message in each direction."""

    def __init__(self, tensors: Pair, mesh: Mesh) -> None:
        group, ranks, rank = mesh.group("cp"), mesh.size("cp"), mesh.coordinate("cp")
        assert group is not None
        self.mesh, self.shapes = mesh, [x.shape for x in tensors]
        self.sent = torch.cat([x.reshape(-1) for x in tensors])
        self.received = torch.empty_like(self.sent)
        mesh.traffic.add("send", "cp", self.sent.nbytes, ranks)
        after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        send, receive = (
            dist.P2POp(dist.isend, self.sent, after, group),
            dist.P2POp(dist.irecv, self.received, before, group),
        )
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Pair:
        wait_for(self.mesh, *self.works)
        first, second = self.received.split([shape.numel() for shape in self.shapes])
        return first.view(self.shapes[0]), second.view(self.shapes[1])


def _merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> Pair:
    total = torch.logaddexp(lse, more_lse)
    return out * (lse - total).exp().unsqueeze(-1) + more * (more_lse - total).exp().unsqueeze(-1), total


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: _Chunks, scale: float, mesh: Mesh) -> Pair:
    rank, ranks, acc = mesh.coordinate("cp"), mesh.size("cp"), accumulator(q.dtype)
    shift = _Shift((k, v), mesh)
    out, lse = ops.attention(q, k, v, chunks.whole, 2 * chunks.max_len, scale=scale)
    out = out.to(acc)
    block = functools.partial(
        ops.attention, cu_seqlens=chunks.halves, max_len=chunks.max_len, causal=False, scale=scale
    )
    for step in range(1, ranks):
        ks, vs = shift.wait()
        if step < ranks - 1:
            shift = _Shift((ks, vs), mesh)
        if (rank - step) % ranks < rank:
            keys, values = ks[chunks.early], vs[chunks.early]
            part, part_lse = block(q, keys, values)
            out, lse = _merge(out, lse, part.to(acc), part_lse)
        else:
            part, part_lse = block(q[chunks.late], ks, vs)
            part, part_lse = _merge(
                part[chunks.early].to(acc), part_lse[chunks.early], part[chunks.late], part_lse[chunks.late]
            )
            merged, merged_lse = _merge(out, lse, part, part_lse)
            out = torch.where(chunks.is_late[:, None, None], merged, out)
            lse = torch.where(chunks.is_late[:, None], merged_lse, lse)
    return out.to(q.dtype), lse


def _block_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    offsets: torch.Tensor, max_len: int, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv of one block. `out` and `lse` are those of all keys: P = exp(s - lse) sums to less than 1 here."""
    args = Args(q, k, v, offsets, None, None, None, max_len, causal, None, scale, None)
    if q.is_cuda:
        from bagu.ops.attention import triton_backend  # needs Triton

        dq, dk, dv, *_ = triton_backend.backward(args, dout, out, lse)
        assert dq is not None and dk is not None and dv is not None
    else:
        dq, dk, dv, *_ = cpu.ragged_backward(args, dout, out, lse)
    return dq, dk, dv


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    chunks: _Chunks,
    scale: float,
    mesh: Mesh,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rank, ranks, acc = mesh.coordinate("cp"), mesh.size("cp"), accumulator(q.dtype)
    shift, travelling = _Shift((k, v), mesh), None
    dq, dk, dv = (
        x.to(acc)
        for x in _block_backward(dout, q, k, v, out, lse, chunks.whole, 2 * chunks.max_len, causal=True, scale=scale)
    )
    late, late_rows = chunks.late, chunks.is_late[:, None, None]
    block = functools.partial(_block_backward, offsets=chunks.halves, max_len=chunks.max_len, causal=False, scale=scale)
    for step in range(1, ranks):
        ks, vs = shift.wait()
        if step < ranks - 1:
            shift = _Shift((ks, vs), mesh)
        if (rank - step) % ranks < rank:
            early = chunks.early
            more, *both = block(dout, q, ks[early], vs[early], out, lse)
            dq += more.to(acc)
            dks, dvs = (_both_chunks(x, chunks).masked_fill(late_rows, 0.0) for x in both)
        else:
            more, dks, dvs = block(dout[late], q[late], ks, vs, out[late], lse[late])
            dq += _both_chunks(more, chunks).masked_fill(~late_rows, 0.0)
        if travelling is not None:
            dks, dvs = (a + b for a, b in zip(travelling.wait(), (dks, dvs), strict=True))
        travelling = _Shift((dks.to(acc), dvs.to(acc)), mesh)
    if travelling is not None:
        home = travelling.wait()
        dk, dv = dk + home[0], dv + home[1]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _both_chunks(x: torch.Tensor, chunks: _Chunks) -> torch.Tensor:
    """The sum of each token's rows in the early and in the late chunk, in the accumulator's dtype."""
    x = x.to(accumulator(x.dtype))
    return x[chunks.early] + x[chunks.late]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_len: int,
        scale: float,
        mesh: Mesh,
    ) -> torch.Tensor:
        chunks = _Chunks.of(cu_seqlens, max_len, len(q))
        out, lse = _forward(q, k, v, chunks, scale, mesh)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.rest = max_len, scale, mesh
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        max_len, scale, mesh = ctx.rest
        chunks = _Chunks.of(cu_seqlens, max_len, len(q))
        return *_backward(grads[0], q, k, v, out, lse, chunks, scale, mesh), None, None, None, None


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int, scale: float, mesh: Mesh
) -> torch.Tensor:
    """out[T, H, E] of causal attention of this rank's q[T, H, D] to the keys and values of all ranks of cp.

    `cu_seqlens` are the offsets of this rank's part of each document: an early chunk and a late one of equal length.
    """
    out: torch.Tensor = _Ring.apply(q, k, v, cu_seqlens, max_len, scale, mesh)
    return out
