"""LayerNorm, RMSNorm and ScaleNorm by bagu.ops: do fewer statistics make a norm faster?"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from bagu import ops
from bagu.lab.core import Claim, Row, Setting, Verdict, listed, names_in, number, numbers_in, say, share_met, where
from bagu.lab.parts.interleaved import best_times
from bagu.lab.plot import Line, Panel

FASTER = 1.1


@torch.no_grad()
def run(setting: Setting) -> Iterator[Row]:
    gpu = setting.device == "cuda"
    dtype, n = (torch.bfloat16, 4096) if gpu else (torch.float32, 1024)
    counts = (1, 64, 16384) if gpu else (1, 64, 2048)
    for rows in setting.track(counts[:2] if setting.quick else counts):
        x = torch.randn(rows, n, device=setting.device, dtype=dtype)
        w, b, g = (torch.ones(size, device=setting.device, dtype=dtype) for size in (n, n, 1))
        ways: dict[str, Callable[[], object]] = {
            "LayerNorm": partial(ops.layer_norm, x, w, b, 1e-5),
            "RMSNorm": partial(ops.rms_norm, x, w, 1e-5),
            "ScaleNorm": partial(ops.scale_norm, x, g),
        }
        found = best_times(ways, setting.device, seconds=0.02 if setting.quick else 0.2)
        for name, seconds in found.items():
            size = 2 * x.numel() * x.element_size()
            yield {"name": name, "count": rows, "time_us": 1e6 * seconds, "gb_per_s": size / seconds / 1e9}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if RMSNorm is FASTER than LayerNorm at every number of rows."""
    gain = {}
    for count in numbers_in(rows, "count"):
        times = {str(r["name"]): number(r, "time_us") for r in where(rows, count=count)}
        gain[int(count)] = (times["LayerNorm"] / times["RMSNorm"], times["LayerNorm"] / times["ScaleNorm"])
    return Verdict.say(
        share_met(rms >= FASTER for rms, _ in gain.values()),
        "LayerNorm's time over RMSNorm's and ScaleNorm's: {each}.",
        "LayerNorm 的用时与 RMSNorm、ScaleNorm 之比：{each}。",
        each=listed(
            say("×{r:.2f} / ×{s:.2f} ({n:,} rows)", "×{r:.2f} / ×{s:.2f}（{n:,} 行）", r=rms, s=scale, n=n)
            for n, (rms, scale) in gain.items()
        ),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = [Line.of(where(rows, name=name), "count", "gb_per_s", name) for name in names_in(rows, "name")]
    return [Panel(lines, "Norms by bagu.ops", "rows", "GB/s, read and written", "log2", "log")]


LAB = Claim(
    title_en="Speed of norms",
    title_zh="归一化的速度",
    claim_en="RMSNorm is used because it is faster than LayerNorm.",
    claim_zh="用 RMSNorm 是因为它比 LayerNorm 快。",
    regime="Forward. A GPU: bf16, 4,096 features, bagu's fused kernels; a CPU: fp32, 1,024 features, PyTorch's "
    "functions.",
    varies="The norm; rows, 1 to 16,384 (CPU: 2,048).",
    measures=f"Best of three medians in turn. Faster: ×{FASTER} or more at every number of rows.",
    evidence="timing",
)
