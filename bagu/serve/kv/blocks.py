"""Block accounting: who holds which block of the KV pool, and which blocks can be found again by their tokens.

The pool is `num_blocks` blocks of `block_size` positions. A sequence has a `Table`: the blocks of its positions in
order. A block is in one of three states:

* used: in at least one table; `refs` counts in how many,
* cached: in no table, but registered under the tokens it was computed from; the least recently used goes first,
* free: neither.

A full block is registered under a key that chains: blake2b(key of the block before, tokens of this one). So a key
stands for the whole prefix. A hit is still compared token by token, and a block leaves the index only when it is handed
out for something else. Tables are released from their end, so a prefix outlives what follows it.

Nothing here touches memory of a device: a copy-on-write is returned as (source, destination) for the engine to do,
before anything of that plan is written.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bagu.errors import ArgumentError, BaguError

__all__ = ["DEAD", "Blocks", "Content", "IntegrityError", "Table", "chain"]

DEAD = 0  # what a table holds where the window has passed: a block in range, since a kernel may form its address
ROOT = b""


class IntegrityError(BaguError, AssertionError):
    """The accounting contradicts itself: a bug in this package, never of a request."""


class Content(NamedTuple):
    """What a registered block was computed from."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


class Table:
    """The blocks of one sequence, in the order of its positions. Changed by `Blocks` alone."""

    __slots__ = ("blocks", "dead", "registered", "shared")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.dead = 0  # the leading entries that were given back: DEAD, never read
        self.registered = 0  # the leading blocks that are in the index, here or as another block of the same tokens
        self.shared = False  # the last block may be in another table too: look before writing


def chain(keys: list[bytes], tokens: Sequence[int], block_size: int, count: int) -> None:
    """Extend `keys` to the keys of the first `count` blocks of `tokens`; what is there already is not made again."""
    for i in range(len(keys), count):
        keys.append(_key(keys[i - 1] if i else ROOT, tokens[i * block_size : (i + 1) * block_size]))


