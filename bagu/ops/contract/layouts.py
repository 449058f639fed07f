"""Memory layouts for checks: the same values with other strides, to detect a kernel that uses a wrong stride.

    packed       contiguous
    gaps         a gap after each entry of the first dim, which keeps rows aligned; each entry is contiguous
    odd_gaps     a gap of an odd number of elements after each entry of every dim but the last: no row is aligned
    sliced       the first columns of wider rows, like queries in a fused qkv; the dims before the last can be merged
    stepped      gaps between all elements, so no dim has unit stride
    transposed   the last two dims are swapped in memory
    channels_last  the second dim is the last in memory, without gaps, as in images of [B, H, W, C]
    heads_first  the two dims before the last are swapped in memory, as in [B, H, T, D].transpose(1, 2)
    negated      packed, with torch's lazy negation bit set (as in `z.conj().imag`)
    half_negated the same at even positions only: if the bit of both factors of a product is ignored, the signs cancel
    repeated     inputs are packed; an incoming gradient is one entry of the first dim, repeated with stride 0

Every tensor of a call has a position, and where there are gaps no two positions have the same strides, so a kernel that
uses x's stride for dy reads the wrong memory. The gaps hold NaN (1 in integers, True in booleans).
"""

from collections.abc import Sequence

import torch

LAYOUTS = (
    "packed", "gaps", "odd_gaps", "sliced", "stepped", "transposed", "channels_last", "heads_first", "negated",
    "half_negated", "repeated",
)  # fmt: skip


def lay_out(x: torch.Tensor, layout: str, position: int) -> torch.Tensor:
    """A copy of x in `layout`, as the tensor at `position` of a call. Dims with stride 0 keep stride 0."""
    if layout in ("negated", "half_negated"):
        negatable = x.is_floating_point() and x.itemsize > 1  # torch has no negation of fp8
        chosen = negatable and (layout == "negated" or position % 2 == 0)
        return torch._neg_view(-x) if chosen else x.clone()
    once = tuple(1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True))
    strides, offset = _strides(once, layout, position)
    if not x.numel():
        return x.new_empty_strided(x.shape, strides)
    last = sum((size - 1) * stride for size, stride in zip(once, strides, strict=True))
    fill = torch.nan if x.is_floating_point() else True if x.dtype == torch.bool else 1
    memory = x.new_full((offset + last + 1,), fill)
    kept = [0 if old == 0 and size > 1 else new for size, old, new in zip(x.shape, x.stride(), strides, strict=True)]
    memory.as_strided(once, strides, offset).copy_(x[tuple(slice(0, size) for size in once)])
    return memory.as_strided(x.shape, kept, offset)


def raw_bytes(x: torch.Tensor) -> torch.Tensor:
    """All memory under x, gaps included."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _strides(shape: Sequence[int], layout: str, position: int) -> tuple[list[int], int]:
    """The strides of a tensor of this shape, and its offset in the storage."""
    packed = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        packed[d] = packed[d + 1] * max(shape[d + 1], 1)
    if layout in ("packed", "repeated") or not shape:
        return packed, 0
    if len(shape) == 1:
        return ([1], 16) if layout == "gaps" else ([position + 2], position + 1)
    if layout == "gaps":
        return [packed[0] + 16 * (position + 1), *packed[1:]], 16 * (position + 1)
    if layout == "odd_gaps":
        gap, strides = 2 * position + 1, [1] * len(shape)
        for d in range(len(shape) - 2, -1, -1):
            strides[d] = strides[d + 1] * max(shape[d + 1], 1) + gap
        return strides, gap
    if layout == "sliced":
        wider = [*shape[:-1], max(shape[-1], 1) + 3 * position + 2]
        return _strides(wider, "packed", position)[0], 3 * position + 2
    if layout == "stepped":
        return [(position + 2) * s for s in packed], position + 1
    if layout == "transposed":
        swapped = [*shape[:-2], shape[-1], shape[-2]]
        strides, offset = _strides(swapped, "odd_gaps", position)
        return [*strides[:-2], strides[-1], strides[-2]], offset
    if layout == "channels_last":
        strides, offset = _strides([shape[0], *shape[2:], shape[1]], "packed", position)
        return [strides[0], strides[-1], *strides[1:-1]], offset
    if layout == "heads_first":
        if len(shape) < 3:
            return _strides(shape, "sliced", position)
        strides, offset = _strides([*shape[:-3], shape[-2], shape[-3], shape[-1]], "odd_gaps", position)
        return [*strides[:-3], strides[-2], strides[-3], strides[-1]], offset
    raise AssertionError(f"layout is {layout!r}, expected one of {LAYOUTS}")
