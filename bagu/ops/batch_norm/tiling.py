"""How the kernels of batch_norm and group_norm cut a tensor [O, K, I] into tiles, and assign tiles to programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bagu.ops.kernels.launch import next_power_of_2, num_sms

# Swept on an H200 at [100352, 256, 1] and [401408, 64, 1] in bf16, forward and backward: 135 to 141 us; with twice the
# warps and programs and without prefetching 145 to 155.
ELEMENTS = 4096  # per tile
WARPS = 4
PER_SM = 2  # programs per multiprocessor
STAGES = 3  # tiles in flight per program, of which two are prefetched into shared memory
RUN = 512  # contiguous values of a tile along memory, if the tensor has as many
LINE = 32  # channels of a tile if they are last in memory: 64 bytes of a 16-bit dtype


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """A tiling of [O, K, I]: tiles of (o, k, i) values, `tiles` of them per k channels, shared by `splits` programs."""

    o: int
    k: int
    i: int
    k_tiles: int
    i_tiles: int
    tiles: int
    splits: int
    warps: int

    @classmethod
    def of(cls, x: torch.Tensor, elements: int | None, warps: int | None) -> Tiling:
        """Tile x as [O, K, I]: tiles are long along memory, and at most an eighth of a long row's tiles is padding."""
        (O, K, I), size = x.shape, elements or ELEMENTS
        fits = [i for i in (4096, 2048, 1024, RUN) if i <= size and _cdiv(I, i) * i <= I * 9 / 8]
        i = fits[0] if fits else min(next_power_of_2(I), RUN)
        k = min(next_power_of_2(K), max((RUN if I > 1 else LINE) // i, 1))
        o = min(next_power_of_2(O), max(size // (i * k), 1))
        k = max(k, min(next_power_of_2(K), size // (i * o)))  # a short O leaves room for more channels
        k_tiles, i_tiles = _cdiv(K, k), _cdiv(I, i)
        tiles = _cdiv(O, o) * i_tiles
        # loads of unaligned rows are narrow and cannot be prefetched: more threads keep as many bytes in flight
        more = 1 if (I if I > 1 else K) % 16 == 0 else 2
        # each program adds up the partial sums of all that share its channels: no more of them than values of a tile
        splits = max(1, min(tiles, more * PER_SM * num_sms(x.device) // k_tiles, size // k))
        warps = warps or more * WARPS
        return cls(o=o, k=k, i=i, k_tiles=k_tiles, i_tiles=i_tiles, tiles=tiles, splits=splits, warps=warps)

    @property
    def options(self) -> dict[str, Any]:
        """The block sizes and warps of a launch."""
        return {"BO": self.o, "BK": self.k, "BI": self.i, "STAGES": STAGES, "num_warps": self.warps}

    def parts_at_once(self, parts: int) -> int:
        """How many of the partial sums of k channels a program loads at once: as many as fit a tile's registers."""
        return min(next_power_of_2(parts), ELEMENTS // self.k)

    @property
    def grid(self) -> tuple[int, int]:
        return self.k_tiles, self.splits


def as_channels(x: torch.Tensor) -> torch.Tensor:
    """x[B, C, *S] as [B, C, I] with unit stride along I: a view if the strides allow one, else a copy."""
    flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)
    return flat if flat.shape[2] == 1 or flat.stride(2) == 1 else flat.contiguous()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
