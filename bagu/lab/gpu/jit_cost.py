"""What a kernel that is compiled just in time costs: its first call, the same call in a second process, later calls.

Each process calls three kernels. The first one has an empty cache folder and compiles; the second one finds the kernels
on disk. Without a GPU a call is for sm_90 and ends before the launch, once Triton has the kernel.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from bagu.lab.core import Claim, Row, Setting, Text, Verdict, column, listed, names_in, number, say, share_met, where
from bagu.lab.parts.interleaved import best_times
from bagu.lab.parts.jit_calls import CHANGES, FIRST, SIDE, NoGpu, asked, norm
from bagu.lab.parts.new_process import in_new_process
from bagu.lab.plot import Bars, Line, Mark, Panel

SECONDS_MS, CHEAPER = 1e3, 10.0
LATER, PAYS = "later call", "pays"
COLD, DISK = "empty cache", "kernels on disk"
CALLS = 200  # later calls, whose mean is taken
KERNELS = ("rms_norm", "sum", "matmul")
PARTS = {
    "import_ms": Text("import triton", "导入 triton"),
    "hash_ms": Text("hash of Triton's files", "计算 Triton 文件的哈希"),
    "front_ms": Text("front end", "前端"),
    "passes_ms": Text("passes", "编译 pass"),
    "ptxas_ms": Text("ptxas", "ptxas"),
    "rest_ms": Text("rest", "其余"),
}


def called(device: str, kernels: Sequence[str]) -> list[Row]:
    """A row a call, in a process that has not imported Triton; the first row has what is paid once a process."""
    torch.zeros(1, device=device).cpu()  # a GPU's context, which torch needs anyway
    began = time.perf_counter()
    from triton import knobs
    from triton.runtime.cache import triton_key
    from triton.runtime.driver import driver

    imported = time.perf_counter()
    triton_key()  # it is kept in memory, so that the first call does not hash again
    once = {"import_ms": 1e3 * (imported - began), "hash_ms": 1e3 * (time.perf_counter() - imported)}
    facts: list[dict[str, Any]] = []
    knobs.compilation.listener = lambda **found: facts.append(found)
    if device != "cuda":
        driver.set_active(NoGpu())
    rows: list[Row] = []
    for kernel, steps in asked(device).items():
        if kernel not in kernels:
            continue
        for step, call in steps.items():
            facts.clear()
            seconds = timed(call, 1, device)
            rows.append({"kernel": kernel, "step": step, **split(1e3 * seconds, facts, once)})
            once = dict.fromkeys(once, 0.0)
        rows.append(
            {"kernel": kernel, "step": LATER, "made": "memory", "time_ms": 1e3 * timed(steps[FIRST], CALLS, device)}
        )
    if device == "cuda":
        x, w = (torch.ones(size, device=device, dtype=torch.bfloat16) for size in ((SIDE, SIDE), (SIDE,)))
        ways = {"eager": lambda: torch.nn.functional.rms_norm(x, (SIDE,), w, 1e-6), "kernel": norm(device)}
        times = {f"{way}_us": 1e6 * s for way, s in best_times(ways, device, seconds=0.02).items()}
        rows.append({"kernel": "rms_norm", "step": PAYS, **times})
    return rows


def timed(call: Callable[[], object], calls: int, device: str) -> float:
    """Seconds a call, with the wait for the GPU at the end."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


def split(time_ms: float, facts: Sequence[dict[str, Any]], once: Mapping[str, float]) -> Row:
    """The parts of a call's time, and where its kernel came from, as Triton's compiler told its listener."""
    parts = {"front_ms": 0.0, "passes_ms": 0.0, "ptxas_ms": 0.0}
    compiled = [one["times"] for one in facts if not one["cache_hit"]]
    for times in compiled:
        *passes, (_, last) = times.lowering_stages
        for part, us in zip(parts, (times.ir_initialization, sum(us for _, us in passes), last), strict=True):
            parts[part] += us / 1e3
    rest = {"rest_ms": time_ms - sum(parts.values())}
    made = "compiler" if compiled else "disk" if facts else "memory"
    return {"made": made, "time_ms": time_ms + sum(once.values()), **once, **parts, **rest}


def run(setting: Setting) -> Iterator[Row]:
    kernels = KERNELS[:2] if setting.quick else KERNELS
    for turn in setting.track(range(1 if setting.quick else 3)):
        with tempfile.TemporaryDirectory() as folder:
            for process in (COLD, DISK):
                for row in in_new_process(called, setting.device, kernels, TRITON_CACHE_DIR=folder):
                    yield {"round": turn, "process": process, **row}


