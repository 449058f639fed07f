"""Groups of layers that keep the same positions, and have a block table of their own.

A layer with a sliding window needs the keys and values of its last positions only, a layer without one needs all. If
they shared a table, the blocks of all layers would live as long as the longest needs them. Layers of one window are
therefore groups of their own: a sequence has a table per group, and a block holds some positions for the layers of one
group. All groups take their blocks from one pool, so they have equally many layers (the last group of a window may have
fewer, and leaves a part of its blocks unused). Gemma 3 with 26 layers, 4 of them global, has 7 groups of up to 4
layers; a model without windows, or with the same one everywhere, has one group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    from bagu.nn.config import ModelConfig

MOST_GROUPS = 8  # about: a group costs the host a table, and a step the slots of its tokens


class LayerGroup(NamedTuple):
    """Layers whose tokens attend to the same positions: all, or the last `window` and the first `first`."""

    layers: tuple[int, ...]
    window: int | None = None  # the token itself included
    first: int = 0  # positions at the beginning of a sequence that are kept as well, with a window

    def dead(self, computed: int, block_size: int) -> range:
        """The blocks that no token from position `computed` on attends to: a token attends to at most `window - 1`
        positions before it."""
        start = -(-self.first // block_size)
        if self.window is None:
            return range(start, start)
        return range(start, max(start, (computed - self.window + 1) // block_size))

    def max_blocks(self, positions: int, block_size: int) -> int:
        """The most blocks that a sequence of `positions` positions holds at one time, advancing token by token."""
        blocks = -(-positions // block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-self.first // block_size) + (self.window + block_size - 2) // block_size + 1)


def whole(num_layers: int) -> tuple[LayerGroup, ...]:
    """One group of all layers, which keeps all positions."""
    return (LayerGroup(tuple(range(num_layers))),)


def layer_groups(config: ModelConfig, first: int = 0) -> tuple[LayerGroup, ...]:
    """The groups of a model, those without a window first. `first`: positions that all with a window keep as well."""
    windows = [config.window(i) for i in range(config.num_layers)]
    counts = Counter(windows)
    size = max(min(counts.values()), -(-config.num_layers // MOST_GROUPS))
    groups: list[LayerGroup] = []
    for window in sorted(counts, key=lambda w: (w is not None, w or 0)):
        layers = [i for i, w in enumerate(windows) if w == window]
        kept = 0 if window is None else first
        groups += [LayerGroup(tuple(layers[at : at + size]), window, kept) for at in range(0, len(layers), size)]
    return tuple(groups)


def group_layers(groups: Sequence[LayerGroup]) -> int:
    """The layers that a block has room for."""
    return max(len(group.layers) for group in groups)


def max_positions(groups: Sequence[LayerGroup], num_blocks: int, block_size: int, longest: int) -> int:
    """The longest sequence, of at most `longest` positions, that `num_blocks` blocks can hold."""

    def fits(columns: int) -> bool:
        return sum(g.max_blocks(columns * block_size, block_size) for g in groups) <= num_blocks

    low, high = 0, -(-longest // block_size)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return min(longest, low * block_size)
