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

from bagu.serve.kv.blocks import longest_prefix
from bagu.serve.kv.groups import LayerGroup
from bagu.serve.replicas.keys import KnownChunks, PromptKeys
from bagu.serve.wire.messages import CacheChanges


class Match(NamedTuple):
    """The keys of a prompt, and the tokens of it that each replica has cached."""

    keys: PromptKeys
    cached: dict[int, int]


class Promise(NamedTuple):
    """A replica will compute the full blocks of `tokens` from the one with this key on."""

    replica: int
    key: bytes
    tokens: tuple[int, ...]


class PrefixIndex:
    def __init__(self, block_size: int, groups: Sequence[LayerGroup]) -> None:
        self.block_size, self.groups = block_size, tuple(groups)
        self._holders: list[dict[bytes, int]] = [{} for _ in groups]  # of each group; bit r: replica r has the block
        self._promised: dict[bytes, list[Promise]] = {}  # by the key of their first block
        self._known = KnownChunks()
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
        for group, key in changes.entered:
            held = self._holders[group]
            held[key] = held.get(key, 0) | bit
        for group, key in changes.left:
            self._discard(group, key, bit)
        return True

    def drop(self, replica: int) -> None:
        """The process has ended; the next one begins with an empty cache and number 0."""
        self._clear(replica)
        self._next.pop(replica, None)

    def held(self, replica: int) -> set[tuple[int, bytes]]:
        """The blocks that a replica has."""
        return {(g, key) for g, held in enumerate(self._holders) for key, bits in held.items() if bits >> replica & 1}

    def match(self, prompt: Sequence[int], replicas: Sequence[int]) -> Match:
        """How many leading tokens of a prompt each replica has. The last token is always computed: its logits are
        needed."""
        B, keys = self.block_size, PromptKeys(tuple(prompt), self.block_size, self._known)
        columns = (len(prompt) - 1) // B if self.groups else 0
        found = dict.fromkeys(replicas, 0)
        left = sum(1 << r for r in replicas)
        whole = [held for held, group in zip(self._holders, self.groups, strict=True) if group.window is None]
        promised, made = self._promised, keys.made
        ends: list[tuple[int, int]] = []  # of promised blocks: the column after them, and the replica's bit
        soon: list[int] = []  # for each column the replicas that will compute it
        for i in range(columns):
            key = made[i] if i < len(made) else keys[i]
            if key in promised:
                ends += [(keys.same_blocks(p.tokens, i), 1 << p.replica) for p in promised[key]]
            soon.append(_promised_at(i, ends) if ends else 0)
            have = left
            for held in whole:
                have &= held.get(key, 0) | soon[i]
            if have != left:
                for r in _bits(left & ~have):
                    found[r] = i
                left = have
                if not left:
                    break
        for r in _bits(left):
            found[r] = columns
        if len(whole) < len(self.groups):  # layers with a window need some blocks only
            missing = partial(self._missing, keys, soon)
            found = {r: longest_prefix(self.groups, B, n, partial(missing, r)) for r, n in found.items()}
        return Match(keys, {r: n * B for r, n in found.items()})

    def promise(self, replica: int, match: Match) -> Promise | None:
        """The replica gets this prompt: what it has not cached will be. None if that has no full block."""
        keys, first = match.keys, match.cached[replica] // self.block_size
        if not self.groups or first >= keys.count:
            return None
        promise = Promise(replica, keys[first], keys.tokens)
        self._promised.setdefault(promise.key, []).append(promise)
        return promise

    def fulfil(self, promise: Promise) -> None:
        """The request has a token, or has left: what it computed is in the index."""
        made = self._promised[promise.key]
        made.remove(promise)
        if not made:
            del self._promised[promise.key]

    def _missing(self, keys: PromptKeys, soon: Sequence[int], replica: int, group: int, at: range) -> int | None:
        """The first of some columns of a prompt that a group of a replica does not have."""
        held = self._holders[group]
        return next((i for i in at if not (held.get(keys[i], 0) | soon[i]) >> replica & 1), None)

    def _discard(self, group: int, key: bytes, bit: int) -> None:
        held = self._holders[group]
        if bits := held.get(key, 0) & ~bit:
            held[key] = bits
        else:
            held.pop(key, None)

    def _clear(self, replica: int) -> None:
        for group, key in self.held(replica):
            self._discard(group, key, 1 << replica)


def _promised_at(column: int, ends: Sequence[tuple[int, int]]) -> int:
    """The replicas whose promised blocks end after a column."""
    bits = 0
    for end, bit in ends:
        bits |= bit if column < end else 0
    return bits


def _bits(bits: int) -> list[int]:
    return [i for i in range(bits.bit_length()) if bits >> i & 1]
