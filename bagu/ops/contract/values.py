"""Checks of values: offsets, positions, slots, block tables. `check_segments` reads sizes only.

Reading a value synchronizes with the device, so an op checks only shapes, and the host code that builds a batch checks
its values once. In debug mode (BAGU_DEBUG=1 in the environment), each eager call also checks them by its spec's
`check_values`.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

import torch

from bagu.errors import ArgumentError


@cache
def debugging() -> bool:
    """Whether BAGU_DEBUG is set; read once, since reading the environment takes a microsecond per call."""
    return os.environ.get("BAGU_DEBUG", "0") not in ("", "0")


def check_range(op: str, name: str, values: torch.Tensor, end: int, of: str) -> None:
    """Check that every value is in [0, end)."""
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < end:
        raise ArgumentError(
            f"{op}: {name} holds {int(values.min())} to {int(values.max())}, and {of} has 0 to {end - 1}",
            hint=f"check where {name} is made",
        )


def check_segments(op: str, dims: Mapping[str, int], max_len: int) -> None:
    """Check that the H query heads are a multiple of the G key heads, and that the segments can hold the T tokens."""
    T, H, G, S = dims["T"], dims["H"], dims["G"], dims["S1"] - 1
    if G == 0 or H % G:
        raise ArgumentError(
            f"{op}: q has {H} heads and k has {G}, expected a multiple", hint="each key head serves H / G query heads"
        )
    if S < 0 or S * max_len < T:
        raise ArgumentError(
            f"{op}: cu_seqlens has {S} segments of at most max_len = {max_len}, and there are {T} tokens",
            hint="max_len is the length of the longest segment, and cu_seqlens ends with T",
        )


def check_offsets(op: str, offsets: Sequence[int], T: int, max_len: int) -> None:
    """Check that cu_seqlens goes from 0 to T in non-negative steps of at most max_len."""
    lengths = [b - a for a, b in pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != T or min(lengths, default=0) < 0 or max(lengths, default=0) > max_len:
        raise ArgumentError(
            f"{op}: cu_seqlens is {offsets}, expected offsets that rise from 0 to T = {T} by at most max_len ="
            f" {max_len}",
            hint="cu_seqlens holds where each segment begins, then T; segments past the last are empty (T again)",
        )
