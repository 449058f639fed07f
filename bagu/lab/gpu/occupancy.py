"""Occupancy: registers and stages against the warps that run at once, and against speed.

Occupancy is the share of a multiprocessor's warps that a kernel can keep resident. Two kernels are compiled with many
settings of the same code:

    softmax backward    reads and writes memory; a limit of registers per thread and the number of warps vary
    convolution         3 × 3 by wgmma (the kernel that reads through pointers); tile, warps and pipeline stages vary

Predicted from the source: a thread keeps BASE registers, and either its values of y, dy and dx, or its share of the
sums and a 64-bit address for every 16 bytes that it loads; a stage keeps both tiles of operands in shared memory.

A GPU times every setting. Without one the kernels are compiled for sm_90, and speed stays unknown. Without Triton's
compiler only the prediction is left.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from bagu.bench.kernel_view import inspect_launch
from bagu.bench.occupancy import occupancy
from bagu.bench.sizing import bench_inputs
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, number
from bagu.lab.parts.confidence import Interval, of_ratio, rank_correlation
from bagu.lab.parts.interleaved import round_times
from bagu.lab.plot import INK, Line, Mark, Panel
from bagu.machine.device import this_machine, triton_interprets
from bagu.ops.catalogue import spec
from bagu.ops.contract.core import Case
from bagu.ops.inspect.offline import launches
from bagu.ops.replay.launcher import Launch, noted_launches

ARCH = "sm_90"  # compiled for, without a GPU
MOST = 255  # registers of a thread
SOFTMAX, CONVOLUTION = "softmax backward", "convolution"
# registers of a thread for indices, masks and scalars, from one compiled setting of each kernel
BASE = {SOFTMAX: 16, CONVOLUTION: 56}
ROWS = Case("rows_8k", "scores of an 8k context", M=16384, N=8192)
IMAGES = Case(
    "strided",
    "a stride, so that TMA is not used",
    image=(32, 56, 56, 256),
    kernel=(256, 3, 3),
    pad=(1, 1),
    stride=(2, 2),
)
PIXELS_OUT = IMAGES["image"][0] * 28 * 28
POINTERS = "pointer_kernel"
ROUNDS = 5
AS_FAST = 1.05  # the most occupied setting counts as the fastest if it takes at most this times as long


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A setting of one of the two kernels: compile-time arguments and options of its launch."""

    kernel: str
    warps: int
    args: Mapping[str, int] = field(default_factory=dict)
    limit: int | None = None  # registers per thread, for ptxas

    @property
    def tile(self) -> str | None:
        return f"{self.args['OUT']}×{self.args['PIXELS']}" if self.args else None

    @property
    def name(self) -> str:
        named = f"{self.warps} warps"
        if self.args:
            named = f"{self.tile}, {named}, {self.args['STAGES']} stage{'s' * (self.args['STAGES'] > 1)}"
        return named if self.limit is None else f"{named}, ≤ {self.limit} registers"

    def predicted(self) -> tuple[int, int]:
        """Registers per thread, and bytes of shared memory."""
        threads, base = 32 * self.warps, BASE[self.kernel]
        if self.kernel == SOFTMAX:
            return min(base + 3 * ROWS["N"] // threads, self.limit or MOST), 0
        tile, both = self.args["OUT"] * self.args["PIXELS"], self.args["OUT"] + self.args["PIXELS"]
        stage = both * self.args["BC"] * 2  # bytes
        return min(base + tile // threads + 2 * (stage // 16 // threads), MOST), self.args["STAGES"] * stage

    def changed(self, launch: Any) -> Any:
        """The launch with this setting."""
        options = {**launch.options, "num_warps": self.warps, "maxnreg": self.limit}
        if self.limit is None:
            del options["maxnreg"]
        grid = launch.grid
        if self.args:
            grid = (-(-PIXELS_OUT // self.args["PIXELS"]) * -(-IMAGES["kernel"][0] // self.args["OUT"]), 1)
        return replace(launch, args={**launch.args, **self.args}, options=options, grid=grid)


def variants(*, quick: bool) -> list[Variant]:
    tiles = [(64, 64, 4), (64, 64, 8), (128, 128, 8), (128, 128, 4)]
    softmax = [Variant(kernel=SOFTMAX, warps=w, limit=limit) for w in (4, 8, 16, 32) for limit in (None, 128, 64, 32)]
    convolution = [
        Variant(kernel=CONVOLUTION, warps=w, args={"OUT": out, "PIXELS": pixels, "BC": 64, "STAGES": stages})
        for out, pixels, w in tiles
        for stages in (1, 2, 3, 5)
    ]
    return [*softmax[6:8], *convolution[:2]] if quick else [*softmax, *convolution]


def run(setting: Setting) -> list[Row]:
    chosen = variants(quick=setting.quick)
    if setting.device == "cuda":
        return measured(chosen, setting)
    if importlib.util.find_spec("triton") is None or triton_interprets():
        return [described(v, ARCH) for v in chosen]
    recorded = {SOFTMAX: _offline("softmax", ROWS, "_backward"), CONVOLUTION: _offline("conv2d", IMAGES, POINTERS)}
    rows: list[Row] = []
    for v in setting.track(chosen):
        k = inspect_launch(v.changed(recorded[v.kernel]), ARCH)
        rows.append({**described(v, ARCH), **compiled(ARCH, v.warps, k.registers, k.shared), "spills": k.spills})
    return rows


def described(v: Variant, arch: str) -> Row:
    """A setting and its prediction; nothing is compiled or measured yet."""
    registers, shared = v.predicted()
    guess = occupancy(arch, registers=registers, shared=shared, warps=v.warps)
    return {
        "kernel": v.kernel, "setting": v.name, "warps": v.warps, "tile": v.tile, "stages": v.args.get("STAGES"),
        "register_limit": v.limit, "predicted_registers": registers, "predicted_shared_bytes": shared,
        "predicted_occupancy_percent": 100 * guess.share, "registers": None, "spills": None, "shared_bytes": None,
        "occupancy_percent": None, "limited_by": None, "time_us": None, "slower": None, "slower_low": None,
    }  # fmt: skip


def compiled(arch: str, warps: int, registers: int, shared: int) -> Row:
    found = occupancy(arch, registers=registers, shared=shared, warps=warps)
    return {
        "registers": registers,
        "shared_bytes": shared,
        "occupancy_percent": 100 * found.share,
        "limited_by": found.limit,
    }


def _offline(op: str, case: Case, kernel: str) -> Any:
    return next(one for one in launches(spec(op), case, torch.float16) if one.name == kernel)


def measured(chosen: Sequence[Variant], setting: Setting) -> list[Row]:
    """Compile and launch every setting on the GPU, and time those that run."""
    capability = this_machine().gpus[0].capability
    arch = f"sm_{capability[0]}{capability[1]}"
    recorded = {SOFTMAX: _softmax_launch(), CONVOLUTION: _convolution_launch()}
    rows: list[Row] = []
    calls: dict[str, Callable[[], object]] = {}
    for v in setting.track(chosen):
        launch = v.changed(recorded[v.kernel])
        call: Callable[[], Any] = partial(launch.fn[launch.grid], **launch.args, **launch.options)
        k = call()  # the compiled kernel
        spills = {"spills": k.n_spills}
        rows.append({**described(v, arch), **compiled(arch, v.warps, k.n_regs, k.metadata.shared), **spills})
        calls[str(len(calls))] = call
    seconds, rounds = (0.01, 2) if setting.quick else (0.02, ROUNDS)
    times = list(round_times(calls, setting.device, seconds=seconds, rounds=rounds).values())
    for kernel in (SOFTMAX, CONVOLUTION):
        own = [i for i, v in enumerate(chosen) if v.kernel == kernel]
        fastest = min(own, key=lambda i: min(times[i]))
        for i in own:
            slower = of_ratio(times[i], times[fastest]) if i != fastest else Interval(1.0, 1.0, 1.0)
            rows[i] |= {"time_us": 1e6 * min(times[i]), "slower": slower.mean, "slower_low": slower.low}
    return rows


def _noted(call: Callable[[], object], kernel: str) -> Launch:
    """The launch of a kernel in a call, with its real arguments."""
    found: list[Launch] = []
    with noted_launches(found.append):
        call()
    return next(one for one in found if one.fn.fn.__name__ == kernel)


def _softmax_launch() -> Launch:
    module = spec("softmax").module("triton")
    y = torch.rand(ROWS["M"], ROWS["N"], device="cuda", dtype=torch.float16)
    return _noted(lambda: module.backward(torch.randn_like(y), y, 1.0), "_backward")


def _convolution_launch() -> Launch:
    op = spec("conv2d")
    args = bench_inputs(op, IMAGES, torch.float16, "cuda")
    return _noted(lambda: op.apply(op.module("triton").forward, args), POINTERS)


def key_of(rows: Sequence[Row]) -> str:
    """The occupancy to judge by: that of the compiled kernels, or the predicted one where nothing was compiled."""
    return "predicted_occupancy_percent" if rows[0]["occupancy_percent"] is None else "occupancy_percent"


def fewer_gives_more(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Over the pairs of settings that differ in the register limit or in the stages alone: how often the smaller number
    has more occupancy, how often it has less, and the number of pairs. No limit is not a number: ptxas then chooses."""
    key, differences = key_of(rows), []
    for name in ("register_limit", "stages"):
        same = [field for field in ("kernel", "warps", "tile", "register_limit", "stages") if field != name]
        numbered = [r for r in rows if r[name] is not None]
        for low, high in itertools.product(numbered, numbered):
            if all(low[f] == high[f] for f in same) and number(low, name) < number(high, name):
                differences.append(number(low, key) - number(high, key))
    return sum(d > 0 for d in differences), sum(d < 0 for d in differences), len(differences)


def by_kernel(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: [r for r in rows if r["kernel"] == name] for name in dict.fromkeys(str(r["kernel"]) for r in rows)}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Two halves: fewer registers and stages raise the occupancy; and more of it is faster, for both kernels."""
    more, less, total = fewer_gives_more(rows)
    mostly, always = more > less, more > 0 and less == 0
    half = (
        f"Fewer registers or stages raise the occupancy in {more} of {total} pairs of settings and lower it in {less}"
    )
    half_zh = f"{total} 对设置中，寄存器或流水级更少时占用率升高的有 {more} 对，降低的有 {less} 对"
    compiled_rows = [r for r in rows if r["occupancy_percent"] is not None]
    if compiled_rows:
        off = max(abs(number(r, "predicted_occupancy_percent") - number(r, "occupancy_percent")) for r in compiled_rows)
        half += f"; it was predicted within {off:.0f} percentage points"
        half_zh += f"；预测最多差 {off:.0f} 个百分点"
    if rows[0]["time_us"] is None:
        how, how_zh = ("compiled for sm_90", "按 sm_90 编译") if compiled_rows else ("predicted only", "只有预测")
        untimed = Verdict(
            kind="did not hold",
            sentence_en=f"{half} ({how}). Speed was not measured.",
            sentence_zh=f"{half_zh}（{how_zh}）。没有测量速度。",
        )
        return untimed.undecided("a GPU, to measure the speed.", "需要 GPU 来测量速度。") if mostly else untimed
    agree, each, each_zh = speeds(rows)
    kind: Kind = "did not hold"
    if mostly and any(agree):
        kind = "held" if always and all(agree) else "holds only where"
    return Verdict(
        kind=kind,
        sentence_en=f"{half}. Occupancy and speed: {'; '.join(each)}.",
        sentence_zh=f"{half_zh}。占用率与速度：{'；'.join(each_zh)}。",
    )


def speeds(rows: Sequence[Row]) -> tuple[list[bool], list[str], list[str]]:
    """For each kernel: whether more occupancy is faster, and a phrase about it."""
    agree, each, each_zh = [], [], []
    for name, own in by_kernel(rows).items():
        rho = rank_correlation([number(r, "occupancy_percent") for r in own], [-number(r, "time_us") for r in own])
        most = max(own, key=lambda r: (number(r, "occupancy_percent"), -number(r, "time_us")))
        fastest = min(own, key=lambda r: number(r, "time_us"))
        agree.append(rho.low > 0 and number(most, "slower_low") <= AS_FAST)
        each.append(
            f"{name}: rank correlation {rho.mean:.2f} ({rho.low:.2f}–{rho.high:.2f}); the fastest setting "
            f"({fastest['setting']}) has {number(fastest, 'occupancy_percent'):.0f} %, and the most occupied "
            f"one ({most['setting']}, {number(most, 'occupancy_percent'):.0f} %) takes ×{number(most, 'slower'):.2f} "
            "as long"
        )
        each_zh.append(
            f"{name}：秩相关 {rho.mean:.2f}（{rho.low:.2f}–{rho.high:.2f}）；最快的设置（{fastest['setting']}）占用率 "
            f"{number(fastest, 'occupancy_percent'):.0f} %，占用率最高的（{most['setting']}，"
            f"{number(most, 'occupancy_percent'):.0f} %）用时 ×{number(most, 'slower'):.2f}"
        )
    return agree, each, each_zh


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Speed over occupancy; without times, the occupancy of every setting and its prediction."""
    panels = []
    for i, (name, own) in enumerate(by_kernel(rows).items()):
        timed, key, settings = own[0]["time_us"] is not None, key_of(own), [str(r["setting"]) for r in own]
        marks: list[Mark] = []
        for spilled, style, words in ((False, "o", "no spills"), (True, "X", "registers spill")):
            some = [r for r in own if bool(r["spills"]) == spilled]
            y = [100 / number(r, "slower") if timed else settings.index(str(r["setting"])) for r in some]
            marks.append(Line(column(some, key), y, words, style, i, size=6))
        if timed:
            panels.append(Panel(marks, name, "occupancy, %", "speed, % of the fastest", xlim=(0, 105), ylim=(0, 105)))
        else:
            guesses = column(own, "predicted_occupancy_percent")
            marks.append(Line(guesses, range(len(own)), "predicted", "|", INK, size=9))
            panels.append(Panel(marks, name, "occupancy, %", xlim=(0, 105), ynames=settings, legend="below"))
    return panels


LAB = Claim(
    title_en="Occupancy",
    title_zh="占用率",
    claim_en="Fewer registers and fewer stages let more warps run at once on a multiprocessor, and more of them are "
    "faster.",
    claim_zh="寄存器和流水级越少，一个多处理器上同时运行的线程束越多；线程束越多，内核越快。",
    regime="fp16. Softmax backward of 16,384 × 8,192, limited by memory; a 3 × 3 convolution with stride 2 of 32 "
    "images of 56² pixels and 256 channels, limited by products. Without a GPU: compiled for sm_90, no times.",
    varies="Warps and a limit of registers per thread; tile, warps and pipeline stages.",
    measures="Registers, spills, shared memory and occupancy of the compiled kernel, and their prediction; time in "
    "five rounds in turn. More is faster: a rank correlation above 0 with 95 % confidence, and the most occupied "
    f"setting within {AS_FAST - 1:.0%} of the fastest.",
    evidence="timing",
)
