"""int8 attention in PyTorch: queries and keys are rounded to int8 and back, then `attention` computes the rest."""

from __future__ import annotations

import torch

from bagu.ops.attention import torch_backend as attention
from bagu.ops.attention.shape import index, segment_of
from bagu.ops.attention.spec import Args as Attention
from bagu.ops.contract.signature import accumulator
from bagu.ops.int8_attention.spec import GROUP, NO_TERMS, Args, rounded


def _without_mean(k: torch.Tensor, segment: torch.Tensor, segments: int) -> torch.Tensor:
    """k less the mean of its segment, for each head. The sum is in fp64: the order of its terms differs from run to run
    on a GPU, and in fp32 the error of a long sum would be several ulps of the difference."""
    ones = k.new_ones(k.shape[0])
    count = ones.new_zeros(segments).index_add(0, segment, ones).clamp(min=1)
    total = k.new_zeros(segments, *k.shape[1:], dtype=torch.float64).index_add(0, segment, k.double())
    return k - (total / count.view(-1, 1, 1)).to(k.dtype)[segment]


def forward(a: Args) -> tuple[torch.Tensor]:
    q, cu_seqlens = a.q, a.cu_seqlens
    T, acc = q.shape[0], accumulator(q.dtype)
    if T == 0:
        return (torch.empty_like(q),)
    qf, kf, vf = (x.detach().to(acc) for x in (q, a.k, a.v))
    segment = segment_of(cu_seqlens, T)
    kf = _without_mean(kf, segment, cu_seqlens.shape[0] - 1)
    begin = cu_seqlens.long()[segment]
    group = begin + (index(T, a.k) - begin) // GROUP * GROUP  # the first key of each key's group
    top = kf.abs().amax(-1)
    top = torch.zeros_like(top).scatter_reduce(0, group.unsqueeze(1).expand_as(top), top, "amax")[group]
    qf, kf = rounded(qf, qf.abs().amax(-1, keepdim=True)), rounded(kf, top.unsqueeze(-1))
    given = Attention(**a._replace(q=qf, k=kf, v=vf)._asdict(), **NO_TERMS)
    out, _ = attention.forward(given)
    return (out.to(q.dtype),)
