"""Ring all-reduce: bytes and time against ranks and size, beside a tree and the library.

    ring      2 (N - 1) rounds of S / N bytes      a rank sends 2 (N - 1) / N S      bagu/parallel/ring.py
    tree      2 ceil(log2 N) rounds of S bytes     rank 0 sends ceil(log2 N) S       bagu/parallel/ring.py
    library   torch.distributed on Gloo

Both are written out over point-to-point messages, and the bytes are those of the messages. Ranks are processes of this
machine: a message is a copy, and where ranks share cores a round also waits for the other ranks' turns.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
import torch.distributed as dist

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, numbers_in, where
from bagu.lab.plot import Line, Panel
from bagu.parallel.collectives import all_reduce
from bagu.parallel.local_ranks import on_ranks
from bagu.parallel.mesh import MeshConfig, open_mesh
from bagu.parallel.ring import ring_all_reduce, tree_all_reduce

WAYS = ("ring", "tree", "library")


def run(setting: Setting) -> Iterator[Row]:
    counts = (2, 4) if setting.quick else (2, 3, 4, 8)
    sizes = (1 << 10, 1 << 18) if setting.quick else (1 << 10, 1 << 14, 1 << 18, 1 << 22)  # numbers
    for ranks in setting.track(counts):
        found = on_ranks(ranks, measured, ranks, sizes, 3 if setting.quick else 15)
        for way, size in product(WAYS, sizes):
            seconds = [result[way, size][0] for result in found]  # of each rank, a list of repeats
            yield {
                "way": way,
                "ranks": ranks,
                "size_bytes": 4 * size,
                "time_us": 1e6 * statistics.median(max(each) for each in zip(*seconds, strict=True)),
                "most_sent_bytes": max(result[way, size][1] for result in found),
                "formula_bytes": formula(way, 4 * size, ranks),
            }


def formula(way: str, size: int, ranks: int) -> float:
    """The bytes that the busiest rank sends."""
    return size * (ranks - 1).bit_length() if way == "tree" else 2 * (ranks - 1) / ranks * size


def measured(ranks: int, sizes: Sequence[int], repeats: int) -> dict[tuple[str, int], tuple[list[float], int]]:
    """On each rank: the seconds of each repeat, and the bytes that this rank sends, by way and size."""
    mesh = open_mesh(MeshConfig(dp=ranks), torch.device("cpu"))
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "ring": lambda x: ring_all_reduce(mesh, x, "dp"),
        "tree": lambda x: tree_all_reduce(mesh, x, "dp"),
        "library": lambda x: all_reduce(mesh, x, "dp"),
    }
    found: dict[tuple[str, int], tuple[list[float], int]] = {}
    for size in sizes:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        sent = dict.fromkeys(WAYS, 0)
        for repeat in range(1 + repeats):  # in turn, so that other load affects all; the first connects the ranks
            for way, call in calls.items():
                x, before = torch.full((size,), float(mesh.rank)), mesh.traffic.sent
                dist.barrier()
                began = time.perf_counter()
                call(x)
                took = time.perf_counter() - began
                assert float(x[0]) == ranks * (ranks - 1) / 2, "the sum is wrong"
                sent[way] = mesh.traffic.sent - before
                if repeat:
                    seconds[way].append(took)
        found |= {(way, size): (seconds[way], sent[way]) for way in WAYS}
    return found


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the ring is faster than the tree at every size and number of ranks."""
    times = {(r["way"], number(r, "ranks"), number(r, "size_bytes")): number(r, "time_us") for r in rows}
    points = sorted({key[1:] for key in times})
    ratio = {p: times["tree", *p] / times["ring", *p] for p in points}
    wins = [p for p in points if ratio[p] > 1]
    kind: Kind = "held" if len(wins) == len(points) else "holds only where" if wins else "did not hold"
    largest = max(size for _, size in points)
    at_largest = [(f"{p[0]:g}", f"×{ratio[p]:.2f}") for p in points if p[1] == largest]
    by_ranks = ", ".join(f"{time} on {ranks}" for ranks, time in at_largest)
    by_ranks_zh = "，".join(f"{ranks} 个进程 {time}" for ranks, time in at_largest)
    exact = sum(abs(number(r, "most_sent_bytes") / number(r, "formula_bytes") - 1) <= 0.01 for r in rows)
    en = f"The ring is faster than the tree at {len(wins)} of {len(points)} points"
    zh = f"环在 {len(points)} 个点中的 {len(wins)} 个快于树"
    if wins and len(wins) < len(points):
        best = max(wins, key=lambda p: ratio[p])
        en += f", by most (×{ratio[best]:.2f}) on {best[0]:g} ranks with {best[1] / 1e3:,.0f} kB"
        zh += f"，最多快到 ×{ratio[best]:.2f}（{best[0]:g} 个进程，{best[1] / 1e3:,.0f} kB）"
    return Verdict(
        kind=kind,
        sentence_en=f"{en}. At {largest / 1e6:,.1f} MB the tree takes {by_ranks} ranks of the ring's time. The busiest "
        f"rank sends the formula's bytes within 1 % in {exact} of {len(rows)} rows.",
        sentence_zh=f"{zh}。{largest / 1e6:,.1f} MB 时树的用时与环之比：{by_ranks_zh}。{len(rows)} 行中 {exact} "
        "行最忙进程的字节数与公式相差不超过 1 %。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    ranks, size = numbers_in(rows, "ranks")[-1], numbers_in(rows, "size_bytes")[-1]
    times, sent = [], []
    for way in WAYS:
        times.append(Line.of(where(rows, way=way, ranks=ranks), "size_bytes", "time_us", way))
        large = where(rows, way=way, size_bytes=size)
        sent.append(Line.of(large, "ranks", lambda r: number(r, "most_sent_bytes") / size, way))
    return [
        Panel(times, f"{ranks:g} ranks", "size, bytes", "time, µs", "log", "log"),
        Panel(sent, "Bytes sent by the busiest rank", "ranks", "times the size", legend="none"),
    ]


LAB = Claim(
    title_en="Ring all-reduce",
    title_zh="环形 all-reduce",
    claim_en="A ring all-reduce is faster than a tree, because no rank sends more than twice the data.",
    claim_zh="环形 all-reduce 比树形快，因为没有进程发送超过两倍的数据。",
    regime="fp32 sums on Gloo between processes of one machine, over loopback connections.",
    varies="Algorithm (ring, tree, library), number of ranks, size of the tensor.",
    measures="Time of the slowest rank, median of repeats in turn; bytes of the messages of the busiest rank, and the "
    "formula.",
    evidence="timing",
)
