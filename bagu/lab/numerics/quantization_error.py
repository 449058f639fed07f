"""Quantization error: what a weight loses in int8, int4 and fp8, by how many values share a scale.

    error = |W - Q(W)| / |W|        output error = |x W' - x Q(W)'| / |x W'|        both in fp64, over all elements

Before the measurement, two formulas predict the error of Gaussian weights:

    int    a step adds noise of variance step^2 / 12; a step is the largest of the n values that share a scale
           (rounding_noise.py) over 127 for int8, over 8 for int4
    fp8    e4m3 has 3 bits of mantissa: its step is relative to the value, so n does not matter. With mantissas f
           that are log-uniform in [1, 2) the error is 2^-3 / sqrt(12 E[f^2]), E[f^2] = 3 / (2 ln 2)

The rounding errors of a row are independent of each other and of x, so the output error is predicted to equal the
error of the weight.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, number
from bagu.lab.parts.confidence import interval, of_ratio
from bagu.lab.parts.library_models import new_model, read_library, train
from bagu.lab.parts.rounding_noise import mean_square_peak
from bagu.lab.plot import INK, Line, Panel
from bagu.nn.linear import Linear
from bagu.ops.kv_write.quantize import dequantize, quantize

FORMATS = {"int8": 127, "int4": 8, "fp8": None}  # the steps up to the largest value; fp8's are relative
GROUP = 128
OUTPUT = "output_error_percent"
SHARING = ("tensor", "row", "group")  # the values that share a scale
SCALE_BITS = 32
OUTLIERS, OUTLIER_SHARE = 20.0, 0.001  # magnitude, and share of the weights
SEEDS, TOKENS = 5, 64
STEPS, WIDTH = 150, 256  # of the trained model
FINER = 1.05  # a finer scale helps if it divides the error by this, with 95 % confidence


def shared_by(sharing: str, shape: torch.Size) -> int:
    """The number of values that share a scale."""
    return {"tensor": shape.numel(), "row": shape[1], "group": GROUP}[sharing]


def rounded(w: torch.Tensor, form: str, sharing: str) -> torch.Tensor:
    """w[N, K] rounded to the format and back, in fp64."""
    rows = w.float().reshape(-1, shared_by(sharing, w.shape))
    if form == "int8":
        values, scale = ops.quantize_int8(rows)
        back = values.double() * scale.double().unsqueeze(1)
    elif form == "fp8":
        values, scale = quantize(rows, torch.float8_e4m3fn)
        back = dequantize(values.float(), scale.double())
    else:
        back = _int4(rows)
    return back.reshape(w.shape)


def _int4(rows: torch.Tensor) -> torch.Tensor:
    """As `ops.quantize_int4`, for rows of any length: the largest value of a row is -8 or 8 steps."""
    scale = rows.gather(1, rows.abs().argmax(1, keepdim=True)) / -8
    steps = torch.where(scale != 0, rows / scale, 0.0).add(8).round().clamp(0, 15)
    return ((steps - 8) * scale).double()


def weight_bits(form: str, sharing: str, shape: torch.Size) -> float:
    """Bits of a weight with its share of a scale."""
    return (4 if form == "int4" else 8) + SCALE_BITS / shared_by(sharing, shape)


def predicted(form: str, values: int) -> float:
    """The error of Gaussian weights of which `values` share a scale."""
    steps = FORMATS[form]
    if steps is None:
        return 2**-3 / math.sqrt(12 * 3 / (2 * math.log(2)))
    return math.sqrt(mean_square_peak(values) / 12) / steps


def relative(error: torch.Tensor, exact: torch.Tensor) -> float:
    return float(error.norm() / exact.norm())


def gaussian(shape: tuple[int, int], seed: int, *, outliers: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[1] ** 0.5
    if outliers:
        w = torch.where(torch.rand(shape, generator=generator) < OUTLIER_SHARE, OUTLIERS * w, w)
    return w


def model_weights(*, quick: bool, device: str) -> tuple[str, list[torch.Tensor]]:
    """The name and the linear weights of a small decoder: trained on the standard library, or new in a quick run."""
    model = new_model(width=WIDTH, seed=0, device=device)
    if not quick:
        train(model, read_library(quick=True).train_tokens, steps=STEPS, seed=0)
    found = [m.weight.detach().double() for m in model.blocks.modules() if isinstance(m, Linear)]
    return "new model" if quick else "trained model", found[:SEEDS]


def run(setting: Setting) -> Iterator[Row]:
    shape = (128, 512) if setting.quick else (1024, 4096)
    seeds = 3 if setting.quick else SEEDS
    weights = {
        "Gaussian": [gaussian(shape, seed, outliers=False) for seed in range(seeds)],
        "with outliers": [gaussian(shape, seed, outliers=True) for seed in range(seeds)],
    }
    name, trained = model_weights(quick=setting.quick, device=setting.device)
    weights[name] = trained
    for kind in setting.track(list(weights)):
        samples = [w.to(setting.device) for w in weights[kind]]
        inputs = [_inputs(w, seed) for seed, w in enumerate(samples)]
        for form in FORMATS:
            for sharing in SHARING:
                yield from [
                    {"weights": kind, "sample": i, **errors(w, x, form, sharing)}
                    for i, (w, x) in enumerate(zip(samples, inputs, strict=True))
                ]


def _inputs(w: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100)
    return torch.randn(TOKENS, w.shape[1], generator=generator, dtype=torch.float64).to(w.device)


def errors(w: torch.Tensor, x: torch.Tensor, form: str, sharing: str) -> Row:
    back = rounded(w, form, sharing)
    exact = x @ w.T
    return {
        "format": form,
        "scale_per": sharing,
        "weight_bits": weight_bits(form, sharing, w.shape),
        "error_percent": 100 * relative(w - back, w),
        "output_error_percent": 100 * relative(exact - x @ back.T, exact),
        "predicted_error_percent": 100 * predicted(form, shared_by(sharing, w.shape)),
    }


def select(rows: Sequence[Row], weights: str, form: str, sharing: str) -> list[Row]:
    return [r for r in rows if (r["weights"], r["format"], r["scale_per"]) == (weights, form, sharing)]


def kinds(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(r["weights"]) for r in rows))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if both finer scales divide the output error by FINER or more, in every format and for all weights."""
    helps: dict[tuple[str, str, str], float] = {}
    for weights in kinds(rows):
        for form in FORMATS:
            for coarse, fine in (SHARING[:2], SHARING[1:]):
                a, b = (column(select(rows, weights, form, s), OUTPUT) for s in (coarse, fine))
                helps[weights, form, f"{coarse} to {fine}"] = of_ratio(a, b).low
    good = {key for key, low in helps.items() if low >= FINER}
    kind: Kind = "held" if len(good) == len(helps) else "holds only where" if good else "did not hold"
    counts = {form: (sum(k[1] == form for k in good), sum(k[1] == form for k in helps)) for form in FORMATS}
    each = "; ".join(f"{form} {n} of {total}" for form, (n, total) in counts.items())
    each_zh = "；".join(f"{form} {total} 种情形中的 {n} 种" for form, (n, total) in counts.items())
    last = kinds(rows)[-1]
    table = ", ".join(
        f"{form} " + "/".join(f"{interval(column(select(rows, last, form, s), OUTPUT))[0]:.2g}" for s in SHARING)
        for form in FORMATS
    )
    off = deviation(rows)
    same = max(abs(number(r, "output_error_percent") / number(r, "error_percent") - 1) for r in rows)
    return Verdict(
        kind=kind,
        sentence_en=f"A finer scale divides the output error by {FINER} or more (95 % confidence) in: {each}. Output "
        f"error of the {last} in %, a scale per tensor/row/group of {GROUP}: {table}. The formulas predict the error "
        f"of Gaussian weights within {off:.0%}; the output error differs from the weight's by at most {same:.0%}.",
        sentence_zh=f"更细的缩放使输出误差减小到 1/{FINER} 以下（95 % 置信）的情形：{each_zh}。{last} 的输出误差（%，"
        f"每张量/每行/每 {GROUP} 个一个缩放）：{table}。公式预测高斯权重的误差，偏差不超过 {off:.0%}；"
        f"输出误差与权重误差至多相差 {same:.0%}。",
    )