def _key(parent: bytes, tokens: Iterable[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class Blocks:
    """The pool's accounting. Methods that take blocks assert that there are enough: ask `need` and `available`."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ArgumentError(
                f"a KV pool of {num_blocks} blocks of {block_size} positions", hint="both are 1 or more"
            )
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self.refs = [0] * num_blocks
        self.contents: list[Content | None] = [None] * num_blocks
        self.index: dict[bytes, int] = {}
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers first, so a light load stays compact
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.tables: set[Table] = set()

    @property
    def free_count(self) -> int:
        return len(self.free)

    @property
    def cached_count(self) -> int:
        """Blocks that no table holds and the index still finds."""
        return len(self.cached)

    @property
    def used_count(self) -> int:
        return self.num_blocks - len(self.free) - len(self.cached)

    @property
    def available(self) -> int:
        """Blocks that can be handed out now: the free ones, then the cached ones."""
        return len(self.free) + len(self.cached)

    def map(self) -> str:
        """One character a block: u used, c cached, . free."""
        return "".join("u" if r else "." if c is None else "c" for r, c in zip(self.refs, self.contents, strict=True))

    def match(self, tokens: Sequence[int], keys: list[bytes] | None = None, *, limit: int | None = None) -> list[int]:
        """The blocks that hold the longest registered prefix of `tokens[:limit]`, whole blocks only. Takes none.

        `keys` is a memory of the caller for the keys of these tokens, so that a second look makes none of them again.
        """
        B, keys, parent, hits = self.block_size, [] if keys is None else keys, ROOT, []
        count = (len(tokens) if limit is None else limit) // B if self.prefix_cache else 0
        for i in range(count):
            chain(keys, tokens, B, i + 1)
            block = self.index.get(keys[i])
            if block is None or self.contents[block] != (keys[i], parent, tuple(tokens[i * B : (i + 1) * B])):
                break
            hits.append(block)
            parent = keys[i]
        return hits

    def open(self, hits: Sequence[int] = (), *, dead: int = 0) -> Table:
        """A table that begins with the blocks of a match; the first `dead` of them are not needed any more."""
        table = Table()
        table.blocks = [DEAD] * dead + list(hits[dead:])
        table.dead, table.registered = dead, len(hits)
        for block in hits[dead:]:
            if not self.refs[block]:
                del self.cached[block]
            self.refs[block] += 1
        self.tables.add(table)
        return table

    def fork(self, table: Table) -> Table:
        """A second table of the same blocks. Whoever writes to the last one first gets a copy."""
        copy = Table()
        copy.blocks, copy.dead, copy.registered = table.blocks.copy(), table.dead, table.registered
        for block in copy.blocks[copy.dead :]:
            self.refs[block] += 1
        table.shared = copy.shared = True
        self.tables.add(copy)
        return copy

    def need(self, table: Table, start: int, upto: int) -> int:
        """How many blocks `reserve` would take to let positions `start` to `upto` be written."""
        return max(0, -(-upto // self.block_size) - len(table.blocks)) + self._copies(table, start)

    def room(self, table: Table, start: int) -> int:
        """How many positions from `start` could be reserved with what is available."""
        blocks = len(table.blocks) + self.available - self._copies(table, start)
        return blocks * self.block_size - start

    def reserve(self, table: Table, start: int, upto: int) -> tuple[int, int] | None:
        """Make positions `start` to `upto` of the table writable. Returns the copy (source, destination) to do."""
        copy = None
        if self._copies(table, start):
            at = start // self.block_size
            source = table.blocks[at]
            table.blocks[at] = self._take()
            self.refs[source] -= 1
            copy = (source, table.blocks[at])
        table.shared = False
        count = -(-upto // self.block_size) - len(table.blocks)
        # The cache gives blocks back from the end of a prefix. In a row they are read without a copy (Pages.of).
        table.blocks.extend(sorted(self._take() for _ in range(count)))
        return copy

    def register(self, table: Table, tokens: Sequence[int], keys: list[bytes], computed: int) -> None:
        """Enter the full blocks of the first `computed` positions: whoever finds them reads them after they are
        written."""
        B, count = self.block_size, computed // self.block_size
        if not self.prefix_cache:
            return
        chain(keys, tokens, B, count)
        for i in range(table.registered, count):
            if keys[i] not in self.index:  # otherwise two sequences computed the same: the first stays the one found
                block = table.blocks[i]
                self.index[keys[i]] = block
                self.contents[block] = Content(keys[i], keys[i - 1] if i else ROOT, tuple(tokens[i * B : (i + 1) * B]))
        table.registered = max(table.registered, count)

    def drop(self, table: Table, count: int) -> None:
        """Give back the first `count` blocks, whose positions no window reaches any more. The entries become DEAD."""
        for i in range(table.dead, count):
            self._give(table.blocks[i])
            table.blocks[i] = DEAD
        table.dead = max(table.dead, count)

    def release(self, table: Table) -> None:
        """Give back all blocks. The list itself stays as it was, for plans that still name it; the table is closed."""
        self.tables.remove(table)  # KeyError: a table released twice
        for block in reversed(table.blocks[table.dead :]):
            self._give(block)

    def forget(self) -> None:
        """Empty the index: what was computed is not to be found again (the weights have changed). Release the tables
        first: one that stays open goes on to register what it computes."""
        self.free.extend(self.cached)
        self.cached.clear()
        self.index.clear()
        self.contents = [None] * self.num_blocks

    def check_integrity(self) -> None:
        """Raise IntegrityError unless counts, tables, index and contents agree."""
        held = [0] * self.num_blocks
        for table in self.tables:
            for block in table.blocks[table.dead :]:
                held[block] += 1
        used = {b for b, n in enumerate(held) if n}
        B = self.block_size
        checks = {
            "refs count the tables that hold a block": held == self.refs,
            "free, cached and used blocks are all, once": sorted([*self.free, *self.cached, *used])
            == list(range(self.num_blocks)),
            "a free block has no content": all(self.contents[b] is None for b in self.free),
            "a cached block has content": all(self.contents[b] is not None for b in self.cached),
            "the index finds each content": {c.key: b for b, c in enumerate(self.contents) if c} == self.index,
            "a key is that of its tokens": all(
                c.key == _key(c.parent, c.tokens) and len(c.tokens) == B for c in self.contents if c
            ),
            "given back entries are marked": all(set(t.blocks[: t.dead]) <= {DEAD} for t in self.tables),
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise IntegrityError(f"the KV pool contradicts itself: not true that {'; '.join(broken)}")

    def _copies(self, table: Table, start: int) -> int:
        """1 where the block of position `start` exists and is in another table too, else 0."""
        if not table.shared:
            return 0
        at = start // self.block_size
        return int(at < len(table.blocks) and self.refs[table.blocks[at]] > 1)

    def _take(self) -> int:
        assert self.available, "a block was taken that need() did not count"
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            content = self.contents[block]
            assert content is not None
            del self.index[content.key]
            self.contents[block] = None
        self.refs[block] = 1
        return block

    def _give(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block]:
            return
        if self.contents[block] is None:
            self.free.append(block)
        else:
            self.cached[block] = None
