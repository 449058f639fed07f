"""Block allocation: which table holds which block of the KV pool, and the prefix cache that finds blocks by tokens.

The pool has `num_blocks` blocks of `block_size` positions. A sequence has a `Table`: its blocks in the order of their
positions. A block is in one of three states:

* used: in at least one table; `refs` is the number of tables,
* cached: in no table, but registered in the prefix cache; the least recently used block is reused first,
* free: neither.

A full block is registered under a chained hash: blake2b(key of the previous block, tokens of this block). So a key
identifies the whole prefix. The first block of a sequence follows its `root`: sequences of different adapters have
different roots and share no block. A hit is also compared token by token, and a block leaves the index only when it is
allocated again. Tables are released from their end, so the beginning of a prefix stays cached longer than its end.

This module does not touch device memory: `reserve` returns a copy-on-write as (source, destination), and the engine
copies the block before the plan writes to it.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bagu.errors import ArgumentError, BaguError

DEAD = 0  # table entry for a released block before the window: a valid index, since a kernel may compute its address
ROOT = b""


class IntegrityError(BaguError, AssertionError):
    """The allocator's or scheduler's state is inconsistent: a bug in this package, not an error of a request."""


class Content(NamedTuple):
    """The tokens of a registered block, and its key."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


class Table:
    """The blocks of one sequence, in the order of its positions. Only `Blocks` changes it."""

    __slots__ = ("blocks", "dead", "registered", "shared")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.dead = 0  # number of leading entries whose blocks were released: DEAD, never read
        self.registered = 0  # number of leading blocks whose keys are in the index (for this block or an equal one)
        self.shared = False  # the last block may be in another table too: check before writing


def extend_keys(keys: list[bytes], tokens: Sequence[int], block_size: int, count: int, root: bytes = ROOT) -> None:
    """Extend `keys` to the keys of the first `count` blocks of `tokens`; existing keys are kept."""
    for i in range(len(keys), count):
        keys.append(_key(keys[i - 1] if i else root, tokens[i * block_size : (i + 1) * block_size]))


