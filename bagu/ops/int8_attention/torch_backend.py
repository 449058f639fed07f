"""int8 attention in PyTorch: queries and keys are rounded to int8 and back, then `attention` computes the rest."""

from __future__ import annotations

import torch

from bagu.ops.attention import torch_backend as attention
from bagu.ops.attention.shape import index, segment_of
from bagu.ops.contract.signature import accumulator

GROUP = 128  # keys of a segment that share a scale


def rounded(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """x as the nearest multiples of top / 127, where top is the largest |x| of its group. All 0 if that is no normal
    fp32 number; NaN if it is infinite or NaN."""
    scale = top / 127
    scale = torch.where(scale < 2.0**-126, 0.0, scale)
    return torch.where((scale > 0) & scale.isfinite(), x / scale, 0.0).round() * scale


def _without_mean(k: torch.Tensor, segment: torch.Tensor, segments: int) -> torch.Tensor:
    """k less the mean of its segment, for each head. The sum is in fp64: the order of its terms differs from run to run
    on a GPU, and in fp32 the error of a long sum would be several ulps of the difference."""
    ones = k.new_ones(k.shape[0])
    count = ones.new_zeros(segments).index_add(0, segment, ones).clamp(min=1)
    total = k.new_zeros(segments, *k.shape[1:], dtype=torch.float64).index_add(0, segment, k.double())
    return k - (total / count.view(-1, 1, 1)).to(k.dtype)[segment]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int, causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor]:  # fmt: skip
    T, acc = q.shape[0], accumulator(q.dtype)
    if T == 0:
        return (torch.empty_like(q),)
    qf, kf, vf = (x.detach().to(acc) for x in (q, k, v))
    segment = segment_of(cu_seqlens, T)
    kf = _without_mean(kf, segment, cu_seqlens.shape[0] - 1)
    begin = cu_seqlens.long()[segment]
    group = begin + (index(T, k) - begin) // GROUP * GROUP  # the first key of each key's group
    top = kf.abs().amax(-1)
    top = torch.zeros_like(top).scatter_reduce(0, group.unsqueeze(1).expand_as(top), top, "amax")[group]
    qf, kf = rounded(qf, qf.abs().amax(-1, keepdim=True)), rounded(kf, top.unsqueeze(-1))
    none = (None, None, None)  # no slopes, bias and sinks
    out, _ = attention.forward(qf, kf, vf, cu_seqlens, *none, max_len, causal, None, scale, None)
    return (out.to(q.dtype),)