def deviation(rows: Sequence[Row]) -> float:
    """The largest relative difference between the predicted and the measured error of Gaussian weights."""
    gauss = [r for r in rows if r["weights"] == "Gaussian"]
    return max(abs(number(r, "predicted_error_percent") / number(r, "error_percent") - 1) for r in gauss)


def plot(rows: Sequence[Row]) -> list[Panel]:
    panels: list[Panel] = []
    places = range(len(SHARING))
    for weights in kinds(rows):
        marks = []
        for i, form in enumerate(FORMATS):
            found = [interval(column(select(rows, weights, form, s), OUTPUT)) for s in SHARING]
            ends = [(m - h, m + h) for m, h in found]
            marks.append(Line(places, [m for m, _ in found], form, "o-", i, ends))
            if weights == "Gaussian":
                guess = [column(select(rows, weights, form, s), "predicted_error_percent")[0] for s in SHARING]
                marks.append(Line(places, guess, "predicted", "_", INK, size=14))
        names, y = [*SHARING[:2], f"{GROUP} values"], "" if panels else "output error, %"
        panels.append(Panel(marks, weights, "a scale per", y, yscale="log", xnames=names, legend="below", share_y=True))
    return panels


LAB = Claim(
    title_en="Quantization error",
    title_zh="量化误差",
    claim_en="The finer the scales, the smaller the error: a scale per row beats one per tensor, and one per group of "
    "128 values beats one per row, in every format.",
    claim_zh="缩放越细，误差越小：每行一个缩放好于每张量一个，每 128 个值一个又好于每行一个，任何格式都如此。",
    regime=f"Weights rounded to nearest with symmetric scales, products in fp64 with {TOKENS} Gaussian inputs. "
    f"Weights: Gaussian; the same with {OUTLIER_SHARE:.1%} of them times {OUTLIERS:g}; the linear layers of a decoder "
    f"of width {WIDTH} after {STEPS} steps on the standard library (untrained in a quick run).",
    varies="Format: int8, int4, fp8 (e4m3). Values that share a scale: the tensor, a row, a group of 128.",
    measures="Relative error of the weight and of the layer's output against fp64, and the predicted error; 95 % "
    "intervals over five seeds or layers.",
)
