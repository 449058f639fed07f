"""Ring all-reduce with point-to-point messages."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""Ring all-reduce: the sum of a tensor over all ranks, on every rank.

all_reduce(x, rank, world, send, recv) -> y
    x       fp32 [S], this rank's values; it stays unchanged
    send(to, tensor)   sends a tensor to another rank, and returns at once
    recv(source)       waits for the next tensor of that rank, and returns it
    y       [S], the sum over all ranks

Each rank sends at most 2 (N - 1) / N of the tensor's bytes (and 1 KB): the tensor travels in N chunks, to the next rank
only. S may be smaller than N, or no multiple of it; N may be 1.
"""

import torch


def all_reduce(x, rank, world, send, recv):
    raise NotImplementedError
'''
SOLUTION = """import torch


def all_reduce(x, rank, world, send, recv):
    chunks = [c.clone() for c in x.tensor_split(world)]
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(world - 1):  # reduce-scatter
        send(right, chunks[(rank - step) % world])
        at = (rank - step - 1) % world
        chunks[at] = chunks[at] + recv(left)
    for step in range(world - 1):  # all-gather
        send(right, chunks[(rank + 1 - step) % world])
        chunks[(rank - step) % world] = recv(left)
    return torch.cat(chunks)
"""

DRILL = Drill(
    name="ring_all_reduce",
    topic="parallel",
    difficulty=4,
    title=Text("ring all-reduce", "环形 all-reduce"),
    task=Text(STUB.split('"""')[1], "用点对点消息写环形 all-reduce：先 reduce-scatter，再 all-gather；每个 rank 发送不超过 2(N-1)/N·S 字节。\n" + STUB.split('"""')[1]),
    stubs={"torch": STUB},
    solutions={"torch": SOLUTION},
    oracle="ring",
    functions=("all_reduce",),
    modules=("torch.distributed",),
    hints=(
        Text("Cut the tensor into as many chunks as there are ranks. What does one rank have to end up with?", "把张量切成 N 块；每个 rank 最后各完成哪一块？"),
        Text("N - 1 rounds: send one chunk to the right, add the one from the left to your own; then N - 1 rounds that only copy.", "N-1 轮：向右发一块，把左边来的加到自己的块上；再来 N-1 轮只复制。"),
        Text("In round s of the first half rank r sends chunk r - s and adds to chunk r - s - 1; in the second it sends r + 1 - s.", "前半第 s 轮：rank r 发送第 r-s 块，加到第 r-s-1 块；后半发送第 r+1-s 块。"),
    ),
    questions=(
        Question("Why is the volume almost independent of N?", "为什么通信量几乎与 N 无关？", "bagu lab run ring_all_reduce"),
        Question("When is a tree better?", "什么时候树形更好？", "bagu lab list --theme parallel"),
    ),
    planted=(
        Planted("torch", "chunks[at] + recv(left)", "recv(left)", "formula"),
        Planted("torch", "for step in range(world - 1):  # reduce-scatter", "for step in range(world - 2):  # reduce-scatter", "off_by_one|deadlock|edge"),
        Planted("torch", "for step in range(world - 1):  # all-gather", "for step in range(world - 2):  # all-gather", "off_by_one|edge"),
        Planted("torch", "right, left = (rank + 1) % world, (rank - 1) % world", "right, left = (rank + 1) % world, (rank + 1) % world", "deadlock|order"),
        Planted("torch", "        send(right, chunks[(rank - step) % world])\n        at = (rank - step - 1) % world\n        chunks[at] = chunks[at] + recv(left)",
                "        at = (rank - step - 1) % world\n        chunks[at] = chunks[at] + recv(left)\n        send(right, chunks[(rank - step) % world])", "deadlock"),
        Planted("torch", "chunks = [c.clone() for c in x.tensor_split(world)]", "chunks = [c.clone() for c in x.chunk(world)]", "edge|raises"),
        Planted("torch", "chunks = [c.clone() for c in x.tensor_split(world)]", "chunks = [c.clone() for c in x.view(world, -1)]", "edge|raises"),
        Planted("torch", "    return torch.cat(chunks)", "    return torch.cat(chunks) / world", "factor"),
        Planted("torch", "send(right, chunks[(rank + 1 - step) % world])", "send(right, chunks[(rank - step) % world])", "formula|order"),
        Planted("torch", "    chunks = [c.clone() for c in x.tensor_split(world)]\n", "    for to in range(world):\n        if to != rank:\n            send(to, x)\n    return x + sum(recv(s) for s in range(world) if s != rank)\n    chunks = []\n", "volume"),
        Planted("torch", "    return torch.cat(chunks)", "    return torch.cat(chunks[::-1])", "order|formula"),
        Planted("torch", "chunks[at] = chunks[at] + recv(left)", "chunks[at] = (chunks[at] + recv(left)).half().float()", "precision"),
        Planted("torch", "    return torch.cat(chunks)", "    x.copy_(torch.cat(chunks))\n    return x.clone()", "changes_input"),
    ),
)  # fmt: skip
