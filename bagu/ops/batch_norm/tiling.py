"""How the kernels of batch_norm and group_norm cut a tensor [O, K, I] into tiles, and assign tiles to programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagu.ops.launch import next_power_of_2, num_sms

ELEMENTS = 4096  # per tile: 16 per thread at 8 warps, two 128-bit loads of a 16-bit dtype
RUN = 512  # contiguous values of a tile along memory, if the tensor has as many
SPLITS = 512  # most programs that share a channel: one program combines their partial sums


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
        k = min(next_power_of_2(K), max(RUN // i, 1))
        o = min(next_power_of_2(O), max(size // (i * k), 1))
        k = max(k, min(next_power_of_2(K), size // (i * o)))  # a short O leaves room for more channels
        k_tiles, i_tiles = _cdiv(K, k), _cdiv(I, i)
        tiles = _cdiv(O, o) * i_tiles
        splits = max(1, min(tiles, 4 * num_sms(x.device) // k_tiles, SPLITS))
        return cls(o=o, k=k, i=i, k_tiles=k_tiles, i_tiles=i_tiles, tiles=tiles, splits=splits, warps=warps or 8)

    @property
    def blocks(self) -> dict[str, int]:
        """The constexpr block sizes of a launch."""
        return {"BO": self.o, "BK": self.k, "BI": self.i, "num_warps": self.warps}

    @property
    def grid(self) -> tuple[int]:
        """One program per tile."""
        return (self.k_tiles * self.tiles,)


def as_channels(x: torch.Tensor) -> torch.Tensor:
    """x[B, C, *S] as [B, C, I] with unit stride along I: a view if the strides allow one, else a copy."""
    flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)
    return flat if flat.shape[2] == 1 or flat.stride(2) == 1 else flat.contiguous()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
