"""A paged block allocator."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""The block allocator of a paged KV cache: allocate, append, fork, free, share prefixes.

class BlockAllocator:
    BlockAllocator(num_blocks, block_size)
    new(seq, tokens) -> int      a sequence of these tokens (a list of ints, at least one). A full block whose tokens and all
                                 tokens before it equal those of a live full block is shared with it. Returns how many
                                 blocks were shared.
    append(seq, token) -> (block, slot, copied_from)   where the token goes. If its block is shared, the sequence first gets
                                 a block of its own; copied_from is the shared block, else None. A block that becomes full
                                 this way may be shared by a later `new`.
    fork(seq, child)             the child shares all blocks of seq
    free(seq)                    its blocks return when nobody uses them
    table(seq) -> list of blocks
    available() -> int           free blocks

New blocks are the free ones with the lowest numbers. Errors change nothing: MemoryError if there are too few blocks,
KeyError for a sequence that is not there (also one that was freed), ValueError for a name that is taken.
"""


class BlockAllocator:
    def __init__(self, num_blocks, block_size):
        raise NotImplementedError
'''
SOLUTION = """import heapq


class BlockAllocator:
    def __init__(self, num_blocks, block_size):
        self.size = block_size
        self.unused = list(range(num_blocks))
        self.users = [0] * num_blocks
        self.tables, self.tokens = {}, {}
        self.known, self.key_of = {}, {}

    def new(self, seq, tokens):
        if seq in self.tables:
            raise ValueError(seq)
        shared = []
        for end in range(self.size, len(tokens) + 1, self.size):
            block = self.known.get(tuple(tokens[:end]))
            if block is None:
                break
            shared.append(block)
        need = -(-len(tokens) // self.size) - len(shared)
        if need > len(self.unused):
            raise MemoryError(need)
        for block in shared:
            self.users[block] += 1
        self.tables[seq] = shared + [self.take() for _ in range(need)]
        self.tokens[seq] = list(tokens)
        for i in range(len(tokens) // self.size):
            self.remember(seq, i)
        return len(shared)

    def append(self, seq, token):
        table, tokens = self.tables[seq], self.tokens[seq]
        slot, source = len(tokens) % self.size, None
        if slot == 0:
            if not self.unused:
                raise MemoryError(1)
            table.append(self.take())
        elif self.users[table[-1]] > 1:
            if not self.unused:
                raise MemoryError(1)
            source = table[-1]
            self.users[source] -= 1
            table[-1] = self.take()
        tokens.append(token)
        if slot == self.size - 1:
            self.remember(seq, len(table) - 1)
        return table[-1], slot, source

    def fork(self, seq, child):
        table = self.tables[seq]
        if child in self.tables:
            raise ValueError(child)
        for block in table:
            self.users[block] += 1
        self.tables[child], self.tokens[child] = list(table), list(self.tokens[seq])

    def free(self, seq):
        for block in self.tables.pop(seq):
            self.users[block] -= 1
            if self.users[block] == 0:
                heapq.heappush(self.unused, block)
                key = self.key_of.pop(block, None)
                if key is not None:
                    del self.known[key]
        del self.tokens[seq]

    def table(self, seq):
        return list(self.tables[seq])

    def available(self):
        return len(self.unused)

    def take(self):
        block = heapq.heappop(self.unused)
        self.users[block] = 1
        return block

    def remember(self, seq, index):
        block, key = self.tables[seq][index], tuple(self.tokens[seq][: (index + 1) * self.size])
        if key not in self.known and block not in self.key_of:
            self.known[key] = block
            self.key_of[block] = key
"""

DRILL = Drill(
    name="block_allocator",
    topic="serving",
    difficulty=4,
    title=Text("the block allocator of a paged cache", "分页缓存的块分配器"),
    task=Text(STUB.split('"""')[1], "写出分页 KV cache 的块分配器：分配、追加、分叉（写时复制）、释放、前缀共享；出错时状态不变。\n" + STUB.split('"""')[1]),
    stubs={"python": STUB},
    solutions={"python": SOLUTION},
    oracle="allocator",
    functions=("BlockAllocator",),
    hints=(
        Text("What has to be counted for each block?", "每个块要记录什么计数？"),
        Text("A block with two users is read-only: an append into it copies first.", "两个使用者的块是只读的：追加前先复制。"),
        Text("Check for room before anything changes; a block is known by all tokens up to its end, and forgotten when its count is 0.", "改变任何状态之前先检查空间；块由到其末尾的全部词元标识，计数归零时遗忘。"),
    ),
    questions=(
        Question("What does a block of 16 tokens waste on average?", "16 个词元一块，平均浪费多少？", "bagu lab list --theme serve"),
        Question("Why is the key of a block the whole prefix?", "为什么块的键是整个前缀？", "bagu serve --help"),
    ),
    planted=(
        Planted("python", "elif self.users[table[-1]] > 1:", "elif False:", "share"),
        Planted("python", "            self.users[source] -= 1\n", "", "leak|share"),
        Planted("python", "            if self.users[block] == 0:\n                heapq", "            if True:\n                heapq", "share|leak|raises"),
        Planted("python", "        for block in table:\n            self.users[block] += 1\n        self.tables[child]", "        self.tables[child]", "share|leak|raises"),
        Planted("python", "list(table), list(self.tokens[seq])", "table, list(self.tokens[seq])", "share"),
        Planted("python", "tuple(tokens[:end])", "tuple(tokens[end - self.size : end])", "share|formula|off_by_one"),
        Planted("python", "                if key is not None:\n                    del self.known[key]\n", "", "stale|share|leak|raises"),
        Planted("python", "-(-len(tokens) // self.size)", "len(tokens) // self.size + 1", "off_by_one|leak"),
        Planted("python", "        if need > len(self.unused):\n            raise MemoryError(need)\n", "", "edge|raises|leak"),
        Planted("python", "        if need > len(self.unused):\n            raise MemoryError(need)\n        for block in shared:\n            self.users[block] += 1\n", "        for block in shared:\n            self.users[block] += 1\n        if need > len(self.unused):\n            raise MemoryError(need)\n", "leak|edge"),
        Planted("python", "        if child in self.tables:\n            raise ValueError(child)\n", "", "edge|leak"),
        Planted("python", "        for block in self.tables.pop(seq):", "        if seq not in self.tables:\n            return\n        for block in self.tables.pop(seq):", "edge"),
        Planted("python", "if slot == self.size - 1:", "if False:", "ignored|share|formula"),
        Planted("python", "heapq.heappush(self.unused, block)", "self.unused.append(block)", "order"),
        Planted("python", "slot, source = len(tokens) % self.size, None", "slot, source = (len(tokens) - 1) % self.size, None", "off_by_one"),
    ),
)  # fmt: skip
