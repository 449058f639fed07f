"""The block allocator against a reference that is a dict of lists, and one test per guarantee."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.errors import ArgumentError
from bagu.serve.kv import blocks as module
from bagu.serve.kv.blocks import DEAD, Blocks, IntegrityError, Table
from bagu.serve.kv.groups import LayerGroup


class Writer:
    """Sequences that write their tokens to a pool through `Blocks`. `lists` is the reference: the tokens by table."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.pool: list[list[int]] = [[-1] * blocks.block_size for _ in range(blocks.num_blocks)]
        self.lists: dict[Table, list[int]] = {}

    def begin(self, tokens: list[int]) -> Table | None:
        """A sequence of `tokens` on what the cache has of them; None where it does not fit."""
        prefix = self.blocks.match(tokens)
        if not self.blocks.fits(prefix, len(tokens)):
            return None
        table = self.blocks.new_table(prefix)
        self.lists[table] = tokens[: prefix.columns * self.blocks.block_size]
        for token in tokens[len(self.lists[table]) :]:
            assert self.write(table, [token]), "`fits` promised room, token by token"
            self.blocks.release_outside(table, len(self.lists[table]))
        return table

    def write(self, table: Table, tokens: list[int]) -> bool:
        start = len(self.lists[table])
        upto = start + len(tokens)
        if self.blocks.blocks_needed(table, start, upto) > self.blocks.available:
            assert self.blocks.positions_available(table, start) < len(tokens)
            return False
        for _, source, destination in self.blocks.reserve(table, start, upto):
            self.pool[destination] = list(self.pool[source])
        self.lists[table] = self.lists[table] + tokens
        for p in range(start, upto):
            for blocks in table.blocks:
                self.pool[blocks[p // self.blocks.block_size]][p % self.blocks.block_size] = self.lists[table][p]
        self.blocks.register(table, self.lists[table], [], upto)
        return True

    def fork(self, table: Table) -> Table:
        copy = self.blocks.fork(table)
        self.lists[copy] = list(self.lists[table])
        return copy

    def release(self, table: Table) -> None:
        self.blocks.release(table)
        del self.lists[table]

    def check(self) -> None:
        self.blocks.check_integrity()
        B = self.blocks.block_size
        for table, tokens in self.lists.items():
            for blocks, dead in zip(table.blocks, table.dead, strict=True):
                kept = [p for p in range(len(tokens)) if p // B not in dead]
                assert [self.pool[blocks[p // B]][p % B] for p in kept] == [tokens[p] for p in kept]
        for content, stored in zip(self.blocks.contents, self.pool, strict=True):
            assert content is None or list(content.tokens) == stored


actions = st.tuples(
    st.sampled_from(["begin", "write", "fork", "release", "drop", "forget"]), st.integers(0, 5), st.integers(1, 9)
)


@settings(max_examples=150, derandomize=True)
@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 4),
    prefix_cache=st.booleans(),
    kinds=st.sampled_from([[()], [(3,)], [(), (3,)], [(2, 3), (), (5,)]]),
    todo=st.lists(actions, max_size=40),
)
def test_tables_read_what_was_written_after_any_operations(
    num_blocks: int, block_size: int, prefix_cache: bool, kinds: list[tuple[int, ...]], todo: list[tuple[str, int, int]]
) -> None:
    groups = [LayerGroup((i,), *kind) for i, kind in enumerate(kinds)]
    blocks = Blocks(num_blocks, block_size, prefix_cache=prefix_cache, groups=groups)
    writer = Writer(blocks)
    for action, which, length in todo:
        tables = list(writer.lists)
        if action == "begin":
            writer.begin([1] * which + [2] * length)
        elif action == "forget":
            blocks.reset_prefix_cache()
        elif tables:
            table = tables[which % len(tables)]
            if action == "write":
                writer.write(table, [which] * length)
            elif action == "fork":
                writer.fork(table)
            elif action == "release":
                writer.release(table)
            else:
                blocks.release_outside(table, len(writer.lists[table]))
        writer.check()
        assert len(blocks.free) + blocks.cached_count + blocks.used_count == num_blocks == len(blocks.map())
        assert prefix_cache or blocks.cached_count == 0
    for table in list(writer.lists):
        writer.release(table)
    writer.check()
    assert blocks.used_count == 0 and blocks.available == num_blocks


def pool(num_blocks: int = 8, block_size: int = 2) -> Writer:
    return Writer(Blocks(num_blocks, block_size, prefix_cache=True))


def begun(writer: Writer, tokens: list[int]) -> Table:
    table = writer.begin(tokens)
    assert table is not None
    return table


def test_a_prefix_matches_by_whole_blocks_and_the_blocks_before() -> None:
    writer = pool()
    table = begun(writer, [1, 2, 3, 4, 5])
    assert writer.blocks.match([1, 2, 3, 4, 5, 6]).blocks == [table.blocks[0][:2]], "the third block is not full"
    assert writer.blocks.match([1, 2, 3, 4], limit=3).blocks == [table.blocks[0][:1]]
    assert writer.blocks.match([9, 9, 3, 4]).columns == 0, "the same tokens after other ones are another prefix"
    writer.release(table)
    assert writer.blocks.cached_count == 2 and writer.blocks.map().count("c") == 2
    assert begun(writer, [1, 2, 3, 4, 7]).blocks[0][:2] == table.blocks[0][:2]


def test_the_least_recently_used_prefix_is_evicted_first_from_its_end() -> None:
    writer = pool(num_blocks=4)
    for first in (1, 5):
        writer.release(begun(writer, [first, first, first + 1, first + 1]))
    writer.release(begun(writer, [1, 1, 2, 2]))  # used again: now the other prefix is the least recently used
    begun(writer, [9])
    assert writer.blocks.match([5, 5, 6, 6]).columns == 1, "its last block was taken, its first can still be found"
    assert writer.blocks.match([1, 1, 2, 2]).columns == 2


def test_colliding_keys_are_distinguished_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_key", lambda parent, tokens: b"always the same")
    writer = pool()
    begun(writer, [1, 2])
    assert writer.blocks.match([3, 4]).columns == 0
    assert writer.blocks.match([1, 2]).columns == 1


def test_the_same_prefix_computed_twice_is_registered_once() -> None:
    writer = pool()
    first, second = (writer.blocks.new_table() for _ in range(2))
    for table in (first, second):
        writer.lists[table] = []
        writer.write(table, [1, 2, 3])
    assert writer.blocks.match([1, 2]).blocks == [first.blocks[0][:1]]
    writer.release(second)
    assert writer.blocks.cached_count == 0, "the copy is free at once"
    writer.check()


def test_a_fork_copies_only_when_it_writes_into_a_shared_block() -> None:
    writer = pool()
    table = begun(writer, [1, 2, 3])
    twin = writer.fork(table)
    assert writer.blocks.used_count == 2 and writer.blocks.blocks_needed(twin, 3, 4) == 1
    assert writer.write(twin, [7]) and writer.write(table, [8])
    (first, mine), (same, own) = table.blocks[0], twin.blocks[0]
    assert writer.blocks.used_count == 3 and first == same and mine != own
    full = begun(writer, [5, 6])
    other = writer.fork(full)
    assert writer.blocks.reserve(other, 2, 3) == [], "a full block is only read"
    writer.lists[other].append(-1)  # position 2 is reserved but not written
    writer.blocks.check_integrity()


def test_blocks_before_the_window_are_released_and_marked() -> None:
    writer = Writer(Blocks(8, 2, prefix_cache=True, groups=[LayerGroup((0,), 2)]))
    table = begun(writer, [1, 2, 3, 4, 5])
    assert table.blocks[0][:2] == [DEAD, DEAD] and writer.blocks.used_count == 1 and writer.blocks.cached_count == 2
    writer.check()
    writer.release(table)
    assert writer.blocks.used_count == 0


def test_a_table_is_released_once() -> None:
    writer = pool()
    table = begun(writer, [1, 2, 3])
    writer.blocks.release(table)
    with pytest.raises(KeyError):
        writer.blocks.release(table)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("refs are", lambda b, t: b.refs.__setitem__(t.blocks[0][0], 2)),
        ("every block is free", lambda b, t: b.free.append(t.blocks[0][0])),
        ("every block is free", lambda b, t: b.free.pop()),
        ("the index has", lambda b, t: b.index.clear()),
        (
            "a key is the hash of its tokens",
            lambda b, t: b.contents.__setitem__(0, b.contents[0]._replace(tokens=(9, 9))),
        ),
        ("a free block has no content", lambda b, t: b.contents.__setitem__(b.free[0], b.contents[0])),
        ("entries are DEAD", lambda b, t: t.dead.__setitem__(0, range(1))),
    ],
)
def test_check_integrity_finds_a_planted_fault(name: str, fault: Callable[[Blocks, Table], object]) -> None:
    writer = pool()
    begun(writer, [7, 8])
    table = begun(writer, [1, 2, 3])
    writer.blocks.check_integrity()
    fault(writer.blocks, table)
    with pytest.raises(IntegrityError, match=name):
        writer.blocks.check_integrity()


def test_a_pool_without_blocks_or_positions_is_refused() -> None:
    for num_blocks, block_size in ((0, 16), (16, 0)):
        with pytest.raises(ArgumentError, match=f"{num_blocks} blocks of {block_size}"):
            Blocks(num_blocks, block_size, prefix_cache=True)
