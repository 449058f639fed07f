"""Ring all-reduce against the number of ranks: bytes and time of small and of large messages, and what a fit predicts.

t = 2 (N − 1) α + 2 (N − 1) / N · S / β, fitted to the measured times, predicts more ranks than a machine has.
"""

import statistics
from collections.abc import Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in, share_met, where
from bagu.lab.parallel.ring_all_reduce import measured
from bagu.lab.plot import Line, Panel
from bagu.parallel.local_ranks import on_ranks

SAME = 1.25  # the most that a quantity may grow over the ranks to count as independent of them
FAR = 1024


def run(setting: Setting) -> Iterator[Row]:
    counts = (2, 4) if setting.quick else (2, 3, 4, 6, 8)
    sizes = (1 << 8, 1 << 18) if setting.quick else (1 << 8, 1 << 14, 1 << 20, 1 << 22)  # numbers
    for ranks in setting.track(counts):
        found = on_ranks(ranks, measured, ranks, sizes, 3 if setting.quick else 9)
        for size in sizes:
            seconds = [result["ring", size][0] for result in found]
            yield {
                "ranks": ranks,
                "size_bytes": 4 * size,
                "time_us": 1e6 * statistics.median(max(each) for each in zip(*seconds, strict=True)),
                "sent_bytes": max(result["ring", size][1] for result in found),
            }


def fitted(rows: Sequence[Row]) -> tuple[float, float]:
    """The latency of a message in µs, and µs for a byte, by least squares over relative errors."""
    terms = [
        [2 * (number(r, "ranks") - 1), 2 * (number(r, "ranks") - 1) / number(r, "ranks") * number(r, "size_bytes")]
        for r in rows
    ]
    times = torch.tensor([number(r, "time_us") for r in rows], dtype=torch.float64)
    scaled = torch.tensor(terms, dtype=torch.float64) / times[:, None]
    found = torch.linalg.lstsq(scaled, torch.ones(len(rows), 1, dtype=torch.float64)).solution.flatten()
    alpha, beta = (max(float(v), 1e-12) for v in found)
    return alpha, beta


def predicted_us(alpha: float, beta: float, ranks: int, size: float) -> float:
    return 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * size * beta


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if neither bytes nor times of any size grow with the ranks, beyond the 2 (N − 1) / N of the bytes."""
    sizes, (alpha, beta) = numbers_in(rows, "size_bytes"), fitted(rows)
    most = int(max(numbers_in(rows, "ranks")))
    bound = max(number(r, "sent_bytes") / number(r, "size_bytes") for r in rows)
    by_size = {s: predicted_us(alpha, beta, FAR, s) / predicted_us(alpha, beta, 2, s) for s in (sizes[0], 1e9)}
    return Verdict.say(
        share_met([bound <= 2, *(ratio <= 2 * SAME for ratio in by_size.values())]),
        "No rank sends more than {bound:.2f} times the data at 2 to {most} ranks. A fit gives {alpha:.0f} µs a "
        "message and "
        "{rate:.2g} GB/s: from 2 to {far:,} ranks {small:,.0f} bytes would take ×{first:,.0f} and 1 GB "
        "×{last:.2f} the time.",
        "2 到 {most} 个进程时，没有进程发送超过数据的 {bound:.2f} 倍。拟合：每条消息 {alpha:.0f} µs，{rate:.2g} GB/s；"
        "从 2 个到 {far:,} 个进程，{small:,.0f} 字节的用时 ×{first:,.0f}，1 GB 的用时 ×{last:.2f}。",
        bound=bound,
        most=most,
        alpha=alpha,
        rate=1e-3 / beta,
        far=FAR,
        small=sizes[0],
        first=by_size[sizes[0]],
        last=by_size[1e9],
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    sizes = numbers_in(rows, "size_bytes")
    times = [Line.of(where(rows, size_bytes=s), "ranks", "time_us", f"{s / 1024:,.0f} KiB") for s in sizes]
    largest = where(rows, size_bytes=sizes[-1])
    sent = Line.of(largest, "ranks", lambda r: number(r, "sent_bytes") / number(r, "size_bytes"))
    return [
        Panel(times, "Time of a ring all-reduce", "ranks", "µs", yscale="log"),
        Panel([sent], "Bytes that a rank sends, over the data's", "ranks", ylim=(0, 2.2)),
    ]


LAB = Claim(
    title_en="Ring all-reduce and the number of ranks",
    title_zh="环形 all-reduce 与进程数",
    claim_en="The cost of a ring all-reduce does not depend on the size of the cluster.",
    claim_zh="环形 all-reduce 的开销与集群规模无关。",
    regime="fp32 sums on Gloo between processes of one machine; more ranks than it has are predicted from a fit of "
    "latency and bandwidth.",
    varies="Number of ranks, 2 to 8; size of the tensor, 1 KiB to 16 MiB.",
    measures=f"Time of the slowest rank, bytes of the busiest; the fit at {FAR:,} ranks. Independent: at most "
    f"×{2 * SAME} the time of 2 ranks, where the bytes alone double.",
    evidence="timing",
)