def least(rows: Sequence[Row]) -> Row:
    """The row of the shortest call, because other load can only make one longer."""
    return min(rows, key=lambda row: number(row, "time_ms"))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the first call takes seconds, the next ones and a new process little, and nothing else compiles."""
    first, disk, later = (
        least(where(rows, process=process, step=step, kernel=rows[0]["kernel"]))
        for process, step in ((COLD, FIRST), (DISK, FIRST), (COLD, LATER))
    )
    cold_ms, disk_ms, later_ms = (number(row, "time_ms") for row in (first, disk, later))
    again = [r for r in where(rows, process=COLD, made="compiler") if r["step"] in CHANGES]
    changed = names_in(again, "step")
    found = [r for r in where(rows, process=DISK) if r["step"] in changed]
    return Verdict.say(
        share_met([cold_ms >= SECONDS_MS, cold_ms >= CHEAPER * disk_ms, cold_ms >= CHEAPER * later_ms, not again]),
        "The first call of a process takes {cold:.2f} s with an empty cache ({parts}), {disk:.2f} s with the kernel on "
        "disk (×{gain:.1f} less), and {later:.3f} ms later in the process. Changed alone, {n} of {all} compile "
        "again{each}.{pays}",
        "进程的第一次调用：缓存为空时 {cold:.2f} 秒（{parts}），核已在磁盘上时 {disk:.2f} 秒（相差 {gain:.1f} 倍），"
        "同一进程中之后 {later:.3f} 毫秒。单独改变一项，{all} 种中有 {n} 种重新编译{each}。{pays}",
        cold=cold_ms / 1e3,
        disk=disk_ms / 1e3,
        later=later_ms,
        gain=cold_ms / disk_ms,
        parts=listed(
            (say("{part} {s:.2f}", "{part} {s:.2f}", part=name, s=number(first, k) / 1e3) for k, name in PARTS.items()),
            zh="、",
        ),
        n=len(changed),
        all=len(CHANGES),
        each=say(
            " ({names}): {compiler:.0f} ms, in a second process {disk:.1f} ms",
            "（{names}）：{compiler:.0f} 毫秒，第二个进程中 {disk:.1f} 毫秒",
            names=listed((CHANGES[step] for step in changed), zh="、"),
            compiler=median(column(again, "time_ms")),
            disk=median(column(found, "time_ms")),
        )
        if again
        else "",
        pays=paid(rows, cold_ms),
    )


def paid(rows: Sequence[Row], cold_ms: float) -> Text | str:
    """After how many calls the first one is paid for by what the kernel saves against torch's eager function."""
    times = where(rows, step=PAYS)
    if not times:
        return ""
    eager, kernel = (min(column(times, key)) for key in ("eager_us", "kernel_us"))
    calls = 1e3 * cold_ms / (eager - kernel) if kernel < eager else None
    after = say("after {n:,.0f} calls", "{n:,.0f} 次调用后", n=calls) if calls else Text("never", "永远不会")
    return say(
        " Against torch's eager rms_norm ({eager:.0f} to {kernel:.0f} µs) it is paid {after}.",
        "与 torch 的 eager rms_norm 相比（{eager:.0f} 与 {kernel:.0f} 微秒），{after}回本。",
        eager=eager,
        kernel=kernel,
        after=after,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    steps = [step for step in (FIRST, *CHANGES, LATER) if where(rows, step=step)]
    first = {p: least(where(rows, process=p, step=FIRST, kernel=rows[0]["kernel"])) for p in (COLD, DISK)}
    bars = [
        Bars([number(own, key) or None for key in PARTS], process, text="{:,.0f}", sideways=True)
        for process, own in first.items()
    ]
    marks: list[Mark] = []
    for process in (COLD, DISK):
        for i, kernel in enumerate(names_in(rows, "kernel")):
            own = {s: where(rows, process=process, kernel=kernel, step=s) for s in steps}
            times = {steps.index(s): number(least(found), "time_ms") for s, found in own.items() if found}
            marks.append(
                Line(list(times.values()), list(times), f"{kernel}, {process}", "o", i, hollow=process == DISK, size=6)
            )
    return [
        Panel(bars, f"First call ({rows[0]['kernel']})", "ms", ynames=[name.en for name in PARTS.values()]),
        Panel(marks, "Calls of a process in order", "ms", xscale="log", ynames=steps, legend="below"),
    ]


LAB = Claim(
    title_en="The cost of compiling just in time",
    title_zh="即时编译的代价",
    claim_en="A kernel that is compiled just in time costs seconds once.",
    claim_zh="即时编译的核只有第一次要几秒。",
    regime="bagu's rms_norm of 4,096 × 4,096 in bf16, a sum and a matmul; Triton's files in the page cache, torch "
    "imported. Without a GPU calls are for sm_90 and end before the launch.",
    varies="The process: with an empty cache, then a second one. The call: the first, with one thing changed (a size, "
    "constexpr, warps, dtype), and 200 more of the first.",
    measures="Wall time of a call; for the first one also the import of Triton and its hash of its own files (the "
    "cache's key). Whether the compiler ran, and its parts, by Triton's listener. Best of 3 pairs of processes. "
    f"Seconds: 1 s or more; once: ×{CHEAPER:.0f} less afterwards, and no other call compiles.",
    evidence="timing",
)
