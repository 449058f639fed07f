"""The geometry of a convolution, and how its output is divided into tiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Pair = tuple[int, int]
Box = tuple[int, int, int]  # images, rows, columns


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Stride, padding and dilation, each along H and W."""

    stride: Pair
    pad: Pair
    dilation: Pair

    def out(self, image: Sequence[int], kernel: Sequence[int]) -> Pair:
        """The size of the output."""
        P, Q = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(image, kernel, self.stride, self.pad, self.dilation, strict=True)
        )
        return P, Q


def boxes(box: Box, sizes: Box) -> int:
    """How many boxes cover the output."""
    return prod(-(-n // b) for n, b in zip(sizes, box, strict=True))


def box_of(pixels: int, sizes: Box) -> Box:
    """The box of this many pixels (all its sides are powers of two) that covers the output with the fewest boxes; among
    those the one nearest to a square. 56 x 56 pixels of many images are boxes of 8 x 8, and 14 x 14 of 2 x 2, without a
    pixel left over."""
    sides = [1 << i for i in range(pixels.bit_length())]
    found = [
        (pixels // (rows * columns), rows, columns) for rows in sides for columns in sides if rows * columns <= pixels
    ]
    return min(found, key=lambda box: (boxes(box, sizes), abs(box[1] - box[2]), box[0]))
