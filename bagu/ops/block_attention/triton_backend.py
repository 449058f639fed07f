"""Block-sparse attention with Triton kernels (block_kernels.py) over packed segments.

A query's far blocks are those between the first one and those near it. `Routes` sorts the pairs of a query and a far
block by the block, so that a program has the keys of one block and gathers its queries. Parts of out and dq are stored
for each pair, T * H * top rows, and joined by the kernel of the query's block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from bagu.ops.attention.shape import side_by_side
from bagu.ops.block_attention import block_kernels as kernels
from bagu.ops.block_attention.spec import Args
from bagu.ops.contract.signature import accumulator
from bagu.ops.kernels.launch import fp32_pair, next_power_of_2, triton_acc

LOG2E = 1.4426950408889634
# Queries of a tile, warps and stages of the kernels: the fastest on an H200 at 16k tokens (journal 024).
FAR_FORWARD = {"M": 128, "num_warps": 4, "num_stages": 2}
BACKWARD = {"M": 128, "num_warps": 8, "num_stages": 1}
DQ = {"num_warps": 4, "num_stages": 2}
ROWS = 64  # of row_products
RUN = 16  # blocks of queries of a part of `first_backward`


class Routes(NamedTuple):
    """B = blocks of all segments, with room for a last one that is not full."""

    order: torch.Tensor  # [T * G * top] i32: pairs (token, key head, choice), sorted by key head and block
    ends: torch.Tensor  # [G * B + 1] i32: where the pairs of a block begin in `order`
    starts: torch.Tensor  # [B] i32: the first token of a block
    tiles: torch.Tensor  # [B, 4] i32: the begin and length of the segment of a block of queries, its number there, and
    # the place of the segment among the parts of `first_backward`
    top: int

    @classmethod
    def of(cls, a: Args) -> Routes:
        T, G, K = a.blocks.shape
        cu, device = a.cu_seqlens.long(), a.blocks.device
        S, B = len(cu) - 1, T // a.size + len(cu) - 1
        base = cu[:-1] // a.size + torch.arange(S, device=device)  # the first block of a segment
        n, t = torch.arange(B, device=device), torch.arange(T, device=device)
        segment = (torch.searchsorted(base, n, right=True) - 1).clamp(min=0)
        number = n - base[segment]
        starts = cu[segment] + number * a.size
        inside = starts < cu[segment + 1]
        lengths = torch.where(inside, cu[segment + 1] - cu[segment], 0)
        parts = base[segment] // RUN + segment
        tiles = torch.stack((cu[segment], lengths, number, parts), 1).to(torch.int32)
        top = max(K - 2 - a.near, 1)
        owner = (torch.searchsorted(cu, t, right=True) - 1).clamp(max=S - 1)
        place = t - cu[owner]
        own = (place // a.size).view(-1, 1, 1)
        choice = torch.nn.functional.pad(a.blocks[:, :, 1 : 1 + top].long(), (0, max(1 + top - K, 0)), value=-1)
        far = (choice > 0) & (choice < own - a.near) & (place.view(-1, 1, 1) >= a.dense_below)
        route = torch.arange(G, device=device).view(1, -1, 1) * B + base[owner].view(-1, 1, 1) + choice
        route = torch.where(far, route, G * B).flatten().to(torch.int32)
        ordered = route.sort(stable=True)
        ends = torch.searchsorted(ordered.values, torch.arange(G * B + 1, device=device, dtype=torch.int32))
        return cls(ordered.indices.to(torch.int32), ends.to(torch.int32), starts.to(torch.int32), tiles, top)


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in x.stride()[:2])


def _constants(a: Args) -> dict[str, Any]:
    D, E = a.q.shape[-1], a.v.shape[-1]
    widths = {"DW": max(next_power_of_2(D), 16), "EW": max(next_power_of_2(E), 16)}
    return {"D": D, "E": E, **widths, "N": max(next_power_of_2(a.size), 16), "ACC": triton_acc(a.q.dtype)}


def _scale(a: Args) -> tuple[float, float]:
    return fp32_pair((a.q.shape[-1] ** -0.5 if a.scale is None else a.scale) * LOG2E)


def _parts(a: Args, routes: Routes) -> tuple[torch.Tensor, torch.Tensor]:
    """The out and the lse (base 2) of every query over each of its far blocks; -inf where there is none."""
    (T, H, _), (G, E) = a.q.shape, a.v.shape[1:]
    part = a.q.new_empty(T, H, routes.top, E)
    part_lse = a.q.new_full((T, H, routes.top), -torch.inf, dtype=accumulator(a.q.dtype))
    B = len(routes.starts)
    kernels.far_forward[(G * B, H // G)](
        a.q, a.k, a.v, routes.order, routes.ends, routes.starts, part, part_lse, B, G, H, routes.top, a.size,
        *_scale(a), *_strides(a.q, a.k, a.v), **_constants(a), **FAR_FORWARD,
    )  # fmt: skip
    return part, part_lse


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    a = a._replace(q=side_by_side(a.q), k=side_by_side(a.k), v=side_by_side(a.v))
    (T, H, _), (G, E) = a.q.shape, a.v.shape[1:]
    out, lse = a.q.new_empty(T, H, E), a.q.new_empty(T, H, dtype=accumulator(a.q.dtype))
    if T == 0:
        return out, lse
    routes = Routes.of(a)
    parts = _parts(a, routes)
    kernels.forward[(len(routes.starts), H)](
        a.q, a.k, a.v, routes.tiles, *parts, out, lse, G, H, routes.top, a.size, a.near, a.dense_below,
        *_scale(a), *_strides(a.q, a.k, a.v), **_constants(a),
    )  # fmt: skip
    return out, lse


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """A query's sums have the same order in every batch: its blocks in the order of their numbers."""
    return forward(a)


