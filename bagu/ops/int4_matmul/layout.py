"""The memory layout of 4-bit weights, and rounding to it. spec.py of this folder has the definition."""

from typing import NamedTuple

import torch

from bagu.errors import ArgumentError

GROUP = 128  # consecutive values of a row that share a scale


class Int4(NamedTuple):
    """A 4-bit weight [N, K], as `int4_matmul` takes it."""

    packed: torch.Tensor  # [N, K / 2] uint8, 64 bytes a group: see `pack_int4`
    scales: torch.Tensor  # [N, ceil(K / 128)], in memory by group: a GPU kernel reads those of one group together
    zeros: torch.Tensor | None  # the same; None: 8 everywhere


def num_groups(K: int) -> int:
    return -(-K // GROUP)


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The values 0 … 15 of bytes [N, K / 2], as uint8 [N, K]: the inverse of `pack_int4`."""
    low, high = (packed & 15).split(GROUP // 2, 1), (packed >> 4).split(GROUP // 2, 1)
    return torch.cat([half for halves in zip(low, high, strict=True) for half in halves], 1)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Integers 0 … 15 of shape [N, K] as bytes [N, K / 2].

    The columns of a group of 128, or of the shorter last one, are divided in the middle: byte j has column j of the
    first half in its low bits and column j of the second half in its high bits. A kernel then multiplies the low bits
    of 64 bytes by 64 consecutive columns of x, and the high bits by the next 64.
    """
    if values.shape[-1] % 2:
        raise ArgumentError(
            f"a 4-bit weight has an even number of columns, not {values.shape[-1]}",
            hint="pad it with a column of zeros",
        )
    halves = [group.chunk(2, 1) for group in values.to(torch.uint8).split(GROUP, 1)]
    return torch.cat([low | high << 4 for low, high in halves], 1)


def per_column(each: torch.Tensor, K: int) -> torch.Tensor:
    """A number per group, [N, G], as a number per column, [N, K]."""
    return each.repeat_interleave(GROUP, 1)[:, :K]


def quantize_int4(w: torch.Tensor, *, symmetric: bool = True) -> Int4:
    """Round a weight [N, K] to 4 bits in groups of 128 along K. Scales are fp32 (fp64 for fp64).

    Symmetric: the value with the largest magnitude becomes -8, so the sign of the scale is its opposite and all 16
    levels are used. Otherwise the smallest and the largest value of a group, and always 0, are on the grid, and the
    zero points are integers. A group of zeros has scale 0. Raises if a value is not finite.
    """
    if w.ndim != 2:
        raise ArgumentError(f"quantize_int4: w has shape {list(w.shape)}, expected a weight [N, K]")
    if not w.isfinite().all():
        raise ArgumentError("quantize_int4: w has values that are not finite", hint="check the checkpoint it is from")
    N, K = w.shape
    wide = w.double() if w.dtype == torch.float64 else w.float()
    groups = torch.nn.functional.pad(wide, (0, num_groups(K) * GROUP - K)).view(N, num_groups(K), GROUP)
    zeros = None
    if symmetric:
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scales = largest / -8
    else:
        low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
        scales = (high - low) / 15
        zeros = torch.where(scales > 0, -low / scales, 8.0).round().clamp(0, 15)
    q = torch.where(scales != 0, groups / scales, 0.0).add(8 if zeros is None else zeros).round().clamp(0, 15)
    packed = pack_int4(q.flatten(1)[:, :K])
    return Int4(packed, _by_group(scales.squeeze(2)), None if zeros is None else _by_group(zeros.squeeze(2)))


def _by_group(each: torch.Tensor) -> torch.Tensor:
    """[N, G] with the numbers of a group next to each other in memory."""
    return each.t().contiguous().t()


def dequantize_int4(
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight [N, K] of `int4_matmul` in `dtype`, computed in the dtype of the scales or fp32, if that is wider."""
    q, acc = unpacked(packed), torch.promote_types(scales.dtype, torch.float32)
    K = q.shape[1]
    zero = 8 if zeros is None else per_column(zeros.to(acc), K)
    return ((q.to(acc) - zero) * per_column(scales.to(acc), K)).to(dtype)
