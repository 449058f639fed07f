"""Images to packed tokens. Images of several sizes are one sequence with offsets, as texts are: no padding.

A patch is p × p pixels, flattened as [channel, row, column]; its stride is p, so a convolution is one matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from bagu.errors import ArgumentError


class Packed(NamedTuple):
    """The tokens of some images: per image `specials` tokens (class, registers, groups), then its patches by rows."""

    patches: torch.Tensor  # [P, C * p * p]
    rows: torch.Tensor  # [P] int64: the tokens that are patches
    ids: torch.Tensor  # [T] int64: the number of a special token, 0 for a patch
    positions: torch.Tensor  # [T] int64: specials first, then row * side + column
    cu_seqlens: torch.Tensor  # [B + 1] int32
    max_len: int
    grids: tuple[tuple[int, int], ...]  # rows and columns of patches of each image


def cut(images: torch.Tensor, patch: int) -> torch.Tensor:
    """[B, N, C * p * p] of images [B, C, H, W]."""
    return F.unfold(images, patch, stride=patch).transpose(1, 2)


def pack(images: torch.Tensor | Sequence[torch.Tensor], patch: int, side: int, specials: int) -> Packed:
    """The tokens of images [B, C, H, W], or of a list of [C, H, W] of several sizes, with at most `side` patches along
    each side."""
    sizes = [tuple(image.shape[-2:]) for image in images]
    grids = [(h // patch, w // patch) for h, w in sizes]
    for (h, w), (rows, columns) in zip(sizes, grids, strict=True):
        if h % patch or w % patch or not 0 < rows <= side or not 0 < columns <= side:
            raise ArgumentError(
                f"an image of {h} × {w} pixels, and the model takes patches of {patch}, at most {side} along a side",
                hint="resize it to a multiple of the patch",
            )
    device = images[0].device
    if isinstance(images, torch.Tensor):
        patches = cut(images, patch).flatten(0, 1)
    else:
        patches = torch.cat([cut(image.unsqueeze(0), patch)[0] for image in images])
    lengths = torch.tensor([specials + r * c for r, c in grids])
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    place = torch.arange(int(cu_seqlens[-1])) - cu_seqlens[:-1].repeat_interleave(lengths)  # in its image
    width = torch.tensor([c for _, c in grids]).repeat_interleave(lengths)
    inside = place - specials
    is_patch = inside >= 0
    position = torch.where(is_patch, specials + inside // width * side + inside % width, place)
    return Packed(
        patches,
        torch.nonzero(is_patch).squeeze(1).to(device),
        torch.where(is_patch, 0, place).to(device),
        position.to(device),
        cu_seqlens.int().to(device),
        int(lengths.max()),
        tuple(grids),
    )


def to_floats(pixels: torch.Tensor, dtype: torch.dtype = torch.float32, *, standardize: bool = False) -> torch.Tensor:
    """uint8 pixels to -1 … 1; or, with `standardize`, to mean 0 and deviation 1 over each image [.., C, H, W]."""
    x = pixels.to(dtype) / 127.5 - 1
    if not standardize:
        return x
    mean, std = x.mean((-3, -2, -1), keepdim=True), x.std((-3, -2, -1), keepdim=True)
    return (x - mean) / (std + 1e-3)
