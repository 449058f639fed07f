"""Implicit GEMM: a convolution as a matrix product, with and without the unfolded image in memory.

    y[pixel, o] = sum over taps t and channels c of x[pixel + t, c] w[t, c, o]

    im2col     the pixels of all taps side by side in a matrix [B P Q, R S C], then one product
    product    that product alone, with the matrix already in memory: what is left of im2col without the copy
    taps       one product per tap, added up: the copy is that of one tap (implicit, in torch)
    bagu       ops.conv2d on a GPU: a Triton kernel whose loads compute the address of a tap (implicit)
    library    F.conv2d: cuDNN on a GPU, oneDNN on a CPU

The matrix of im2col is predicted to have R S times the bytes of the image (stride 1, "same" padding). Images are
channels last in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import geometric_mean
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, names_in, number, numbers_in, where
from bagu.lab.model.attention_complexity import peak_bytes
from bagu.lab.parts.confidence import Interval, of_ratio
from bagu.lab.parts.interleaved import round_times
from bagu.lab.plot import INK, Bars, Line, Mark, Panel, Rule

ROUNDS = 5
SMALL = 2.5  # images of extra memory that an implicit product may take: a padded image and the pixels of one tap
NEAR = 0.15  # relative, of the memory that is predicted for im2col


class Point(NamedTuple):
    """A layer of ResNet's kind: B images of side² pixels and C channels, C outputs, kernel² taps."""

    B: int
    side: int
    C: int
    kernel: int

    @property
    def name(self) -> str:
        return f"{self.C} at {self.side}², {self.kernel}×{self.kernel}"


def points(setting: Setting) -> list[Point]:
    if setting.quick:
        return [Point(1, 8, 32, 1), Point(1, 8, 32, 3)]
    B, widen = (4, 1) if setting.device == "cpu" else (32, 2)
    kernels = [Point(B, 28, 128 * widen, k) for k in (1, 3, 5, 7)]
    return [*kernels, Point(B, 56, 64 * widen, 3), Point(B, 14, 256 * widen, 3)]


def taps(x: torch.Tensor, kernel: int) -> list[torch.Tensor]:
    """x[B, H, W, C] as seen by each tap: views [B, H, W, C] of the padded image."""
    pad, (_, H, W, _) = kernel // 2, x.shape
    padded = F.pad(x, (0, 0, pad, pad, pad, pad)) if pad else x
    return [padded[:, r : r + H, s : s + W] for r in range(kernel) for s in range(kernel)]


def unfolded(x: torch.Tensor, kernel: int) -> torch.Tensor:
    """The matrix [B H W, R S C] of im2col."""
    return torch.stack(taps(x, kernel), 3).view(-1, kernel * kernel * x.shape[3])


def by_taps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """One product per tap; w[R S, C, O]."""
    B, H, W, C = x.shape
    y = x.new_zeros(B * H * W, w.shape[2])
    for tap, weight in zip(taps(x, round(len(w) ** 0.5)), w, strict=True):
        y.addmm_(tap.reshape(-1, C), weight)
    return y.view(B, H, W, -1)


def ways(point: Point, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """The convolution by each way; all give y[B, H, W, O]."""
    B, side, C, kernel = point
    dtype = torch.float32 if device == "cpu" else torch.float16
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, side, side, C, generator=generator).to(device, dtype)
    w = (torch.randn(kernel * kernel, C, C, generator=generator) / (kernel * C**0.5)).to(device, dtype)
    matrix, columns, shape = w.view(-1, C), unfolded(x, kernel), x.shape
    first = x.permute(0, 3, 1, 2)  # [B, C, H, W], channels last in memory
    filters = w.view(kernel, kernel, C, C).permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
    found: dict[str, Callable[[], torch.Tensor]] = {
        "im2col": lambda: (unfolded(x, kernel) @ matrix).view(shape),
        "product": lambda: (columns @ matrix).view(shape),
        "taps": lambda: by_taps(x, w),
        "library": lambda: F.conv2d(first, filters, padding="same").permute(0, 2, 3, 1),
    }
    if device != "cpu":
        found["bagu"] = lambda: ops.conv2d(first, filters, padding="same", backend="triton").permute(0, 2, 3, 1)
    return found


@torch.no_grad()
def run(setting: Setting) -> Iterator[Row]:
    for point in setting.track(points(setting)):
        calls = ways(point, setting.device)
        seconds, rounds = (0.01, 2) if setting.quick else (0.1, ROUNDS)
        times = round_times(calls, setting.device, seconds=seconds, rounds=rounds)
        out = calls["library"]()
        image = out.nbytes  # as many channels out as in
        for way, call in calls.items():
            slower = of_ratio(times["im2col"], times[way])
            yield {
                "layer": point.name,
                "kernel": point.kernel,
                "way": way,
                "device": setting.device,
                "time_us": 1e6 * min(times[way]),
                "speedup_over_im2col": slower.mean,
                "speedup_low": slower.low,
                "speedup_high": slower.high,
                "image_bytes": image,
                "extra_bytes": peak_bytes(call, setting.device) - image,
                "predicted_extra_bytes": image * point.kernel**2 if way == "im2col" else 0,
            }


