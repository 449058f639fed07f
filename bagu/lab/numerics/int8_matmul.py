"""int8 products (W8A8): speed beside the float product, and error by the share of outlier channels.

    plain     x and w rounded to int8 with a scale per row of each (ops.quantize_int8), int32 sums (ops.int8_matmul)
    smooth    x / s and w s first, s[k] = sqrt(max |x[:, k]| / max |w[:, k]|): x and w share the outliers (SmoothQuant)
    rotate    x H and w H first, H a Hadamard matrix over sqrt(K): the product is the same, and every channel of x H is
              a sum of all channels, so an outlier is spread over the whole row (QuaRot)

An outlier channel has OUTLIER_STD times the standard deviation of the others. The error is predicted before the
measurement: rounding with step t adds noise of variance t^2 / 12 to each value, so that without a transformation

    error^2 = E[t_x^2] / (12 var x) + E[t_w^2] / (12 var w)        t = largest value of a row / 127

The largest value is that of normal numbers of these deviations (rounding_noise.py), not of the data.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, names_in, number, where
from bagu.lab.parts.confidence import Interval, interval, of_ratio
from bagu.lab.parts.interleaved import round_times
from bagu.lab.parts.rounding_noise import mean_square_peak
from bagu.lab.plot import INK, Line, Panel
from bagu.serve.cpu.quantize import int8 as cpu_int8

METHODS = ("plain", "smooth", "rotate")
SHARES = (0.0, 0.001, 0.01, 0.1)  # of the channels
OUTLIER_STD = 50.0
SEEDS, ROUNDS = 5, 5
TWICE = 1.8  # a speedup of at least this counts as twice
HARM, RESTORED = 2.0, 1.25  # times the error without outliers


def hadamard(n: int, like: torch.Tensor) -> torch.Tensor:
    """The matrix [n, n] of ±1 / sqrt(n), n a power of two; its rows are orthonormal."""
    matrix = like.new_ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / n**0.5


def rotation(K: int, like: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function x -> x H over the last dim, K a power of two. H is a Kronecker product of two small matrices."""
    a = 1 << (K.bit_length() - 1) // 2
    outer, inner = hadamard(a, like), hadamard(K // a, like)
    return lambda x: (outer @ (x.reshape(-1, a, K // a) @ inner)).reshape(x.shape)


def smoothed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = (x.abs().amax(0) / w.abs().amax(0)).sqrt()
    return x / s, w * s


def transformed(method: str, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if method == "smooth":
        return smoothed(x, w)
    if method == "rotate":
        rotate = rotation(x.shape[1], x)
        return rotate(x), rotate(w)
    return x, w


def int8_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (xq, x_scale), (wq, w_scale) = ops.quantize_int8(x), ops.quantize_int8(w)
    return ops.int8_matmul(xq, wq, x_scale, w_scale, dtype=torch.float32)


def operands(M: int, N: int, K: int, outliers: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x[M, K] with `outliers` outlier channels, and w[N, K], in fp32."""
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(M, K, generator=generator), torch.randn(N, K, generator=generator) / K**0.5
    x[:, torch.randperm(K, generator=generator)[:outliers]] *= OUTLIER_STD
    return x.to(device), w.to(device)


def predicted_error(method: str, K: int, outliers: int) -> float:
    """The relative error of the output, from the shape and the number of outlier channels."""
    variance, normal = 1 + outliers / K * (OUTLIER_STD**2 - 1), mean_square_peak(K)
    # "rotate": every channel is a sum of all channels and taken as normal; where a few outliers dominate the sum, its
    # tails are lighter, and the error is below this
    x_noise = w_noise = normal
    if method == "plain":
        x_noise = mean_square_peak(K, outliers=outliers, outlier_std=OUTLIER_STD) / variance
    elif method == "smooth":
        # x has channels and w has columns that are sqrt(OUTLIER_STD) times as large as the rest, and the noise of one
        # is multiplied by the other
        power = 1 + outliers / K * (OUTLIER_STD - 1)
        x_noise = w_noise = mean_square_peak(K, outliers=outliers, outlier_std=OUTLIER_STD**0.5) * power / variance
    return math.sqrt((x_noise + w_noise) / 12) / 127


@torch.no_grad()
def run(setting: Setting) -> Iterator[Row]:
    quick, device = setting.quick, setting.device
    M, N, K = (32, 64, 256) if quick else (256, 512, 4096)
    seeds = 3 if quick else SEEDS
    sizes = (256,) if quick else (1024, 2048, 4096, 8192) if device == "cuda" else (256, 512, 1024)
    for share in setting.track((0.0, 0.01) if quick else SHARES):
        outliers = round(share * K)
        for method in METHODS:
            yield from [error_row(method, (M, N, K), outliers, seed, device) for seed in range(seeds)]
    for size in setting.track(sizes):
        yield from speed_rows(size, setting)


def error_row(method: str, shape: tuple[int, int, int], outliers: int, seed: int, device: str) -> Row:
    x, w = operands(*shape, outliers, seed, device)
    exact = x.double() @ w.double().T
    y = int8_product(*transformed(method, x, w)).double()
    return {
        "part": "error",
        "method": method,
        "outlier_percent": 100 * outliers / shape[2],
        "seed": seed,
        "error_percent": 100 * float((y - exact).norm() / exact.norm()),
        "predicted_error_percent": 100 * predicted_error(method, shape[2], outliers),
    }


def products(size: int, device: str) -> dict[str, Callable[[], object]]:
    """The product of two square matrices. On a CPU, int8 is that of the serving engine, which rounds x in the call."""
    x, w = operands(size, size, size, 0, 0, device)
    if device == "cpu":
        linear = cpu_int8(w)
        return {"fp32": lambda: x @ w.T, "int8, x rounded": lambda: linear(x)}
    x, w = x.bfloat16(), w.bfloat16()
    (xq, x_scale), (wq, w_scale), rotate = ops.quantize_int8(x), ops.quantize_int8(w), rotation(size, x)

    def round_and_multiply(x: torch.Tensor) -> object:
        q, scale = ops.quantize_int8(x)
        return ops.int8_matmul(q, wq, scale, w_scale)

    return {
        "bf16": lambda: x @ w.T,
        "int8": lambda: ops.int8_matmul(xq, wq, x_scale, w_scale),
        "int8, x rounded": lambda: round_and_multiply(x),
        "int8, x rotated and rounded": lambda: round_and_multiply(rotate(x)),
    }


def speed_rows(size: int, setting: Setting) -> list[Row]:
    seconds, rounds = (0.01, 2) if setting.quick else (0.1, ROUNDS)
    times = round_times(products(size, setting.device), setting.device, seconds=seconds, rounds=rounds)
    base = next(iter(times))
    rows: list[Row] = []
    for way, taken in times.items():
        ratio = of_ratio(times[base], taken)
        rows.append(
            {
                "part": "speed",
                "method": way,
                "size": size,
                "time_us": 1e6 * min(taken),
                "rate_top_per_s": 2 * size**3 / min(taken) / 1e12,
                "speedup": ratio.mean,
                "speedup_low": ratio.low,
                "speedup_high": ratio.high,
            }
        )
    return rows


def errors(rows: Sequence[Row], method: str) -> dict[float, list[float]]:
    """The errors of the seeds, in percent, by the percentage of outlier channels."""
    found: dict[float, list[float]] = {}
    for r in rows:
        if r["part"] == "error" and r["method"] == method:
            found.setdefault(number(r, "outlier_percent"), []).append(number(r, "error_percent"))
    return found


def times_worse(rows: Sequence[Row], method: str) -> dict[float, Interval]:
    """By the percentage of outliers: the error of a method over that of plain rounding without outliers."""
    clean = errors(rows, "plain")[0.0]
    return {share: of_ratio(found, clean) for share, found in errors(rows, method).items() if share > 0}


def prediction_error(rows: Sequence[Row]) -> float:
    """The largest relative difference between a predicted error and the mean of the seeds."""
    guesses = {
        (str(r["method"]), number(r, "outlier_percent")): number(r, "predicted_error_percent")
        for r in rows
        if r["part"] == "error"
    }
    return max(abs(guess / interval(errors(rows, m)[share])[0] - 1) for (m, share), guess in guesses.items())


def verdict(rows: Sequence[Row]) -> Verdict:
    """Three parts: the largest product is twice as fast, outliers harm plain rounding, and the rotation restores it."""
    speed = [r for r in rows if r["part"] == "speed" and str(r["method"]).startswith("int8")]
    largest = max(number(r, "size") for r in speed)
    last = [r for r in speed if number(r, "size") == largest]
    worst = {m: max(times_worse(rows, m).values(), key=lambda i: i.mean) for m in METHODS}
    met = {
        "twice as fast": number(last[0], "speedup_low") >= TWICE,
        "outliers harm": worst["plain"].low >= HARM,
        "a rotation restores": worst["rotate"].high <= RESTORED,
    }
    kind: Kind = "held" if all(met.values()) else "holds only where" if any(met.values()) else "did not hold"
    base = next(str(r["method"]) for r in rows if r["part"] == "speed")
    fast = "; ".join(
        f"{r['method']} ×{number(r, 'speedup'):.2f} ({number(r, 'speedup_low'):.2f}–{number(r, 'speedup_high'):.2f})"
        for r in last
    )
    harm = ", ".join(f"{m} ×{i.mean:.1f} ({i.low:.1f}–{i.high:.1f})" for m, i in worst.items())
    clean = interval(errors(rows, "plain")[0.0])[0]
    missing = ", ".join(words for words, good in met.items() if not good) or "nothing"
    return Verdict(
        kind=kind,
        sentence_en=f"Speed against {base} at {largest:g}³: {fast}. Error without outliers {clean:.2f} %; with the "
        f"worst share of outlier channels, times that: {harm}. The formula predicts every error within "
        f"{prediction_error(rows):.0%}. Not as claimed: {missing}.",
        sentence_zh=f"{largest:g}³ 时相对 {base} 的速度：{fast}。没有离群通道时误差 {clean:.2f} %；在最坏的离群比例下，"
        f"误差是它的：{harm}。公式对每个误差的预测偏差不超过 {prediction_error(rows):.0%}。"
        f"与说法不符的项数：{sum(not good for good in met.values())}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    shares, marks = sorted(errors(rows, "plain")), []
    for i, method in enumerate(METHODS):
        found = [interval(errors(rows, method)[s]) for s in shares]
        own = where(rows, part="error", method=method)
        guess = {number(r, "outlier_percent"): number(r, "predicted_error_percent") for r in own}
        ends, places = [(m - h, m + h) for m, h in found], range(len(shares))
        marks.append(Line(places, [m for m, _ in found], method, "o-", i, ends))
        marks.append(Line(places, [guess[s] for s in shares], "predicted", "_", INK, size=14))
    speed = where(rows, part="speed")
    lines = [Line.of(where(speed, method=way), "size", "speedup", way) for way in names_in(speed, "method")]
    x, y = f"channels of x that are {OUTLIER_STD:g} times as large, %", "error of the output, %"
    names, times = [f"{round(s, 1):g}" for s in shares], "speed, times that of the float product"
    return [
        Panel(marks, "Error against fp64", x, y, yscale="log", xnames=names),
        Panel(lines, "Speed", "M = N = K", times, "log2", ylim=(0, None)),
    ]


LAB = Claim(
    title_en="int8 matmul",
    title_zh="int8 矩阵乘",
    claim_en="An int8 product is twice as fast as a float product. A few outlier channels ruin its accuracy, and a "
    "rotation restores it.",
    claim_zh="int8 矩阵乘比浮点快一倍；少数离群通道会毁掉它的精度，而一次旋转就能恢复。",
    regime="W8A8 with a scale per row of x and of w. Error: 256 × 4,096 activations, 512 outputs, Gaussian. Speed: "
    "square matrices; on a GPU against cuBLAS in bf16, on a CPU against torch in fp32, where int8 is the serving "
    "engine's product.",
    varies=f"Share of channels of x that are {OUTLIER_STD:g} times as large; plain rounding, smoothing, rotation. "
    "Size.",
    measures="Relative error of the output against fp64, with 95 % intervals over five seeds, and its prediction from "
    f"the shape; time over five rounds in turn. Twice: ×{TWICE} or more. Harm: ×{HARM:g} the error or more. Restored: "
    f"×{RESTORED} or less.",
    evidence="timing",
)
