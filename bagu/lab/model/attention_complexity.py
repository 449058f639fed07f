"""Complexity of attention: time and memory over the length, with and without a window.

    scores          softmax(Q K^T) V with all scores in memory, the formula as written
    blocked         ops.attention: blocks of keys and an online softmax; no full row of scores is stored
    window, op      ops.attention with window=W; on a CPU the same kernel, for 256 queries and their keys at a time
    window, cut     the same result from segments of 2 W tokens that overlap by half; the second W of each are used

An exponent is the slope over the last doubling of the length: cost ~ L^exponent. Shorter lengths are excluded, because
there the overhead of the calls dominates.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number
from bagu.lab.parts.interleaved import best_times
from bagu.lab.plot import Panel, by_length
from bagu.ops.attention import dense
from bagu.ops.attention.shape import Shape

WINDOW, HEADS, HEAD_SIZE = 256, 2, 64
CLAIMED = {"scores": 2, "blocked": 2, "window, op": 1, "window, cut": 1}  # claimed exponent of time and memory
NEAR = 0.35  # tolerance: an exponent may be above a claimed 1, or below a claimed 2, by this much


def run(setting: Setting) -> Iterator[Row]:
    lengths = [512, 1024, 2048] if setting.quick else [512, 1024, 2048, 4096, 8192]
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    for L in setting.track(lengths):
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, L, HEADS, HEAD_SIZE, generator=generator).to(setting.device, dtype).unbind()
        calls = ways(q, k, v)
        times = best_times(calls, setting.device, seconds=0.02 if setting.quick else 0.3)
        for way, call in calls.items():
            peak = peak_bytes(call, setting.device)
            yield {
                "way": way,
                "length_tokens": L,
                "window_tokens": WINDOW if way.startswith("window") else None,
                "time_ms": times[way] * 1e3,
                "peak_bytes": peak,
            }


def ways(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """The implementations of attention in one causal segment; all return out[L, H, E]."""
    L, like = q.shape[0], q.new_empty(0, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, L], dtype=torch.int32, device=q.device)

    def scores() -> torch.Tensor:
        added = Shape(causal=True).additive(L, like)
        return dense.forward(added, HEAD_SIZE**-0.5, q[None], k[None], v[None])[0][0]

    return {
        "scores": scores,
        "blocked": lambda: ops.attention(q, k, v, cu_seqlens, L)[0],
        "window, op": lambda: ops.attention(q, k, v, cu_seqlens, L, window=WINDOW)[0],
        "window, cut": lambda: cut(q, k, v, WINDOW),
    }


def cut(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Attention in a window, for L tokens that are a multiple of it, at least two.

    Segment i has the tokens from i * window to (i + 2) * window. A token of its second half attends at most window - 1
    tokens back, which is inside the segment. The first half of the first segment has no tokens before it.
    """
    count = q.shape[0] // window - 1
    q, k, v = (x.unfold(0, 2 * window, window).movedim(-1, 1).flatten(0, 1) for x in (q, k, v))
    cu_seqlens = 2 * window * torch.arange(count + 1, dtype=torch.int32, device=q.device)
    out = ops.attention(q, k, v, cu_seqlens, 2 * window, window=window)[0].unflatten(0, (count, 2 * window))
    return torch.cat([out[0, :window], out[:, window:].flatten(0, 1)])


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Peak memory of a call beyond its inputs; on a CPU from the allocator events of the profiler."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()  # negative if memory is freed
        peak = max(peak, level)
    return peak


def exponent(rows: Sequence[Row], way: str, key: str) -> float:
    """The slope over the last two lengths."""
    a, b = [row for row in rows if row["way"] == way][-2:]
    grows = [number(b, name) / number(a, name) for name in (key, "length_tokens")]
    return math.log(grows[0]) / math.log(grows[1])


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if time and memory are at least quadratic without a window and at most linear with one, within NEAR."""
    found = {way: [exponent(rows, way, key) for key in ("time_ms", "peak_bytes")] for way in CLAIMED}
    met = {
        (way, what): value >= 2 - NEAR if CLAIMED[way] == 2 else value <= 1 + NEAR
        for way, pair in found.items()
        for what, value in zip(("time", "memory"), pair, strict=True)
    }
    kind: Kind = "held" if all(met.values()) else "holds only where" if any(met.values()) else "did not hold"
    not_met = [f"the {what} of “{way}”" for (way, what), good in met.items() if not good]
    not_met_zh = [f"“{way}”的{'时间' if what == 'time' else '内存'}" for (way, what), good in met.items() if not good]
    each = "; ".join(f"{way}: time L^{t:.1f}, memory L^{m:.1f}" for way, (t, m) in found.items())
    each_zh = "；".join(f"{way}：时间 L^{t:.1f}，内存 L^{m:.1f}" for way, (t, m) in found.items())
    last = rows[-1]["length_tokens"]
    at = {str(row["way"]): row for row in rows if row["length_tokens"] == last}
    faster = number(at["blocked"], "time_ms") / number(at["window, cut"], "time_ms")
    masked = number(at["window, op"], "time_ms") / number(at["blocked"], "time_ms")
    return Verdict(
        kind=kind,
        sentence_en=f"{each}. Not as claimed: {', '.join(not_met) or 'nothing'}. At {last:,} tokens the op's window "
        f"option takes ×{masked:.1f} the time of no window; splitting into segments is ×{faster:.1f} faster.",
        sentence_zh=f"{each_zh}。与说法不符：{'、'.join(not_met_zh) or '无'}。长度 {last:,} 时，"
        f"用算子的窗口选项耗时是不开窗的 ×{masked:.1f}；切成小段则快 ×{faster:.1f}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Time and memory over the length, with reference lines of slope 1 and 2."""
    return by_length(rows, list(CLAIMED), "time_ms", "a forward", slopes=True)


LAB = Claim(
    title_en="Complexity of attention",
    title_zh="注意力的复杂度",
    claim_en="Time and memory of attention grow with the square of the length; a sliding window makes both linear.",
    claim_zh="注意力的时间和内存与长度的平方成正比；滑动窗口使两者都变为线性。",
    regime=f"Forward, one causal sequence, {HEADS} heads of {HEAD_SIZE}, a window of {WINDOW}; fp32 on a CPU, bf16 on "
    "a GPU. Attention only: in a model the matrix products around it are linear in the length.",
    varies="Length; implementation: all scores in memory, blocked, the op's window option, splitting into segments.",
    measures="Best of three median times; peak memory beyond the inputs; the exponent over the last "
    f"doubling of the length: quadratic is {2 - NEAR} or more, linear is {1 + NEAR} or less.",
    evidence="timing",
)
