"""The truth of the block allocator: random operations against a model that recomputes everything from the sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from bagu.lab.drill.answers import Reply
from bagu.lab.drill.core import Drill, Text
from bagu.lab.drill.trial import Trial, Wrong


class Model:
    """The allocator, by tables alone: counts are recounted at every question."""

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.keys: dict[int, tuple[int, ...]] = {}

    def users(self, block: int) -> int:
        return sum(t.count(block) for t in self.tables.values())

    def free_blocks(self) -> list[int]:
        used = {b for t in self.tables.values() for b in t}
        self.keys = {b: k for b, k in self.keys.items() if b in used}
        return [b for b in range(self.blocks) if b not in used]

    def run(self, step: list[Any]) -> Any:
        method, *args = step
        try:
            return getattr(self, method)(*args)
        except (KeyError, ValueError, MemoryError) as error:
            return {"raised": type(error).__name__}

    def new(self, seq: str, tokens: list[int]) -> int:
        if seq in self.tables:
            raise ValueError
        free, shared = self.free_blocks(), list[int]()
        for end in range(self.size, len(tokens) + 1, self.size):
            block = next((b for b, k in self.keys.items() if k == tuple(tokens[:end])), None)
            if block is None:
                break
            shared.append(block)
        need = -(-len(tokens) // self.size) - len(shared)
        if need > len(free):
            raise MemoryError
        self.tables[seq], self.tokens[seq] = shared + free[:need], list(tokens)
        for i in range(len(tokens) // self.size):
            self._full(seq, i)
        return len(shared)

    def append(self, seq: str, token: int) -> tuple[int, int, int | None]:
        table, free, slot, source = self.tables[seq], self.free_blocks(), len(self.tokens[seq]) % self.size, None
        shared = slot and self.users(table[-1]) > 1
        if (slot == 0 or shared) and not free:
            raise MemoryError
        if slot == 0:
            table.append(free[0])
        elif shared:
            source, table[-1] = table[-1], free[0]
        self.tokens[seq].append(token)
        if slot == self.size - 1:
            self._full(seq, len(table) - 1)
        return table[-1], slot, source

    def fork(self, seq: str, child: str) -> None:
        table = self.tables[seq]
        if child in self.tables:
            raise ValueError
        self.tables[child], self.tokens[child] = list(table), list(self.tokens[seq])

    def free(self, seq: str) -> None:
        del self.tables[seq], self.tokens[seq]

    def table(self, seq: str) -> list[int]:
        return list(self.tables[seq])

    def available(self) -> int:
        return len(self.free_blocks())

    def _full(self, seq: str, index: int) -> None:
        block, key = self.tables[seq][index], tuple(self.tokens[seq][: (index + 1) * self.size])
        if key not in self.keys.values() and block not in self.keys:
            self.keys[block] = key


def trials(drill: Drill, level: str, seed: int) -> Iterator[Trial]:
    a, b = list(range(10)), [*range(8), 90, 91]
    written: list[tuple[str, Text, str, bool, list[list[Any]]]] = [
        ("new", Text("blocks of a sequence", "一个序列的块"), "off_by_one", False, [["new", "a", a], ["table", "a"], ["available"], ["new", "z", a[:8]], ["available"]]),
        ("append", Text("a token goes to the next slot, or to a new block", "词元进入下一个槽或新块"), "off_by_one", False, [["new", "a", a[:3]], *[["append", "a", i] for i in range(4)], ["table", "a"]]),
        ("free", Text("freed blocks come back, the lowest first", "释放的块先用编号最小的"), "order", False, [["new", "a", a[:8]], ["new", "b", a[1:9]], ["free", "a"], ["available"], ["new", "c", a[2:5]], ["table", "c"]]),
        ("return", Text("blocks are taken lowest first, in whatever order they came back", "无论归还顺序，先用编号最小的"), "order", False, [["new", "a", [1]], ["new", "b", [2]], ["new", "c", [3]], ["free", "c"], ["free", "a"], ["new", "d", [4]], ["table", "d"]]),
        ("fork", Text("a fork shares, and an append copies", "分叉共享，追加时复制"), "share", False, [["new", "a", a[:6]], ["fork", "a", "b"], ["available"], ["append", "b", 1], ["append", "a", 2], ["table", "a"], ["table", "b"], ["free", "a"], ["table", "b"], ["available"], ["free", "b"], ["available"]]),
        ("prefix", Text("equal prefixes share full blocks", "相同前缀共享整块"), "share", False, [["new", "a", a], ["new", "b", b], ["table", "b"], ["available"], ["free", "a"], ["new", "c", b], ["available"]]),
        ("middle", Text("the same tokens after another prefix are another block", "前缀不同则块不同"), "share", True, [["new", "a", [1, 1, 1, 1, 5, 6, 7, 8]], ["new", "b", [5, 6, 7, 8]], ["table", "b"]]),
        ("grown", Text("a block that became full by appends is shared too", "追加填满的块也可共享"), "ignored", True, [["new", "a", [1, 2, 3]], ["append", "a", 4], ["new", "b", [1, 2, 3, 4, 5]], ["table", "b"]]),
        ("forgotten", Text("a freed block is not shared any more", "释放后的块不再共享"), "stale", True, [["new", "a", a[:4]], ["free", "a"], ["new", "b", a[4:8]], ["new", "c", a[:4]], ["table", "c"]]),
        ("full", Text("out of blocks: an error, and nothing has changed", "块不足：报错且状态不变"), "leak", True, [["new", "a", [*a, *a]], ["new", "b", [*a[:8], *range(20)]], ["available"], ["free", "a"], ["available"], ["free", "b"]]),
        ("twice", Text("freed twice, unknown, taken names", "重复释放、未知、重名"), "edge", True, [["new", "a", a], ["free", "a"], ["free", "a"], ["append", "a", 1], ["new", "b", a], ["new", "b", a], ["fork", "b", "b"], ["available"]]),
    ]  # fmt: skip
    for name, why, cause, edge, steps in written:
        yield _trial(name, why, 8, 4, steps, cause, edge)
    rng = random.Random(seed)
    why = Text("random operations against a model", "随机操作与模型对照")
    yield _trial("random", why, 24, 4, _random(rng, 2000, 24, 4), "", False)
    yield _trial("tight", why, 6, 2, _random(rng, 2000, 6, 2), "leak", True)


def _random(rng: random.Random, count: int, blocks: int, size: int) -> list[list[Any]]:
    model, steps, names = Model(blocks, size), list[list[Any]](), [f"s{i}" for i in range(8)]
    while len(steps) < count:
        kind = rng.choices(("new", "append", "fork", "free", "table", "available"), (2, 8, 2, 3, 1, 1))[0]
        seq = rng.choice(names)
        step: list[Any] = [kind] if kind == "available" else [kind, seq]
        if kind == "new":
            step.append([rng.randint(0, 1) for _ in range(rng.randint(1, 3 * size))])
        step += [rng.randint(0, 1)] if kind == "append" else [rng.choice(names)] if kind == "fork" else []
        if kind != "new" and kind != "available" and seq not in model.tables and rng.random() < 0.9:
            continue
        model.run(step)
        steps.append(step)
    return steps


def _trial(name: str, why: Text, blocks: int, size: int, steps: list[list[Any]], cause: str, edge: bool) -> Trial:
    def judge(reply: Reply) -> None:
        model = Model(blocks, size)
        for i, (step, got) in enumerate(zip(steps, reply.value, strict=True)):
            want = model.run(step)
            got = tuple(got) if isinstance(got, list) and isinstance(want, tuple) else got
            if got != want:
                shown = f"{step[0]}({', '.join(map(repr, step[1:]))})"
                found = cause or {"append": "share", "available": "leak"}.get(step[0], "share")
                raise Wrong(f"case {name}: operation {i}, {shown}, gave {got!r}, and should give {want!r}", cause=found)

    return Trial(
        name=name,
        why=why,
        edge=edge,
        judge=judge,
        cause=cause if edge else "",
        ask=lambda answer: answer.call("BlockAllocator", [blocks, size], kind="script", steps=steps, seconds=20),
    )
