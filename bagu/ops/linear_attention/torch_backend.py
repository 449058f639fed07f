"""Linear attention in PyTorch, in chunks of tokens: products within a chunk, and states for the tokens of other chunks.

Forward and backward are one sum in three directions,

    mix(a, b, c)[i] = sum_j (a[i] . b[j]) c[j]        over j of i's segment: at or before i, at or after i, or all

Within a chunk, mix uses the chunk's scores. Other chunks contribute through states b^T c, one per chunk. Only one
segment can cross a chunk's border, so a chunk passes on the state of its last segment (backwards: of its first one),
and it receives the states of the earlier chunks that end in the segment it begins with. That is one product with a 0/1
matrix [chunks, chunks]: it is exact, and no shape depends on the data.

With g = dout / den the gradients are mixes too:
    dq = mix(g, v, k)        dk = mix(v, g, q) in reverse        dv = mix(k, q, g) in reverse
"""

from __future__ import annotations

import torch

from bagu.ops.attention.shape import segment_of
from bagu.ops.contract.signature import accumulator
from bagu.ops.linear_attention.spec import CHUNK, Args


def mix(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, segment: torch.Tensor, *, past: bool, future: bool
) -> torch.Tensor:
    """sum_j (a[i] . b[j]) c[j] over i and the tokens of its segment before it (past), after it (future), or both.

    a[T, H, D], b[T, H, D], c[T, H, E], and the segment of each token [T]; T is a multiple of CHUNK.
    """
    a, b, c = (x.unflatten(0, (-1, CHUNK)).transpose(1, 2) for x in (a, b, c))  # [N, H, CHUNK, features]
    place = segment.unflatten(0, (-1, CHUNK))  # [N, CHUNK]
    same = place.unsqueeze(1) == place.unsqueeze(2)
    scores = (a @ b.mT).masked_fill(~same.unsqueeze(1), 0.0)
    if not (past and future):
        scores = scores.tril() if past else scores.triu()
    total = scores @ c
    first, last = place[:, :1], place[:, -1:]
    if past:
        total = total + _beyond(a, b, c, place, border=first, other=last, before=True)
    if future:
        total = total + _beyond(a, b, c, place, border=last, other=first, before=False)
    return total.transpose(1, 2).flatten(0, 1)


def _beyond(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    place: torch.Tensor,
    *,
    border: torch.Tensor,
    other: torch.Tensor,
    before: bool,
) -> torch.Tensor:
    """The contribution of the chunks before this one, or of those after it.

    `border` is the segment at the side of each chunk that faces them, `other` the segment at their side that faces it.
    """
    handed = (b * (place == other)[:, None, :, None]).mT @ c  # [N, H, D, E]: the state of the segment at that side
    takes = (border == other.T).to(b.dtype)
    takes = takes.tril(-1) if before else takes.triu(1)
    state = (takes @ handed.flatten(1)).unflatten(1, handed.shape[1:])
    return (a * (place == border)[:, None, :, None]) @ state


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x if not rows else torch.cat((x, x.new_zeros(rows, *x.shape[1:])))


def _sides(causal: bool, *, turned: bool = False) -> dict[str, bool]:
    return {"past": not (causal and turned), "future": not causal or turned}


def _heads(x: torch.Tensor, H: int) -> torch.Tensor:
    """x[T, G, F] in the accumulator's dtype, with each group's row repeated for all its heads."""
    x, (T, G, F) = x.to(accumulator(x.dtype)), x.shape
    return x if G == H else x.unsqueeze(2).expand(T, G, H // G, F).reshape(T, H, F)


def _groups(x: torch.Tensor, G: int) -> torch.Tensor:
    return x if x.shape[1] == G else x.unflatten(1, (G, -1)).sum(2)


def _segments(cu_seqlens: torch.Tensor, T: int) -> tuple[torch.Tensor, int]:
    """Segments of the tokens and of the last chunk's padding rows (one past all others); the number of padding rows."""
    rows = -T % CHUNK
    return segment_of(cu_seqlens, T + rows), rows


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    q = a.q
    T, H, E = q.shape[0], q.shape[1], a.v.shape[2]
    segment, rows = _segments(a.cu_seqlens, T)
    qf, kf, vf = (_padded(_heads(x, H), rows) for x in (q, a.k, a.v))
    one, sides = vf.new_ones(*vf.shape[:2], 1), _sides(a.causal)
    if a.norm_q is None and a.norm_k is None:  # the same weights: one additional value column of ones gives their sum
        both = mix(qf, kf, torch.cat((vf, one), -1), segment, **sides)
        mixed, weight = both[..., :E], both[..., E]
    else:
        nq, nk = (_padded(_heads(x if n is None else n, H), rows) for x, n in ((q, a.norm_q), (a.k, a.norm_k)))
        mixed = mix(qf, kf, vf, segment, **sides)
        weight = mix(nq, nk, one, segment, **sides).squeeze(-1)
    den = weight[:T] + a.eps
    return (mixed[:T] / den.unsqueeze(-1)).to(q.dtype), den


def backward(a: Args, dout: torch.Tensor, out: torch.Tensor, den: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, norm_q, norm_k = a.q, a.k, a.norm_q, a.norm_k
    (T, H, _), G = q.shape, k.shape[1]
    segment, rows = _segments(a.cu_seqlens, T)
    qf, kf, vf = (_padded(_heads(x, H), rows) for x in (q, k, a.v))
    nq, nk = (_padded(_heads(x if n is None else n, H), rows) for x, n in ((q, norm_q), (k, norm_k)))
    given = dout.to(den.dtype) / den.unsqueeze(-1)
    dden = -(given * out.to(den.dtype)).sum(-1, keepdim=True)
    given, dden = _padded(given, rows), _padded(dden, rows)
    one, ahead, back = torch.ones_like(dden), _sides(a.causal), _sides(a.causal, turned=True)
    dq = mix(given, vf, kf, segment, **ahead)
    dk = mix(vf, given, qf, segment, **back)
    dv = mix(kf, qf, given, segment, **back)
    dnq = mix(dden, one, nk, segment, **ahead)
    dnk = mix(one, dden, nq, segment, **back)
    if norm_q is None:
        dq = dq + dnq
    if norm_k is None:
        dk = dk + dnk
    return (
        dq[:T].to(q.dtype),
        _groups(dk[:T], G).to(k.dtype),
        _groups(dv[:T], G).to(a.v.dtype),
        None if norm_q is None else dnq[:T].to(norm_q.dtype),
        None if norm_k is None else _groups(dnk[:T], G).to(norm_k.dtype),
    )
