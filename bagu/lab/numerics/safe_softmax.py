"""Safe softmax: does dividing the scores by √d make subtracting the maximum unnecessary?

    naive     p[j] = exp(s[j]) / sum_i exp(s[i])
    safe      p[j] = exp(s[j] - max s) / sum_i exp(s[i] - max s)         bagu.ops.softmax

With q and k of standard deviation σ, a score has a standard deviation of σ²√d, or σ² after the division: √d removes the
head size and leaves σ. exp overflows above ln of the dtype's largest value (11.1 in fp16, 88.7 in bf16 and fp32, 709.8
in fp64). Attention is causal here, as in a decoder: the first rows have few keys, and if all their scores are very
negative, every exp is zero and the row is 0 / 0.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, names_in, number, numbers_in, where
from bagu.lab.plot import Heat, Panel

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
OFF_BY = 0.1  # a row whose sum differs from 1 by this much is broken; rounding stays below 0.01


def run(setting: Setting) -> Iterator[Row]:
    stds = (1, 2, 5, 20) if setting.quick else (1, 1.5, 2, 3, 5, 7, 10, 14, 20, 50)
    sizes = (64,) if setting.quick else (16, 64, 128, 256)
    tokens = 128 if setting.quick else 512
    points = list(product(sizes, stds, DTYPES, (True, False)))
    for d, std, dtype, divided in setting.track(points):
        s = scores(d, std, tokens, DTYPES[dtype], setting.device, divided=divided)
        yield {"head_size": d, "std": std, "dtype": dtype, "divided": divided, **compare(s)}


def scores(d: int, std: float, tokens: int, dtype: torch.dtype, device: str, *, divided: bool) -> torch.Tensor:
    """Attention scores of random q and k. They are exact in fp64 except for the last rounding, to `dtype`."""
    generator = torch.Generator().manual_seed(d)  # the same q and k for every std, dtype and division
    q, k = (std * torch.randn(2, tokens, d, generator=generator, dtype=torch.float64)).to(dtype).double().unbind()
    return (q @ k.T / (d**0.5 if divided else 1)).to(dtype).to(device)


def naive_softmax(s: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and their denominator, both in the dtype of `s`."""
    e = torch.exp(s).masked_fill(~seen, 0)
    total = e.sum(-1, keepdim=True)
    return (e / total).masked_fill(~seen, 0), total[:, 0]


def compare(s: torch.Tensor) -> Row:
    """Both softmaxes on the same scores, compared with fp64. Errors are of probabilities, over correct rows."""
    lengths = torch.arange(1, s.shape[0] + 1, device=s.device)
    seen = torch.arange(s.shape[1], device=s.device) < lengths[:, None]
    truth = torch.softmax(s.double().masked_fill(~seen, -torch.inf), -1)
    fits = (s.isfinite() | ~seen).all(-1)  # undivided scores can exceed fp16's 65,504
    p, total = naive_softmax(s, seen)
    safe = ops.softmax(s, lengths=lengths)
    broken, safe_broken = is_broken(p), is_broken(safe)
    return {
        "score_std": s.double()[seen & fits[:, None]].std().item(),
        "rows": s.shape[0],
        "overflow_percent": 100 * (~total.isfinite()).double().mean().item(),
        "underflow_percent": 100 * (total == 0).double().mean().item(),
        "naive_broken_percent": 100 * broken.double().mean().item(),
        "safe_broken_percent": 100 * safe_broken[fits].double().mean().item() if fits.any() else None,
        "naive_max_error": max_error(p, truth, fits & ~broken),
        "safe_max_error": max_error(safe, truth, fits & ~safe_broken),
    }


def is_broken(p: torch.Tensor) -> torch.Tensor:
    """Rows that are not a distribution: a value is not finite, or the sum is not 1."""
    return ~((p.double().sum(-1) - 1).abs() < OFF_BY)


def max_error(p: torch.Tensor, truth: torch.Tensor, rows: torch.Tensor) -> float | None:
    return (p.double() - truth)[rows].abs().max().item() if rows.any() else None


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if no row of the naive softmax breaks after the division; holds only where, if some dtype never breaks."""
    divided = [row for row in rows if row["divided"]]
    first = {dtype: breaks_from(divided, dtype) for dtype in dict.fromkeys(str(row["dtype"]) for row in divided)}
    broken = {dtype: std for dtype, std in first.items() if std is not None}
    safe = sum(number(row, "safe_broken_percent") > 0 for row in divided)
    tail_en = f"Subtracting the maximum breaks rows at {safe} of {len(divided)} points."
    tail_zh = f"减去最大值之后，{len(divided)} 个测点中有 {safe} 个出错。"
    if not broken:
        clean = "No row breaks in any dtype at any scale if the scores are divided by √d"
        return Verdict(
            kind="held", sentence_en=f"{clean}. {tail_en}", sentence_zh=f"除以 √d 后没有任何一行出错。{tail_zh}"
        )
    kind: Kind = "did not hold" if len(broken) == len(first) else "holds only where"
    listed = ", ".join(f"{std:g} in {dtype}" for dtype, std in broken.items())
    listed_zh = "，".join(f"{dtype} 为 {std:g}" for dtype, std in broken.items())
    rest = [dtype for dtype in first if dtype not in broken]
    clean_en = f"; {', '.join(rest)} did not break in this range" if rest else ""
    clean_zh = f"；{'、'.join(rest)} 在此范围内没有出错" if rest else ""
    return Verdict(
        kind=kind,
        sentence_en=f"Divided by √d, the naive softmax gives inf or NaN from a standard deviation of q and k of "
        f"{listed}{clean_en}. {tail_en}",
        sentence_zh=f"除以 √d 后，直接计算的 softmax 出现 inf 或 NaN 的 q、k 标准差起点："
        f"{listed_zh}{clean_zh}。{tail_zh}",
    )


def breaks_from(rows: Sequence[Row], dtype: str) -> float | None:
    """The smallest std at which a row breaks in `dtype`; None if none does."""
    broken = [number(r, "std") for r in rows if r["dtype"] == dtype and number(r, "naive_broken_percent") > 0]
    return min(broken, default=None)


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Broken rows of the naive softmax by dtype and std, of the worst head size."""
    panels = []
    for divided, title in ((True, "Broken rows, %: scores divided by √d"), (False, "Scores not divided")):
        dtypes, stds = names_in(rows, "dtype"), numbers_in(rows, "std")
        heat = [
            [max(column(where(rows, divided=divided, dtype=d, std=s), "naive_broken_percent")) for s in stds]
            for d in dtypes
        ]
        panels.append(Panel([Heat(heat)], title, "std of q and k", xnames=[f"{s:g}" for s in stds], ynames=dtypes))
    return panels


LAB = Claim(
    title_en="Safe softmax",
    title_zh="安全的 softmax",
    claim_en="Dividing the scores by √d makes subtracting the maximum unnecessary.",
    claim_zh="注意力分数除以 √d 之后，softmax 就不必再减去最大值。",
    regime="Causal attention scores of normal q and k; softmax computed in the dtype itself, sums included.",
    varies="dtype (fp16, bf16, fp32, fp64), standard deviation of q and k (1 to 50), head size, divided by √d or not.",
    measures="Fraction of rows that are not a distribution (inf, NaN or a sum off by 0.1), by overflow and underflow; "
    "largest error of a probability relative to fp64, of the naive softmax and of bagu.ops.softmax on the same scores.",
)
