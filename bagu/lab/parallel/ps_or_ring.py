"""Parameter server or ring: the bytes of the busiest link in one step, counted message by message."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from bagu.lab.core import Claim, Row, Setting, Verdict, names_in, number, numbers_in, where
from bagu.lab.plot import Line, Panel

SIZE = 1 << 20  # bytes of the gradients
FLAT = 1.2  # growth from the fewest to the most workers below which a way has no bottleneck


def ring(workers: int) -> Counter[int]:
    """Bytes that leave each worker: 2 (N − 1) rounds, in each of which all send one of N pieces."""
    piece = SIZE / workers
    sent: Counter[int] = Counter()
    for _round, worker in product(range(2 * (workers - 1)), range(workers)):
        sent[worker] += piece  # type: ignore[assignment]
    return sent


def server(workers: int, servers: int) -> Counter[int]:
    """Bytes that leave each machine: workers push gradients to every server's share, servers answer with weights."""
    sent: Counter[int] = Counter()
    for worker, place in product(range(workers), range(servers)):
        sent[worker] += SIZE / servers  # type: ignore[assignment]
        sent[-1 - place] += SIZE / servers  # type: ignore[assignment]
    return sent


def run(setting: Setting) -> Iterator[Row]:
    for workers in setting.track((2, 8) if setting.quick else (2, 4, 8, 16, 32, 64)):
        ways = {"ring": ring(workers), "1 server": server(workers, 1), "N servers": server(workers, workers)}
        for way, sent in ways.items():
            yield {"way": way, "workers": workers, "busiest_share": max(sent.values()) / SIZE}


def growth(rows: Sequence[Row], way: str) -> float:
    own = where(rows, way=way)
    return number(own[-1], "busiest_share") / number(own[0], "busiest_share")


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if a server's link grows with the workers, however many servers, and the ring's does not."""
    grown = {way: growth(rows, way) for way in names_in(rows, "way")}
    alone = grown["1 server"] > FLAT and grown["ring"] <= 2 * FLAT
    return Verdict.say(
        "did not hold" if not alone else "holds only where" if grown["N servers"] <= FLAT else "held",
        "From {low:.0f} to {high:.0f} workers the busiest link grows ×{one:.1f} with one server, ×{ring:.2f} in "
        "a ring, and "
        "×{many:.2f} with as many servers as workers: the bottleneck is the one server, not the design.",
        "从 {low:.0f} 个到 {high:.0f} 个工作进程，最忙链路的字节："
        "单个服务器 ×{one:.1f}，环 ×{ring:.2f}，服务器与进程一样多时 ×{many:.2f}："
        "瓶颈是只有一个服务器，而不是这种架构。",
        low=min(numbers_in(rows, "workers")),
        high=max(numbers_in(rows, "workers")),
        one=grown["1 server"],
        ring=grown["ring"],
        many=grown["N servers"],
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = [Line.of(where(rows, way=way), "workers", "busiest_share", way) for way in names_in(rows, "way")]
    return [Panel(lines, "Bytes that leave the busiest machine", "workers", "times the gradients", "log2", "log")]


LAB = Claim(
    title_en="Parameter server or ring",
    title_zh="参数服务器还是环",
    claim_en="A parameter server is a bottleneck that grows with the workers; a ring has none.",
    claim_zh="参数服务器是瓶颈，随工作进程数增长；环没有瓶颈。",
    regime="One synchronous step of data parallelism, every message counted; weights and gradients have the same size.",
    varies="Number of workers, 2 to 64; a ring, one server, as many servers as workers, each on a machine of its own.",
    measures=f"Bytes that leave the busiest machine. No bottleneck: growth of at most ×{FLAT}; "
    f"a ring, from S to 2S, ×{2 * FLAT}.",
)
