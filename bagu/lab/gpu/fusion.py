"""Fusion: the bytes and the time of a normalization as separate steps and as one kernel.

    s = x + residual        y = s * w / sqrt(mean(s^2) + eps)        x, residual, s, y: [M, N]

As five steps every intermediate is written to memory and read back; fused, x and residual are read once and s and y are
written once. The bytes of the steps are counted below; those of the fused op are the cost in its spec. On a CPU new
memory costs more than the traffic (the system clears each page first), so results go to memory that is reused between
calls, and only the traffic differs; "steps, new memory" is the code as it is usually written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, names_in, number, where
from bagu.lab.parts.interleaved import best_times
from bagu.lab.plot import Line, Mark, Note, Panel, Rule
from bagu.machine.device import available_memory, cxx_compiler, this_machine
from bagu.ops.catalogue import spec

EPS = 1e-6
MIB = 1 << 20
TILE_ELEMENTS = 128 * 1024  # 0.5 MiB of fp32: several tiles fit in an L2, and a call is long compared to torch's 1 µs
STEPS = {  # tensors of M x N elements that each step reads and writes
    "s = x + residual": (2, 1),
    "q = s * s": (1, 1),
    "m = mean(q)": (1, 0),
    "n = s * rsqrt(m + eps)": (1, 1),
    "y = n * w": (1, 1),
}
CLOSE = 0.25  # a speedup within this fraction of the saved traffic counts as explained by it


class Buffers(NamedTuple):
    """Inputs, results (s, y) and intermediates (q, n, m) of one size."""

    x: torch.Tensor
    residual: torch.Tensor
    w: torch.Tensor
    s: torch.Tensor
    y: torch.Tensor
    q: torch.Tensor
    n: torch.Tensor
    m: torch.Tensor

    @classmethod
    def make(cls, M: int, N: int, *, device: str, dtype: torch.dtype) -> Buffers:
        normal = partial(torch.randn, device=device, dtype=dtype)
        zeros = partial(torch.zeros, device=device, dtype=dtype)
        results = {name: zeros(M, N) for name in ("s", "y", "q", "n")}
        return cls(x=normal(M, N), residual=normal(M, N), w=normal(N), m=zeros(M, 1), **results)


def steps(b: Buffers) -> None:
    """One call per step, results in reused memory."""
    torch.add(b.x, b.residual, out=b.s)
    torch.mul(b.s, b.s, out=b.q)
    torch.mean(b.q, -1, keepdim=True, out=b.m)
    torch.mul(b.s, b.m.add_(EPS).rsqrt_(), out=b.n)
    torch.mul(b.n, b.w, out=b.y)


def steps_anew(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One call per step, each result in new memory."""
    s = x + residual
    return s * torch.rsqrt((s * s).mean(-1, keepdim=True) + EPS) * w, s


