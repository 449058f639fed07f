"""Pipeline bubbles: the idle share of ranks, measured from timestamps, against the formula.

    gpipe, 1f1b    (p - 1) / (m + p - 1)          p ranks, m micro-batches
    interleaved    (p - 1) / (v m + p - 1)        v = 2 stages per rank
    zero_bubble    below 1f1b                     ZBV: the backward for the weights fills the gaps

Two processes run real steps of a small model with bagu.parallel.pipeline. A step's idle share is 1 minus the time in
forwards and backwards, over the time from the first start to the last end; the row has the least of the repeated steps,
because other load on the machine only adds idle time. Each process needs a core of its own.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import get_args

import torch

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, names_in, number, where
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel
from bagu.nn import Transformer, init_weights
from bagu.parallel.local_ranks import on_ranks
from bagu.parallel.mesh import MeshConfig, open_mesh
from bagu.parallel.model_parallel import apply
from bagu.parallel.pipeline import Action, Pipeline, Schedule, bubble
from bagu.types import Batch

RANKS, VOCAB = 2, 64
CLOSE = 0.1  # a measured share this close to the formula agrees with it


def run(setting: Setting) -> Iterator[Row]:
    counts = (2, 4) if setting.quick else (2, 4, 8, 16)
    points = list(product(get_args(Schedule), counts))
    size = (64, 64, 1) if setting.quick else (256, 512, 6)
    results = on_ranks(RANKS, steps, points, *size)
    for i, (schedule, m) in enumerate(setting.track(points)):
        shares = [bubble(ranks) for ranks in zip(*(result[i] for result in results), strict=True)]
        yield {
            "schedule": schedule,
            "micro_batches": m,
            "idle_share": min(shares),
            "formula_share": expected(schedule, m),
            "steps": len(shares),
        }


def expected(schedule: Schedule, m: int) -> float | None:
    """The idle share by the formula; None if there is none."""
    stages = {"gpipe": 1, "1f1b": 1, "interleaved": 2}.get(schedule)
    return None if stages is None else (RANKS - 1) / (stages * m + RANKS - 1)


def steps(points: Sequence[tuple[Schedule, int]], width: int, tokens: int, repeats: int) -> list[list[list[Action]]]:
    """On each rank: what it did in each measured step of each point."""
    mesh = open_mesh(MeshConfig(pp=RANKS), torch.device("cpu"))
    config = tiny(VOCAB, width, layers=8, heads=width // 16, ffn=3 * width, max_len=tokens)
    found = []
    for schedule, m in points:
        parallel = apply(init_weights(Transformer(config), 0), mesh, context=tokens, schedule=schedule)
        pipeline = Pipeline(parallel.stages, mesh, schedule=schedule, micro_batches=m, tokens=tokens)
        recorded = []
        for _ in range(1 + repeats):  # the first step also connects the ranks and allocates
            pipeline.step([batch(tokens)] * m, loss)
            recorded.append(list(pipeline.actions))
        found.append(recorded[1:])
    return found


def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ops.token_losses(*ops.linear_cross_entropy(hidden, weight, targets)).loss.sum()


def batch(tokens: int) -> Batch:
    ids = torch.arange(tokens) % VOCAB
    return Batch(
        ids=ids,
        targets=ids,
        positions=torch.arange(tokens),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        max_len=tokens,
        num_targets=tokens,
        target_bytes=0,
    )


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if every schedule with a formula is close to it."""
    known = [row for row in rows if row["formula_share"] is not None]
    off = [abs(number(row, "idle_share") - number(row, "formula_share")) for row in known]
    close = [row for row, error in zip(known, off, strict=True) if error <= CLOSE]
    kind: Kind = "held" if len(close) == len(known) else "holds only where" if close else "did not hold"
    plain = {row["micro_batches"]: number(row, "idle_share") for row in rows if row["schedule"] == "1f1b"}
    zero = [row for row in rows if row["schedule"] == "zero_bubble"]
    fewer = sum(number(row, "idle_share") < plain[row["micro_batches"]] for row in zero)
    return Verdict(
        kind=kind,
        sentence_en=f"The idle share is within {CLOSE:g} of the formula at {len(close)} of {len(known)} points, "
        f"and the largest difference is {max(off):.2f}. Zero-bubble is idle less than 1f1b at {fewer} of {len(zero)}.",
        sentence_zh=f"{len(known)} 个测点中有 {len(close)} 个的空闲比例与公式相差不超过 {CLOSE:g}，"
        f"最大相差 {max(off):.2f}。零气泡调度在 {len(zero)} 个测点中有 {fewer} 个比 1F1B 空闲更少。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    marks = []
    for i, schedule in enumerate(names_in(rows, "schedule")):
        own = where(rows, schedule=schedule)
        marks.append(Line.of(own, "micro_batches", "idle_share", schedule, "o-", i))
        marks.append(Line.of(own, "micro_batches", "formula_share", "", "--", i))
    return [Panel(marks, "Idle share (dashed: formula)", "micro-batches", "idle share", ylim=(0, None))]


LAB = Claim(
    title_en="Pipeline bubbles",
    title_zh="流水线气泡",
    claim_en="A pipeline is idle for (p - 1) / (m + p - 1) of its time, and interleaved stages divide the bubble.",
    claim_zh="流水线的空闲比例为 (p - 1) / (m + p - 1)，交错的阶段使气泡成倍缩小。",
    regime="A Llama of 8 layers in fp32 on 2 processes of one machine, Gloo; stages cut by predicted cost.",
    varies="schedule, number of micro-batches",
    measures="idle share of both ranks from the timestamps of every forward and backward",
    evidence="timing",
)
