"""Block allocation: which table holds which block of the KV pool, and the prefix cache that finds blocks by tokens.

The pool has `num_blocks` blocks of `block_size` positions. A sequence has a `Table`: for each group of layers
(groups.py) its blocks in the order of their positions. All groups of a table cover the same positions; a group with a
window has released those that it no longer needs. A block is in one of three states:

* used: in at least one table; `refs` is the number of tables,
* cached: in no table, but registered in the prefix cache; the least recently used block is reused first,
* free: neither.

A full block is registered under its group and a chained hash: blake2b(key of the previous block, tokens of this block).
So a key identifies the whole prefix. A prefix is found if every group has the blocks that a token after it attends to.
The first block of a sequence follows its `root`: sequences of different adapters have different roots and share no
block. A hit is also compared token by token, and a block leaves the index only when it is allocated again. Tables are
released from their end, so the beginning of a prefix stays cached longer than its end.

This module does not touch device memory: `reserve` returns a copy-on-write as (source, destination), and the engine
copies the block before the plan writes to it.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from bagu.errors import ArgumentError, BaguError
from bagu.serve.kv.groups import LayerGroup, whole

DEAD = 0  # table entry for a released block before the window: a valid index, since a kernel may compute its address
ROOT = b""
ONE_GROUP = whole(1)


class IntegrityError(BaguError, AssertionError):
    """The allocator's or scheduler's state is inconsistent: a bug in this package, not an error of a request."""


class Content(NamedTuple):
    """The tokens of a registered block, its group and its key."""

    group: int
    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


class Prefix(NamedTuple):
    """A cached prefix: `columns` blocks of positions, and for each group its blocks, DEAD where it needs none."""

    columns: int
    blocks: list[list[int]]


class Table:
    """The blocks of one sequence, for each group in the order of its positions. Only `Blocks` changes it."""

    __slots__ = ("blocks", "dead", "registered", "shared")

    def __init__(self, num_groups: int) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.dead = [range(0)] * num_groups  # entries whose blocks were released: DEAD, never read
        self.registered = 0  # number of leading blocks whose keys are in the index (for this block or an equal one)
        self.shared = False  # the last block may be in another table too: check before writing

    @property
    def columns(self) -> int:
        """The number of blocks of each group, with the released ones."""
        return len(self.blocks[0])

    def held(self, group: int) -> list[int]:
        """The blocks of a group that are not released."""
        blocks, dead = self.blocks[group], self.dead[group]
        return blocks[: dead.start] + blocks[dead.stop :] if dead else blocks


def extend_keys(keys: list[bytes], tokens: Sequence[int], block_size: int, count: int, root: bytes = ROOT) -> None:
    """Extend `keys` to the keys of the first `count` blocks of `tokens`; existing keys are kept."""
    begin, width = len(keys), 8 * block_size  # bytes of a block
    data = array("q", tokens[begin * block_size : count * block_size]).tobytes()  # at once: half of the time
    for i in range(begin, count):
        at = (i - begin) * width
        keys.append(_hash(keys[i - 1] if i else root, data[at : at + width]))


def longest_prefix(
    groups: Sequence[LayerGroup], block_size: int, columns: int, missing: Callable[[int, range], int | None]
) -> int:
    """How many of the first `columns` columns are a prefix that every group has the needed blocks of.
    `missing(group, at)` is the first of the columns `at` that a group does not have."""
    before = -1
    while columns != before:  # shorter with every round: the blocks that a window needs depend on the end
        before = columns
        for g, group in enumerate(groups):
            dead = group.dead(columns * block_size, block_size)
            miss = missing(g, range(min(dead.start, columns)))
            if miss is None:
                miss = _last_miss(missing, g, range(dead.stop, columns), group.window is None)
            columns = columns if miss is None else miss
    return columns


def _last_miss(missing: Callable[[int, range], int | None], group: int, at: range, whole: bool) -> int | None:
    """Where a prefix must end because a block of these columns is missing: before the first one if the group needs
    them all; with a window before the last one, since a shorter prefix needs other blocks."""
    if whole:
        return missing(group, at)
    return next((i for i in reversed(at) if missing(group, range(i, i + 1)) is not None), None)


class IndexChanges:
    """The blocks that entered and left the prefix cache since the last `take`, by group and key."""

    def __init__(self) -> None:
        self._changes: dict[tuple[int, bytes], bool] = {}  # True: it entered
        self._cleared = False

    def __bool__(self) -> bool:
        return bool(self._changes) or self._cleared

    def note(self, group: int, key: bytes, *, entered: bool) -> None:
        self._changes[group, key] = entered

    def clear(self) -> None:
        self._changes.clear()
        self._cleared = True

    def take(self) -> tuple[bool, list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """Whether all blocks have left, and after that those that entered and those that left."""
        changes, cleared = self._changes, self._cleared
        self._changes, self._cleared = {}, False
        return cleared, [k for k, entered in changes.items() if entered], [k for k, e in changes.items() if not e]


def _key(parent: bytes, tokens: Iterable[int]) -> bytes:
    return _hash(parent, array("q", tokens).tobytes())


def _hash(parent: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(parent + data, digest_size=16).digest()


class Blocks:
    """The block allocator. `reserve` asserts that enough blocks are available: compare `blocks_needed` with `available`
    first."""

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_cache: bool, groups: Sequence[LayerGroup] = ONE_GROUP
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ArgumentError(
                f"a KV pool of {num_blocks} blocks of {block_size} positions", hint="both are 1 or more"
            )
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self.groups = tuple(groups)
        self.refs = [0] * num_blocks
        self.contents: list[Content | None] = [None] * num_blocks
        self.index: dict[tuple[int, bytes], int] = {}
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack, low numbers first: a light load uses few numbers
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.tables: set[Table] = set()
        self.changes: IndexChanges | None = None  # recorded for a router over several engines (serve/replicas)

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

    def max_blocks(self, positions: int) -> int:
        """The most blocks that a sequence of `positions` positions holds at one time, advancing token by token."""
        return sum(group.max_blocks(positions, self.block_size) for group in self.groups)

    def map(self) -> str:
        """One character per block: u used, c cached, . free."""
        return "".join("u" if r else "." if c is None else "c" for r, c in zip(self.refs, self.contents, strict=True))

    def match(
        self, tokens: Sequence[int], keys: list[bytes] | None = None, *, limit: int | None = None, root: bytes = ROOT
    ) -> Prefix:
        """The longest cached prefix of `tokens[:limit]`, whole blocks only. Changes no reference count.

        `keys` caches the keys of these tokens for the caller, so that a second call does not compute them again.
        """
        B, keys = self.block_size, [] if keys is None else keys
        columns = (len(tokens) if limit is None else limit) // B if self.prefix_cache else 0
        found: list[dict[int, int]] = [{} for _ in self.groups]

        def missing(group: int, at: range) -> int | None:
            """The first of these columns that a group does not have."""
            for i in at:
                if i not in found[group]:
                    extend_keys(keys, tokens, B, i + 1, root)
                    block, parent = self.index.get((group, keys[i])), keys[i - 1] if i else root
                    wanted = (group, keys[i], parent, tuple(tokens[i * B : (i + 1) * B]))
                    if block is None or self.contents[block] != wanted:
                        return i
                    found[group][i] = block
            return None

        columns = longest_prefix(self.groups, B, columns, missing)
        return Prefix(columns, [[blocks.get(i, DEAD) for i in range(columns)] for blocks in found])

    def fits(self, prefix: Prefix, positions: int) -> bool:
        """Whether a sequence of `positions` positions that begins with this prefix has enough available blocks, token
        by token."""
        B, need = self.block_size, 0
        for blocks, group in zip(prefix.blocks, self.groups, strict=True):
            dead = group.dead(prefix.columns * B, B)
            most = min(group.max_blocks(positions, B), -(-positions // B) - len(dead))
            need += most - (prefix.columns - len(dead))
            need += sum(not self.refs[b] for i, b in enumerate(blocks) if i not in dead)
        return need <= self.available

    def new_table(self, prefix: Prefix | None = None) -> Table:
        """A table that begins with the blocks found by `match`."""
        table = Table(len(self.groups))
        if prefix is not None:
            table.registered = prefix.columns
            for g, (blocks, group) in enumerate(zip(prefix.blocks, self.groups, strict=True)):
                dead = group.dead(prefix.columns * self.block_size, self.block_size)
                table.blocks[g] = [DEAD if i in dead else block for i, block in enumerate(blocks)]
                table.dead[g] = dead
                for block in table.held(g):
                    if not self.refs[block]:
                        del self.cached[block]
                    self.refs[block] += 1
        self.tables.add(table)
        return table

    def fork(self, table: Table) -> Table:
        """A second table of the same blocks. The first of the two to write to the last block gets a copy of it."""
        copy = Table(len(self.groups))
        copy.blocks, copy.dead, copy.registered = [b.copy() for b in table.blocks], table.dead.copy(), table.registered
        for g in range(len(self.groups)):
            for block in copy.held(g):
                self.refs[block] += 1
        table.shared = copy.shared = True
        self.tables.add(copy)
        return copy

    def blocks_needed(self, table: Table, start: int, upto: int) -> int:
        """How many blocks `reserve` allocates to make positions `start` to `upto` writable."""
        columns = max(0, -(-upto // self.block_size) - table.columns)
        return columns * len(self.groups) + self._copies(table, start)

    def positions_available(self, table: Table, start: int) -> int:
        """How many positions from `start` on can be reserved with the available blocks."""
        columns = table.columns + (self.available - self._copies(table, start)) // len(self.groups)
        return columns * self.block_size - start

    def reserve(self, table: Table, start: int, upto: int) -> list[tuple[int, int, int]]:
        """Make positions `start` to `upto` of the table writable. Returns the block copies (group, source, destination)
        that the engine must do."""
        copies = []
        at, count = start // self.block_size, -(-upto // self.block_size) - table.columns
        for g in [g for g in range(len(self.groups)) if self._is_copied(table, g, at)]:
            source = table.blocks[g][at]
            table.blocks[g][at] = self._allocate_block()
            self.refs[source] -= 1
            copies.append((g, source, table.blocks[g][at]))
        for blocks in table.blocks:
            # The cache evicts blocks from the end of a prefix. Sorted, they are consecutive and need no gather
            # (Pages.of).
            blocks.extend(sorted(self._allocate_block() for _ in range(count)))
        table.shared = False
        return copies

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
            content = tuple(tokens[i * B : (i + 1) * B])
            for g, blocks in enumerate(table.blocks):
                # otherwise two sequences computed the same block: the index keeps the first
                if (g, keys[i]) not in self.index and i not in table.dead[g]:
                    self.index[g, keys[i]] = blocks[i]
                    if self.changes is not None:
                        self.changes.note(g, keys[i], entered=True)
                    self.contents[blocks[i]] = Content(g, keys[i], keys[i - 1] if i else root, content)
        table.registered = max(table.registered, count)

    def release_outside(self, table: Table, computed: int) -> None:
        """Release the blocks that no token from position `computed` on attends to. Their entries become DEAD."""
        for g, group in enumerate(self.groups):
            dead = group.dead(computed, self.block_size)
            for i in range(max(dead.start, table.dead[g].stop), dead.stop):
                self._release_block(table.blocks[g][i])
                table.blocks[g][i] = DEAD
            if dead.stop > table.dead[g].stop:
                table.dead[g] = dead

    def release(self, table: Table) -> None:
        """Release all blocks and close the table. `table.blocks` is unchanged, for plans that still refer to it."""
        self.tables.remove(table)  # KeyError: a table released twice
        for g in range(len(self.groups)):
            for block in reversed(table.held(g)):
                self._release_block(block)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, e.g. after the weights changed. Release all tables first: an open table keeps
        registering its blocks."""
        self.free.extend(self.cached)
        self.cached.clear()
        self.index.clear()
        if self.changes is not None:
            self.changes.clear()
        self.contents = [None] * self.num_blocks

    def check_integrity(self) -> None:
        """Raise IntegrityError if reference counts, tables, index and contents disagree."""
        held = [0] * self.num_blocks
        for table in self.tables:
            for block in (b for g in range(len(self.groups)) for b in table.held(g)):
                held[block] += 1
        used = {b for b, n in enumerate(held) if n}
        B = self.block_size
        checks = {
            "refs are the numbers of tables": held == self.refs,
            "every block is free, cached or used": sorted([*self.free, *self.cached, *used])
            == list(range(self.num_blocks)),
            "a free block has no content": all(self.contents[b] is None for b in self.free),
            "a cached block has content": all(self.contents[b] is not None for b in self.cached),
            "the index has every registered block": {(c.group, c.key): b for b, c in enumerate(self.contents) if c}
            == self.index,
            "a key is the hash of its tokens": all(
                c.key == _key(c.parent, c.tokens) and len(c.tokens) == B for c in self.contents if c
            ),
            "released entries are DEAD": all(
                b[i] == DEAD for t in self.tables for b, dead in zip(t.blocks, t.dead, strict=True) for i in dead
            ),
            "groups cover the same positions": all(len({len(b) for b in t.blocks}) == 1 for t in self.tables),
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise IntegrityError(f"the KV pool's state is inconsistent; violated: {'; '.join(broken)}")

    def _copies(self, table: Table, start: int) -> int:
        """How many groups must copy the block of position `start`, because it is also in another table."""
        if not table.shared:
            return 0
        at = start // self.block_size
        return sum(self._is_copied(table, g, at) for g in range(len(self.groups)))

    def _is_copied(self, table: Table, group: int, at: int) -> bool:
        return table.shared and at < table.columns and self.refs[table.blocks[group][at]] > 1

    def _allocate_block(self) -> int:
        assert self.available, "blocks_needed() did not count a block"
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            content = self.contents[block]
            assert content is not None
            del self.index[content.group, content.key]
            if self.changes is not None:
                self.changes.note(content.group, content.key, entered=False)
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