def tiles(b: Buffers, elements: int = TILE_ELEMENTS) -> Iterator[Buffers]:
    """Views of a few rows each. Their intermediates share one small buffer, which stays in the cache."""
    M, N = b.x.shape
    rows = max(1, elements // N)
    for start, stop in pairwise([*range(0, M, rows), M]):
        cut, reused = slice(start, stop), slice(0, stop - start)
        yield Buffers(b.x[cut], b.residual[cut], b.w, b.s[cut], b.y[cut], b.q[reused], b.n[reused], b.m[reused])


def tiled(parts: Sequence[Buffers]) -> None:
    """The same calls, tile by tile: fusion without a compiler."""
    for part in parts:
        steps(part)


def into(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, s: torch.Tensor, y: torch.Tensor) -> None:
    """The steps with results in reused memory, for torch.compile to fuse."""
    y_new, s_new = steps_anew(x, residual, w)
    s.copy_(s_new)
    y.copy_(y_new)


def variants(b: Buffers, setting: Setting) -> dict[str, Callable[[], object]]:
    """The implementations on this device."""
    ways: dict[str, Callable[[], object]] = {
        "steps": lambda: steps(b),
        "steps, new memory": lambda: steps_anew(b.x, b.residual, b.w),
    }
    if setting.device == "cpu":
        parts = list(tiles(b))
        ways["tiled"] = lambda: tiled(parts)
    else:
        ways["bagu.ops"] = lambda: ops.add_rms_norm(b.x, b.residual, b.w, EPS, backend="triton")
    # Compilation takes 10 to 20 s on two cores, so a quick run skips it. On a CPU it needs a C++ compiler.
    if not setting.quick and (setting.device != "cpu" or cxx_compiler() is not None):
        compiled = torch.compile(into, dynamic=True)
        ways["compiled"] = lambda: compiled(b.x, b.residual, b.w, b.s, b.y)
    return ways


def working_sets(setting: Setting) -> tuple[int, list[int]]:
    """Bytes of the last-level cache, and of x, residual, s and y together: from 1 MiB to several times that cache."""
    if setting.device == "cpu":
        cache, times, memory = this_machine().cache_bytes or 32 * MIB, 4, available_memory()
    else:
        gpu = this_machine().gpus[0]
        cache, times, memory = gpu.l2_bytes, 16, gpu.memory_bytes
    if setting.quick:
        return cache, [MIB, 16 * MIB]
    largest = min(times * cache, (memory or 4096 * MIB) // 8)  # three times as much with the intermediates
    return cache, [size for size in (4**i * MIB for i in range(10)) if size < largest / 2] + [largest]


def run(setting: Setting) -> Iterator[Row]:
    dtype, N = (torch.float32, 1024) if setting.device == "cpu" else (torch.bfloat16, 4096)
    cache, sizes = working_sets(setting)
    seconds = 0.03 if setting.quick else 0.15
    for size in setting.track(sizes):
        M = size // (4 * N * dtype.itemsize)
        fused_bytes = spec("add_rms_norm").cost({"M": M, "N": N}, dtype.itemsize).bytes
        steps_bytes = sum(reads + writes for reads, writes in STEPS.values()) * M * N * dtype.itemsize
        b = Buffers.make(M, N, device=setting.device, dtype=dtype)
        for name, time_s in best_times(variants(b, setting), setting.device, seconds=seconds).items():
            fused = not name.startswith("steps")
            traffic = fused_bytes if fused else steps_bytes
            yield {
                "variant": name,
                "fused": fused,
                "working_set_bytes": size,
                "last_level_cache_bytes": cache,
                "traffic_bytes": traffic,
                "time_us": time_s * 1e6,
                "rate_gb_per_s": traffic / time_s / 1e9,
            }


def speedups(rows: Sequence[Row]) -> dict[int, tuple[float, float, str]]:
    """By size: the speedup of the best fused variant over the steps, the traffic it saves, and its name."""
    found = {}
    for size in sorted({int(number(row, "working_set_bytes")) for row in rows}):
        here = [row for row in rows if row["working_set_bytes"] == size]
        base = next(row for row in here if row["variant"] == "steps")
        best = min((row for row in here if row["fused"]), key=lambda row: number(row, "time_us"))
        ratios = [number(base, key) / number(best, key) for key in ("time_us", "traffic_bytes")]
        found[size] = ratios[0], ratios[1], str(best["variant"])
    return found


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if at every size the speedup equals the saved traffic, within CLOSE."""
    found = speedups(rows)
    agree = [size for size, (faster, saved, _) in found.items() if abs(faster / saved - 1) <= CLOSE]
    kind: Kind = "held" if len(agree) == len(found) else "holds only where" if agree else "did not hold"
    _, saved, _ = next(iter(found.values()))
    each_en = "; ".join(f"×{faster:.2g} at {mib(size)} ({name})" for size, (faster, _, name) in found.items())
    each_zh = "；".join(f"{mib(size)} 时 ×{faster:.2g}（{name}）" for size, (faster, _, name) in found.items())
    cache = mib(int(number(rows[0], "last_level_cache_bytes")))
    where_en = f"within {CLOSE:.0%} of it at {', '.join(map(mib, agree)) or 'no size'}"
    where_zh = f"与之相差不超过 {CLOSE:.0%} 的规模：{'、'.join(map(mib, agree)) or '无'}"
    return Verdict(
        kind=kind,
        sentence_en=f"The traffic falls by ×{saved:.2f}; the best fused variant is faster by {each_en}; {where_en}. "
        f"The last-level cache has {cache}.",
        sentence_zh=f"访存减少到 1/{saved:.2f}；最快的融合实现的加速比：{each_zh}。{where_zh}。末级缓存为 {cache}。",
    )


def mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Speedup over the steps, by working set; the dashed line is the saved traffic."""
    base = {row["working_set_bytes"]: number(row, "time_us") for row in where(rows, variant="steps")}
    best = list(speedups(rows).values())
    saved, cache = best[0][1], Rule(number(rows[0], "last_level_cache_bytes") / MIB, axis="x")
    left: list[Mark] = [cache, Rule(saved, style="--"), Note(None, saved, f"saved traffic: ×{saved:.2f}")]
    right: list[Mark] = [cache]
    for name in names_in(rows, "variant"):
        own = where(rows, variant=name)
        left.append(Line.of(own, size_mib, lambda r: base[r["working_set_bytes"]] / number(r, "time_us"), name))
        right.append(Line.of(own, size_mib, "rate_gb_per_s", name))
    x, top = "x, residual, s and y together, MiB (dotted: last-level cache)", max(saved, *(b[0] for b in best))
    return [
        Panel(left, "Speedup over the steps", x, "×", "log", ylim=(0, 1.15 * top), legend="below"),
        Panel(right, "Rate of the counted traffic", x, "GB/s", "log", "log", legend="below"),
    ]


def size_mib(row: Row) -> float:
    return number(row, "working_set_bytes") / MIB


LAB = Claim(
    title_en="Fusion",
    title_zh="算子融合",
    claim_en="A fused kernel is faster by exactly the memory traffic it saves.",
    claim_zh="算子融合省下几倍的访存，就快几倍。",
    regime="Residual add and RMSNorm, forward, fp32 on a CPU (N = 1,024) and bf16 on a GPU (N = 4,096); repeated "
    "calls, so data that fit in a cache stay there.",
    varies="Size of the data, from 1 MiB to several times the last-level cache; separate torch calls, the same calls "
    "tile by tile (CPU), torch.compile (full run, if there is a compiler), bagu.ops.add_rms_norm (GPU).",
    measures="Counted traffic, and the best of three median times of a call. The claim counts as met if the two "
    f"ratios agree within {CLOSE:.0%}.",
    evidence="timing",
)