def implicit(rows: Sequence[Row]) -> str:
    """The implicit product on this device: the kernel on a GPU, products of taps on a CPU."""
    return "bagu" if any(r["way"] == "bagu" for r in rows) else "taps"


def images(rows: Sequence[Row], way: str) -> dict[str, float]:
    """By layer: the memory beyond the result, in images."""
    return {str(r["layer"]): number(r, "extra_bytes") / number(r, "image_bytes") for r in rows if r["way"] == way}


def speedups(rows: Sequence[Row], way: str) -> dict[str, Interval]:
    """By layer: the time of im2col over that of a way."""
    keys = ("speedup_over_im2col", "speedup_low", "speedup_high")
    return {str(r["layer"]): Interval(*(number(r, key) for key in keys)) for r in rows if r["way"] == way}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Over the layers with more than one tap: held if the memory is as predicted and the implicit way always faster."""
    rows = [r for r in rows if number(r, "kernel") > 1]
    way, squares = implicit(rows), {str(r["layer"]): number(r, "kernel") ** 2 for r in rows}
    unfold, ours = images(rows, "im2col"), images(rows, way)
    memory = all(abs(unfold[name] / n - 1) <= NEAR for name, n in squares.items()) and max(ours.values()) <= SMALL
    faster, library = speedups(rows, way), speedups(rows, "library")
    won = [name for name, found in faster.items() if found.low > 1]
    kind: Kind = "did not hold"
    if memory and won:
        kind = "held" if len(won) == len(faster) else "holds only where"
    each = "; ".join(f"{name} ×{f.mean:.2f} ({f.low:.2f}–{f.high:.2f})" for name, f in faster.items())
    copy = 1 - geometric_mean([1 / f.mean for f in speedups(rows, "product").values()])
    beside = geometric_mean([faster[name].mean / library[name].mean for name in faster])
    most = max(unfold, key=lambda name: unfold[name])
    where, where_zh = ("a CPU", "CPU") if rows[0]["device"] == "cpu" else ("a GPU", "GPU")
    return Verdict(
        kind=kind,
        sentence_en=f"On {where}: im2col takes {unfold[most]:.1f} images of memory at {most} ({squares[most]:g} "
        f"predicted), the implicit product ({way}) at most {max(ours.values()):.1f}. Its speed against im2col: {each}. "
        f"The copy is {copy:.0%} of im2col's time. Against the library the implicit product has ×{beside:.2f} the "
        "speed (geometric mean).",
        sentence_zh=f"在 {where_zh} 上：{most} 时 im2col 占用 {unfold[most]:.1f} 张图像的内存"
        f"（预测 {squares[most]:g}），隐式乘积（{way}）至多 {max(ours.values()):.1f}。它相对 im2col 的速度：{each}。"
        f"im2col 的时间有 {copy:.0%} 用于复制。隐式乘积的速度是库的 ×{beside:.2f}（几何平均）。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    layers, swept = names_in(rows, "layer"), [r for r in rows if r["layer"] in _swept(rows)]
    speed: list[Mark] = [Rule(1, style="-")]
    kernels = numbers_in(swept, "kernel")
    memory: list[Mark] = [Line(kernels, [k * k for k in kernels], "R × S", ":", INK)]
    for i, way in enumerate(names_in(rows, "way")):
        found, own = [speedups(rows, way)[name] for name in layers], where(swept, way=way)
        speed.append(Bars([f.mean for f in found], way, i, [(f.low, f.high) for f in found]))
        memory.append(Line(column(own, "kernel"), list(images(own, way).values()), way, "o-", i))
    names, y = [name.replace(", ", "\n") for name in layers], "memory beyond the result, images"
    return [
        Panel(speed, "Speed", y="speed, times that of im2col", xnames=names, legend="below"),
        Panel(memory, "Memory", "side of the kernel, R = S", y, yscale="symlog", legend="below"),
    ]


def _swept(rows: Sequence[Row]) -> set[str]:
    """The layers that differ in the kernel alone: those of the image size with the most kernels."""
    by_image: dict[float, set[str]] = {}
    for r in rows:
        by_image.setdefault(number(r, "image_bytes"), set()).add(str(r["layer"]))
    return max(by_image.values(), key=len)


LAB = Claim(
    title_en="Implicit GEMM",
    title_zh="隐式 GEMM 卷积",
    claim_en="A convolution is a matrix product that needs no unfolded image: im2col stores R × S times the image for "
    "it, and the implicit product is faster.",
    claim_zh="卷积就是矩阵乘，但不必展开图像：im2col 要为它多存 R × S 倍的图像，隐式乘积不存，而且更快。",
    regime="Layers of ResNet's sizes, as many channels out as in, stride 1, channels last. fp32 and 4 images on a CPU, "
    "where the implicit product is one torch product per tap; fp16 and 32 images on a GPU, where it is bagu's kernel.",
    varies="Kernel side 1 to 7 at 28² pixels; 56², 28² and 14² pixels at 3 × 3; im2col, its product alone, taps, "
    "library, bagu's kernel (GPU).",
    measures="Time in five rounds in turn, as the ratio to im2col with a 95 % interval; peak memory beyond inputs and "
    f"result. As predicted: within {NEAR:.0%} of R × S images for im2col, at most {SMALL} for the implicit product.",
    evidence="timing",
)
