"""Which replicas have which blocks of KV cache: an exact copy of the index of each replica's pool.

Every engine sends the keys that entered and left its prefix cache (`CacheChanges`, kv/blocks.py) before the tokens of
the same step, so that what the router knows is at most one step old. A block is stored once for all replicas, with a
bit for each that has it: a prompt is looked up for 16 replicas at the cost of one. Blocks that a replica is about to
compute, for a request that was sent there and has no token yet, count as cached: the request after it with the same
prefix would find them.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from bagu.serve.kv.blocks import extend_keys, longest_prefix
from bagu.serve.kv.groups import LayerGroup
from bagu.serve.wire.messages import CacheChanges


class Match(NamedTuple):
    """The keys of a prompt's full blocks, and the tokens that each replica has cached."""

    keys: list[bytes]
    cached: dict[int, int]


class PrefixIndex:
    def __init__(self, block_size: int, groups: Sequence[LayerGroup]) -> None:
        self.block_size, self.groups = block_size, tuple(groups)
        self._holders: dict[tuple[int, bytes], int] = {}  # bit r: replica r has the block
        self._promised: dict[bytes, list[int]] = {}  # replicas that will compute it, once for each request
        self._next: dict[int, int] = {}  # the number of the next message of a replica

    def update(self, replica: int, changes: CacheChanges) -> bool:
        """Apply a message; False if one before it was lost, and the whole index must be sent again."""
        due = self._next.get(replica, 0)
        self._next[replica] = changes.number + 1
        if changes.number != due and not changes.cleared:
            return False
        if changes.cleared:
            self._clear(replica)
        bit = 1 << replica
        for block in changes.entered:
            self._holders[block] = self._holders.get(block, 0) | bit
        for block in changes.left:
            self._discard(block, bit)
        return True

    def drop(self, replica: int) -> None:
        """The process has ended; the next one begins with an empty cache and number 0."""
        self._clear(replica)
        self._next.pop(replica, None)

    def held(self, replica: int) -> set[tuple[int, bytes]]:
        """The blocks that a replica has."""
        return {block for block, bits in self._holders.items() if bits >> replica & 1}

    def match(self, prompt: Sequence[int], replicas: Sequence[int]) -> Match:
        """How many leading tokens of a prompt each replica has. The last token is always computed: its logits are
        needed."""
        B, keys = self.block_size, list[bytes]()
        columns = (len(prompt) - 1) // B if self.groups else 0
        extend_keys(keys, prompt, B, len(prompt) // B if self.groups else 0)
        found = dict.fromkeys(replicas, 0)
        left = sum(1 << r for r in replicas)
        whole = [g for g, group in enumerate(self.groups) if group.window is None]
        for i in range(columns):
            have = left
            for g in whole:
                have &= self._holds(g, keys[i])
            if have != left:
                for r in _bits(left & ~have):
                    found[r] = i
                left = have
                if not left:
                    break
        for r in _bits(left):
            found[r] = columns
        if len(whole) < len(self.groups):  # layers with a window need some blocks only
            found = {r: longest_prefix(self.groups, B, n, partial(self._missing, keys, r)) for r, n in found.items()}
        return Match(keys, {r: n * B for r, n in found.items()})

    def promise(self, replica: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._promised.setdefault(key, []).append(replica)

    def fulfil(self, replica: int, keys: Sequence[bytes]) -> None:
        """The request has a token, or has left: what it computed is in the index."""
        for key in keys:
            who = self._promised[key]
            who.remove(replica)
            if not who:
                del self._promised[key]

    def _missing(self, keys: Sequence[bytes], replica: int, group: int, at: range) -> int | None:
        """The first of some columns of a prompt that a group of a replica does not have."""
        return next((i for i in at if not self._holds(group, keys[i]) >> replica & 1), None)

    def _holds(self, group: int, key: bytes) -> int:
        bits = self._holders.get((group, key), 0)
        if who := self._promised.get(key):
            for replica in who:
                bits |= 1 << replica
        return bits

    def _discard(self, block: tuple[int, bytes], bit: int) -> None:
        bits = self._holders.get(block, 0) & ~bit
        if bits:
            self._holders[block] = bits
        else:
            self._holders.pop(block, None)

    def _clear(self, replica: int) -> None:
        for block in self.held(replica):
            self._discard(block, 1 << replica)


def _bits(bits: int) -> list[int]:
    return [i for i in range(bits.bit_length()) if bits >> i & 1]
