"""The keys of a prompt's blocks, computed as far as they are looked up.

A key chains over all blocks before it (kv/blocks.py) and costs 1.6 µs, so that a prompt of 2,048 tokens would cost
0.2 ms. Two things keep the router below that. A look-up stops where no replica has a block; the first block of a chunk
is looked up before the keys of the others are made. And the keys of chunks are remembered: a prefix that was seen
before costs a look-up of its tokens for every `CHUNK` blocks.
"""

from collections import OrderedDict

from bagu.serve.kv.blocks import ROOT, extend_keys

CHUNK = 16  # blocks
ROOM = 2048  # chunks that are remembered: 20 MB with blocks of 16 tokens


class KnownChunks:
    """The keys of the chunks that were used last, by the key before them and their tokens."""

    def __init__(self, room: int = ROOM) -> None:
        self.room = room
        self._keys: OrderedDict[tuple[bytes, tuple[int, ...]], list[bytes]] = OrderedDict()

    def find(self, before: bytes, tokens: tuple[int, ...]) -> list[bytes] | None:
        keys = self._keys.get((before, tokens))
        if keys is not None:
            self._keys.move_to_end((before, tokens))
        return keys

    def add(self, before: bytes, tokens: tuple[int, ...], keys: list[bytes]) -> None:
        self._keys[before, tokens] = keys
        if len(self._keys) > self.room:
            self._keys.popitem(last=False)


class PromptKeys:
    """`keys[i]` is the key of block i of a prompt, of which `count` are full."""

    def __init__(self, tokens: tuple[int, ...], block_size: int, known: KnownChunks) -> None:
        self.tokens, self.count = tokens, len(tokens) // block_size
        self._block_size, self._known = block_size, known
        self.made: list[bytes] = []

    def __getitem__(self, i: int) -> bytes:
        """Make the keys up to block i, and return its own."""
        keys, wide = self.made, CHUNK * self._block_size
        while i >= len(keys):
            at, inside = divmod(len(keys), CHUNK)
            before, chunk = keys[at * CHUNK - 1] if at else ROOT, self.tokens[at * wide : (at + 1) * wide]
            if not inside and (found := self._known.find(before, chunk)) is not None:
                keys += found
                continue
            end = min((at + 1) * CHUNK, self.count) if inside else len(keys) + 1
            extend_keys(keys, self.tokens, self._block_size, end)
            if end == (at + 1) * CHUNK:
                self._known.add(before, chunk, keys[-CHUNK:])
        return keys[i]

    def same_blocks(self, tokens: tuple[int, ...], first: int) -> int:
        """Where the full blocks that this prompt shares with `tokens` end, if those before `first` are shared."""
        size, mine = self._block_size, self.tokens
        low, high = first, min(self.count, len(tokens) // size)
        while low < high:  # by halves: slices are compared in C
            middle = (low + high + 1) // 2
            if mine[low * size : middle * size] == tokens[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low