def backward(
    a: Args, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a = a._replace(q=side_by_side(a.q), k=side_by_side(a.k), v=side_by_side(a.v))
    (T, H, D), G, dtype = a.q.shape, a.k.shape[1], accumulator(a.q.dtype)
    dq, dk, dv = (x.new_empty(x.shape) for x in (a.q, a.k, a.v))
    if T == 0:
        return dq, dk, dv
    dout, lse, routes = side_by_side(dout), lse.contiguous(), Routes.of(a)
    B, strides, fixed = len(routes.starts), _strides(a.q, a.k, a.v, dout), _constants(a)
    delta = torch.empty_like(lse)
    kernels.row_products[(triton.cdiv(T * H, ROWS),)](
        dout, out.contiguous(), delta, T * H, H, *_strides(dout), fixed["E"], fixed["EW"], ROWS, fixed["ACC"]
    )
    read = (a.q, a.k, a.v, dout, lse, delta)
    far_dk, far_dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (a.k, a.v))
    dq_part = a.q.new_empty(T, H, routes.top, D)
    kernels.far_backward[(G * B,)](
        *read, routes.order, routes.ends, routes.starts, dq_part, far_dk, far_dv, B, G, H, routes.top, a.size,
        *_scale(a), *strides, **fixed, **BACKWARD,
    )  # fmt: skip
    shared = (a.size, a.near, a.dense_below, *_scale(a), *strides)
    chosen = (a.blocks.contiguous(), dq_part, dq, G, H, a.blocks.shape[-1], routes.top)
    kernels.dq[(B, H)](*read, routes.tiles, *chosen, *shared, **fixed, **DQ)
    parts = B // RUN + len(a.cu_seqlens) - 1
    first = [torch.empty(parts, G, fixed["N"], x.shape[-1], dtype=dtype, device=x.device) for x in (a.k, a.v)]
    fixed["RUN"] = RUN
    kernels.first_backward[(B, G)](*read, routes.tiles, *first, G, H, *shared, **fixed, **BACKWARD)
    kernels.dkdv[(B, G)](*read, routes.tiles, far_dk, far_dv, *first, dk, dv, G, H, *shared, **fixed, **BACKWARD)
    return dq, dk, dv
