"""3D parallelism or FSDP: what the planner predicts for 2^k GPUs, and where one overtakes the other.

    FSDP    ZeRO-3 over all GPUs, or inside nodes with replicas: no tensor, pipeline or context parallelism
    3D      tensor or pipeline parallelism, with any ZeRO stage

The global batch is fixed, so more GPUs have fewer tokens each: FSDP gathers all weights for less and less work, and it
cannot have more ranks than sequences.
"""

from collections.abc import Sequence

import numpy as np

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, names_in, number, where
from bagu.lab.parallel.what_limits import SEQ, best_plan, rows_by_size
from bagu.lab.plot import Line, Mark, Panel, Rule
from bagu.parallel.plan import Plan

BATCH = 1024  # 8.4M tokens per step
SIZES = tuple(2**k for k in range(3, 14))
CLEAR = 1.02  # a smaller advantage is a tie


def run(setting: Setting) -> list[Row]:
    return rows_by_size(setting, SIZES[::2] if setting.quick else SIZES, measured)


def measured(name: str, gpus: int) -> Row | None:
    """The best layouts of both kinds; None if nothing fits on so few GPUs."""
    plan = best_plan(name, gpus, BATCH)
    if plan is None:
        return None
    x = plan.considered
    flat = (x.tp == 1) & (x.pp == 1) & (x.cp == 1)
    fsdp, three = fastest(plan, flat & (x.zero == 3)), fastest(plan, (x.tp > 1) | (x.pp > 1))
    return {
        "model": name,
        "gpus": gpus,
        "fsdp_step_s": fsdp,
        "three_d_step_s": three,
        "best": plan.winner.layout.words(),
        "best_step_s": plan.winner.step_s,
    }


def fastest(plan: Plan, mask: np.ndarray) -> float | None:
    """Seconds of the fastest layout in `mask` that fits."""
    inside = mask[plan.fits]
    return float(plan.times.total[inside].min()) if inside.any() else None


def crossing(rows: Sequence[Row], model: str) -> int | None:
    """The smallest number of GPUs from which 3D is faster by CLEAR at every larger number."""
    found = None
    for row in reversed([row for row in rows if row["model"] == model]):
        if row["three_d_step_s"] is None:
            break
        if row["fsdp_step_s"] is not None and number(row, "fsdp_step_s") < CLEAR * number(row, "three_d_step_s"):
            break
        found = int(number(row, "gpus"))
    return found


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if, for every model, FSDP is not slower on the fewest GPUs and 3D is faster on the most."""
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    points = {model: crossing(rows, model) for model in models}
    starts = {model: next(row for row in rows if row["model"] == model) for model in models}
    small = {
        model: row["fsdp_step_s"] is not None
        and (row["three_d_step_s"] is None or number(row, "fsdp_step_s") <= CLEAR * number(row, "three_d_step_s"))
        for model, row in starts.items()
    }
    good = [model for model in models if small[model] and points[model] is not None]
    kind: Kind = "held" if len(good) == len(models) else "holds only where" if good else "did not hold"
    parts = [f"{m}: from {points[m]} GPUs" if points[m] else f"{m}: never" for m in models]
    first = [m for m in models if not small[m]]
    less = f" On the fewest GPUs, FSDP is not the fastest for {', '.join(first)}." if first else ""
    less_zh = f"GPU 最少时，FSDP 对 {'、'.join(first)} 并非最快。" if first else ""
    zh = [f"{m} 从 {points[m]} 张起" if points[m] else f"{m} 从不" for m in models]
    return Verdict(
        kind=kind,
        sentence_en=f"With {BATCH} sequences of {SEQ} tokens per step, 3D is at least {100 * (CLEAR - 1):.0f} % faster "
        f"than FSDP ({'; '.join(parts)}).{less} These are predictions; `bagu plan validate` says how good they are.",
        sentence_zh=f"每步 {BATCH} 条 {SEQ} token 的序列时，3D 比 FSDP 至少快 {100 * (CLEAR - 1):.0f} %："
        f"{'；'.join(zh)}。{less_zh}这些是预测值，误差见 `bagu plan validate`。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    panels = []
    for i, model in enumerate(names_in(rows, "model")):
        marks: list[Mark] = []
        for key, label, colour in (("fsdp_step_s", "FSDP", 1), ("three_d_step_s", "3D", 0)):
            own = [r for r in where(rows, model=model) if r[key] is not None]
            hours = [number(r, key) * number(r, "gpus") / 3600 for r in own]
            marks.append(Line(column(own, "gpus"), hours, label, "o-", colour))
        point = crossing(rows, model)
        if point is not None:
            marks.append(Rule(point, f"crossing: {point} GPUs", "x", colour=3))
        panels.append(Panel(marks, model, "GPUs", "" if i else "GPU-hours per step", "log", "log"))
    return panels


LAB = Claim(
    title_en="3D parallelism or FSDP",
    title_zh="3D 并行还是 FSDP",
    claim_en="FSDP is the fastest layout on few GPUs, and 3D parallelism on many.",
    claim_zh="GPU 少时 FSDP 最快，GPU 多时 3D 并行最快。",
    regime="Llama-3 shapes on H100 nodes of 8 with 50 GB/s of network per GPU; 1,024 sequences of 8,192 tokens per "
    "step, bf16; the step times are the planner's predictions.",
    varies="Number of GPUs (8 to 8,192) and the model (8B, 70B, 405B).",
    measures="Step time of the fastest FSDP layout (ZeRO-3, also with replicas) and of the fastest layout with tensor "
    "or pipeline parallelism, and from how many GPUs the second is faster.",
)
