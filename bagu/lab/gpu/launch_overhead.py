"""Launch overhead: the host's time of a call against the kernel's, by size. Where does a GPU wait?

A call returns when its kernels are in the GPU's queue. In a row of calls the GPU works on one while the host prepares
the next, so a call takes the longer of the two: the host's time where kernels are short, and there the GPU waits. One
op (RMSNorm, forward) is called in three ways that launch the same kind of kernel and differ in what the host does.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, names_in, number, where
from bagu.lab.plot import Line, Panel
from bagu.machine.timing import measure, measure_host

N = 1024  # features of a row
EPS = 1e-6
CALLS = 50  # in a row, and in a graph
KIB = 1024
CLOSE = 0.3  # a call within this share of the longer of the two times counts as explained by it


def ways(x: torch.Tensor, w: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The same norm by three hosts."""
    from bagu.ops.rms_norm import triton_backend

    return {
        "torch": lambda: F.rms_norm(x, (N,), w, EPS),
        "bagu.ops": lambda: ops.rms_norm(x, w, EPS),
        "Triton's own entry": lambda: triton_backend.forward(x, w, EPS),
    }


def kernel_s(call: Callable[[], object]) -> float:
    """Seconds of the GPU for one call: many calls in one CUDA graph, which the host launches once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return measure(graph.replay, "cuda", flush_l2=False, seconds=0.05).median_s / CALLS


def call_s(call: Callable[[], object]) -> float:
    """Seconds of one call among many in a row, until the last kernel is done."""
    samples = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4 * CALLS):
            call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / (4 * CALLS))
    return sorted(samples)[len(samples) // 2]


@torch.no_grad()
def run(setting: Setting) -> Iterator[Row]:
    device = torch.device(setting.device)
    sizes = [4**i * 32 * KIB for i in range(4 if setting.quick else 8)]  # of x, bf16: 32 KiB to 512 MiB
    w = torch.ones(N, device=device, dtype=torch.bfloat16)
    hosts = {name: measure_host(call, device) for name, call in ways(torch.randn(16, N).to(w), w).items()}
    for size in setting.track(sizes):
        x = torch.randn(size // (2 * N), N, device=device, dtype=torch.bfloat16)
        for name, call in ways(x, w).items():
            yield {
                "way": name,
                "size_bytes": size,
                "host_us": 1e6 * hosts[name],
                "kernel_us": 1e6 * kernel_s(call),
                "call_us": 1e6 * call_s(call),
            }


def longer(row: Row) -> float:
    """What a call should take, in us."""
    return max(number(row, "host_us"), number(row, "kernel_us"))


def waits_below(rows: Sequence[Row], way: str) -> int | None:
    """The largest size, in bytes, at which the GPU waits for this host; None if it never does."""
    waiting = [row for row in rows if row["way"] == way and number(row, "host_us") > number(row, "kernel_us")]
    return max((int(number(row, "size_bytes")) for row in waiting), default=None)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held when every call takes the longer of the two times, within CLOSE."""
    explained = [abs(number(row, "call_us") / longer(row) - 1) <= CLOSE for row in rows]
    kind: Kind = "held" if all(explained) else "holds only where" if any(explained) else "did not hold"
    names = list(dict.fromkeys(str(row["way"]) for row in rows))
    host = {name: next(number(row, "host_us") for row in rows if row["way"] == name) for name in names}
    upto = {name: waits_below(rows, name) for name in names}
    each_en = "; ".join(
        f"{name} {host[name]:.0f} µs, waits {f'up to {mib(size)}' if (size := upto[name]) else 'at no size'}"
        for name in names
    )
    each_zh = "；".join(
        f"{name} {host[name]:.0f} µs，{f'直到 {mib(size)} GPU 都在等' if (size := upto[name]) else 'GPU 从不等待'}"
        for name in names
    )
    share = f"{sum(explained)} of {len(rows)}"
    return Verdict(
        kind=kind,
        sentence_en=f"Host time of a call, and the sizes of x at which the GPU waits for it: {each_en}. {share} calls "
        f"took the longer of host and kernel within {CLOSE:.0%}.",
        sentence_zh=f"每次调用的主机耗时，以及 GPU 等待主机的张量大小：{each_zh}。{len(rows)} 个测点中有 "
        f"{sum(explained)} 个的耗时等于两者中较长的一个（误差 {CLOSE:.0%} 以内）。",
    )


def mib(size: int) -> str:
    return f"{size / KIB**2:.3g} MiB"


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Time of a call over size for each way; its host time is the flat line, the kernel's the rising one."""
    marks = []
    for i, name in enumerate(names_in(rows, "way")):
        own = where(rows, way=name)
        marks += [Line.of(own, size_mib, "call_us", f"{name}: a call", "o-", i)]
        marks += [Line.of(own, size_mib, "host_us", f"{name}: host", ":", i)]
    kernel = Line.of(where(rows, way=rows[0]["way"]), size_mib, "kernel_us", "kernel", "--", "grey")
    return [Panel([*marks, kernel], "RMSNorm, forward: calls in a row", "x, MiB", "µs", "log", "log", legend="below")]


def size_mib(row: Row) -> float:
    return number(row, "size_bytes") / KIB**2


LAB = Claim(
    title_en="Launch overhead",
    title_zh="启动开销",
    claim_en="A call takes the longer of the host's time and the kernel's: below some size a GPU waits for its host.",
    claim_zh="一次调用的耗时是主机耗时与核函数耗时中较长的一个：张量小到一定程度，GPU 就在等主机。",
    regime=f"RMSNorm, forward without a graph, bf16, rows of {N:,}; {4 * CALLS} calls in a row, nothing read back.",
    varies="Size of x, from 32 KiB to 512 MiB; who calls: torch's own op, bagu.ops (launches replayed), and the same "
    "kernel through Triton's ordinary entry.",
    measures=f"µs of the host for a call (tiny tensors), of the kernel ({CALLS} calls in one CUDA graph), and of a "
    f"call in a row. The claim counts as met where a call takes the longer of the two within {CLOSE:.0%}.",
    needs_gpu=True,
    evidence="timing",
)
