"""What limits a training step: the share of computation, memory and links in the best layout, against scale.

computation   products, attention, elementwise kernels
memory        recomputation, which only a lack of memory forces, and the optimizer's traffic
links         communication that computation does not hide
idle          pipeline bubble and host
"""

from collections.abc import Callable, Sequence

from bagu.errors import BaguError
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, names_in, number, where
from bagu.lab.plot import Panel, Stack
from bagu.parallel.plan import Plan, best
from bagu.parallel.planner.cluster import CLUSTERS
from bagu.parallel.planner.layouts import Workload
from bagu.parallel.planner.models import MODELS

BATCH = 2048
SIZES = tuple(2**k for k in range(3, 15))
GROUPS = {
    "compute": ("compute",),
    "memory": ("recompute", "optimizer"),
    "links": ("tp", "cp", "ep", "p2p", "dp"),
    "idle": ("bubble", "host"),
}
SHARE = "{}_percent".format


SEQ = 8192
NAMES = ("llama3-8b", "llama3-70b", "llama3-405b")


def best_plan(name: str, gpus: int, batch: int) -> Plan | None:
    """The best plan for a step of `batch` sequences of SEQ tokens on H100; None if nothing fits on so few GPUs."""
    try:
        return best(Workload(model=MODELS[name], seq=SEQ, batch=batch), CLUSTERS["h100"], gpus)
    except BaguError:
        return None


def rows_by_size(setting: Setting, sizes: Sequence[int], measured: Callable[[str, int], Row | None]) -> list[Row]:
    """`measured` of each model on each number of GPUs, where a layout fits."""
    names = NAMES[:2] if setting.quick else NAMES
    points = [(name, gpus) for name in names for gpus in sizes]
    rows = (measured(name, gpus) for name, gpus in setting.track(points))
    return [row for row in rows if row is not None]


def run(setting: Setting) -> list[Row]:
    return rows_by_size(setting, SIZES[::3] if setting.quick else SIZES, measured)


def measured(name: str, gpus: int) -> Row | None:
    """The shares in the best layout; None if nothing fits."""
    plan = best_plan(name, gpus, BATCH)
    if plan is None:
        return None
    winner = plan.winner
    shares = {
        SHARE(group): 100 * sum(winner.seconds[part] for part in parts) / winner.step_s
        for group, parts in GROUPS.items()
    }
    layout: Row = {"model": name, "gpus": gpus, "layout": winner.layout.words(), "mfu_percent": 100 * winner.mfu}
    return layout | shares


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if links and idle time together exceed computation on the most GPUs, for every model."""
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    last = {model: [row for row in rows if row["model"] == model][-1] for model in models}
    first = {model: next(row for row in rows if row["model"] == model) for model in models}
    lost = {m: number(row, SHARE("links")) + number(row, SHARE("idle")) for m, row in last.items()}
    over = [m for m in models if lost[m] > number(last[m], SHARE("compute"))]
    kind: Kind = "held" if len(over) == len(models) else "holds only where" if over else "did not hold"
    begin = {m: number(row, SHARE("links")) + number(row, SHARE("idle")) for m, row in first.items()}
    few, many = ({m: row["gpus"] for m, row in rows_of.items()} for rows_of in (first, last))
    texts = [
        f"{m}: links and idle time {begin[m]:.0f} % on {few[m]} GPUs and {lost[m]:.0f} % on {many[m]}" for m in models
    ]
    zh = [f"{m} 的通信与空闲在 {few[m]} 张时占 {begin[m]:.0f} %，{many[m]} 张时占 {lost[m]:.0f} %" for m in models]
    return Verdict(
        kind=kind,
        sentence_en=f"In the best layout: {'; '.join(texts)}. More than computation: {', '.join(over) or 'no model'}.",
        sentence_zh=f"最优布局中：{'；'.join(zh)}。超过计算的有：{'、'.join(over) or '无'}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    panels = []
    for i, model in enumerate(names_in(rows, "model")):
        own = where(rows, model=model)
        layers = Stack(column(own, "gpus"), {group: column(own, SHARE(group)) for group in GROUPS})
        y = "" if i else "share of the step, %"
        panels.append(Panel([layers], model, "GPUs", y, "log", ylim=(0, 100), legend="none" if i else "inside"))
    return panels


LAB = Claim(
    title_en="What limits a training step",
    title_zh="训练一步受什么限制",
    claim_en="On many GPUs, communication and idle time take more of a step than computation.",
    claim_zh="GPU 很多时，通信与空闲占一步的时间多于计算。",
    regime="Llama-3 shapes on H100 nodes of 8 with 50 GB/s of network per GPU; 2,048 sequences of 8,192 tokens per "
    "step, bf16; the fastest layout by the planner at each size.",
    varies="Number of GPUs (8 to 16,384) and the model (8B, 70B, 405B).",
    measures="The predicted share of computation, memory (recomputation, optimizer), links (communication that is not "
    "hidden) and idle time (bubble, host).",
)