def _key(parent: bytes, tokens: Iterable[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class Blocks:
    """The block allocator. `reserve` asserts that enough blocks are available: compare `blocks_needed` with `available`
    first."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ArgumentError(
                f"a KV pool of {num_blocks} blocks of {block_size} positions", hint="both are 1 or more"
            )
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self.refs = [0] * num_blocks
        self.contents: list[Content | None] = [None] * num_blocks
        self.index: dict[bytes, int] = {}
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack, low numbers first: a light load uses few numbers
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.tables: set[Table] = set()

    @property
    def cached_count(self) -> int:
        """Blocks that are in the prefix cache and in no table."""
        return len(self.cached)

    @property
    def used_count(self) -> int:
        return self.num_blocks - len(self.free) - len(self.cached)

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: the free ones, then the cached ones."""
        return len(self.free) + len(self.cached)

    def map(self) -> str:
        """One character per block: u used, c cached, . free."""
        return "".join("u" if r else "." if c is None else "c" for r, c in zip(self.refs, self.contents, strict=True))

    def match(
        self, tokens: Sequence[int], keys: list[bytes] | None = None, *, limit: int | None = None, root: bytes = ROOT
    ) -> list[int]:
        """The blocks of the longest cached prefix of `tokens[:limit]`, whole blocks only. Changes no reference count.

        `keys` caches the keys of these tokens for the caller, so that a second call does not compute them again.
        """
        B, keys, parent, hits = self.block_size, [] if keys is None else keys, root, []
        count = (len(tokens) if limit is None else limit) // B if self.prefix_cache else 0
        for i in range(count):
            extend_keys(keys, tokens, B, i + 1, root)
            block = self.index.get(keys[i])
            if block is None or self.contents[block] != (keys[i], parent, tuple(tokens[i * B : (i + 1) * B])):
                break
            hits.append(block)
            parent = keys[i]
        return hits

    def new_table(self, hits: Sequence[int] = (), *, dead: int = 0) -> Table:
        """A table that begins with the blocks found by `match`; the first `dead` of them are outside the window."""
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
        """A second table of the same blocks. The first of the two to write to the last block gets a copy of it."""
        copy = Table()
        copy.blocks, copy.dead, copy.registered = table.blocks.copy(), table.dead, table.registered
        for block in copy.blocks[copy.dead :]:
            self.refs[block] += 1
        table.shared = copy.shared = True
        self.tables.add(copy)
        return copy

    def blocks_needed(self, table: Table, start: int, upto: int) -> int:
        """How many blocks `reserve` allocates to make positions `start` to `upto` writable."""
        return max(0, -(-upto // self.block_size) - len(table.blocks)) + self._copies(table, start)

    def positions_available(self, table: Table, start: int) -> int:
        """How many positions from `start` on can be reserved with the available blocks."""
        blocks = len(table.blocks) + self.available - self._copies(table, start)
        return blocks * self.block_size - start

    def reserve(self, table: Table, start: int, upto: int) -> tuple[int, int] | None:
        """Make positions `start` to `upto` of the table writable. Returns the block copy (source, destination) that the
        engine must do, or None."""
        copy = None
        if self._copies(table, start):
            at = start // self.block_size
            source = table.blocks[at]
            table.blocks[at] = self._allocate_block()
            self.refs[source] -= 1
            copy = (source, table.blocks[at])
        table.shared = False
        count = -(-upto // self.block_size) - len(table.blocks)
        # The cache evicts blocks from the end of a prefix. Sorted, they are consecutive and need no gather (Pages.of).
        table.blocks.extend(sorted(self._allocate_block() for _ in range(count)))
        return copy

    def register(
        self, table: Table, tokens: Sequence[int], keys: list[bytes], computed: int, root: bytes = ROOT
    ) -> None:
        """Add the full blocks of the first `computed` positions to the prefix cache. A sequence that finds them must
        read them only after they are written."""
        B, count = self.block_size, computed // self.block_size
        if not self.prefix_cache:
            return
        extend_keys(keys, tokens, B, count, root)
        for i in range(table.registered, count):
            if keys[i] not in self.index:  # otherwise two sequences computed the same block: the index keeps the first
                block = table.blocks[i]
                self.index[keys[i]] = block
                self.contents[block] = Content(keys[i], keys[i - 1] if i else root, tuple(tokens[i * B : (i + 1) * B]))
        table.registered = max(table.registered, count)

    def release_leading(self, table: Table, count: int) -> None:
        """Release the first `count` blocks, which are outside the window. Their entries become DEAD."""
        for i in range(table.dead, count):
            self._release_block(table.blocks[i])
            table.blocks[i] = DEAD
        table.dead = max(table.dead, count)

    def release(self, table: Table) -> None:
        """Release all blocks and close the table. `table.blocks` is unchanged, for plans that still refer to it."""
        self.tables.remove(table)  # KeyError: a table released twice
        for block in reversed(table.blocks[table.dead :]):
            self._release_block(block)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, e.g. after the weights changed. Release all tables first: an open table keeps
        registering its blocks."""
        self.free.extend(self.cached)
        self.cached.clear()
        self.index.clear()
        self.contents = [None] * self.num_blocks

    def check_integrity(self) -> None:
        """Raise IntegrityError if reference counts, tables, index and contents disagree."""
        held = [0] * self.num_blocks
        for table in self.tables:
            for block in table.blocks[table.dead :]:
                held[block] += 1
        used = {b for b, n in enumerate(held) if n}
        B = self.block_size
        checks = {
            "refs are the numbers of tables": held == self.refs,
            "every block is free, cached or used": sorted([*self.free, *self.cached, *used])
            == list(range(self.num_blocks)),
            "a free block has no content": all(self.contents[b] is None for b in self.free),
            "a cached block has content": all(self.contents[b] is not None for b in self.cached),
            "the index has every registered block": {c.key: b for b, c in enumerate(self.contents) if c} == self.index,
            "a key is the hash of its tokens": all(
                c.key == _key(c.parent, c.tokens) and len(c.tokens) == B for c in self.contents if c
            ),
            "released entries are DEAD": all(set(t.blocks[: t.dead]) <= {DEAD} for t in self.tables),
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise IntegrityError(f"the KV pool's state is inconsistent; violated: {'; '.join(broken)}")

    def _copies(self, table: Table, start: int) -> int:
        """1 if the block of position `start` exists and is also in another table, else 0."""
        if not table.shared:
            return 0
        at = start // self.block_size
        return int(at < len(table.blocks) and self.refs[table.blocks[at]] > 1)

    def _allocate_block(self) -> int:
        assert self.available, "blocks_needed() did not count a block"
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

    def _release_block(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block]:
            return
        if self.contents[block] is None:
            self.free.append(block)
        else:
            self.cached[block] = None
