"""Pipeline bytes: what two stages send each other, beside what data parallelism sends for the same model.

    pipeline   2 · tokens · D numbers for each boundary and micro-batch: activations forward, gradients back
    data       2 · P · (n − 1) / n numbers for each rank and step: the all-reduce of the gradients

Two processes run real steps of a small decoder with bagu.parallel.pipeline, and the bytes are those of its messages.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, column, number, numbers_in, where
from bagu.lab.parallel.pipeline_bubbles import RANKS, VOCAB, batch, loss
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.parallel.collectives import all_reduce
from bagu.parallel.local_ranks import on_ranks
from bagu.parallel.mesh import MeshConfig, open_mesh
from bagu.parallel.model_parallel import apply
from bagu.parallel.pipeline import Pipeline

ITEM = 4  # bytes: fp32
Point = tuple[int, int, int]  # width, tokens of a micro-batch, micro-batches


def shape(width: int, tokens: int) -> ModelConfig:
    return tiny(VOCAB, width, layers=4, heads=width // 16, ffn=3 * width, max_len=tokens)


def sent(points: Sequence[Point]) -> list[tuple[int, int]]:
    """On each rank: the bytes of a step as a pipeline, and those of the gradients' all-reduce."""
    found = []
    for width, tokens, m in points:
        mesh = open_mesh(MeshConfig(pp=RANKS), torch.device("cpu"))
        parallel = apply(init_weights(Transformer(shape(width, tokens)), 0), mesh, context=tokens, schedule="1f1b")
        pipeline = Pipeline(parallel.stages, mesh, schedule="1f1b", micro_batches=m, tokens=tokens)
        before = mesh.traffic.sent
        pipeline.step([batch(tokens)] * m, loss)
        staged = mesh.traffic.sent - before
        mesh = open_mesh(MeshConfig(dp=RANKS), torch.device("cpu"))
        for p in Transformer(shape(width, tokens), device="meta").parameters():
            all_reduce(mesh, torch.zeros(p.shape), "dp")
        found.append((staged, mesh.traffic.sent))
    return found


def run(setting: Setting) -> Iterator[Row]:
    widths, lengths, counts = ((32,), (32, 128), (2,)) if setting.quick else ((64, 256), (64, 256, 1024), (2, 8))
    points: list[Point] = list(product(widths, lengths, counts))
    results = on_ranks(RANKS, sent, points)
    for i, (width, tokens, m) in enumerate(setting.track(points)):
        yield {
            "width": width,
            "tokens": tokens,
            "micro_batches": m,
            "pipeline_bytes": sum(result[i][0] for result in results),
            "pipeline_formula_bytes": 2 * m * tokens * width * ITEM * (RANKS - 1),
            "data_bytes": sum(result[i][1] for result in results),
        }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if no step of a pipeline sends anything."""
    ratio = [number(r, "pipeline_bytes") / number(r, "data_bytes") for r in rows]
    off = max(abs(number(r, "pipeline_bytes") / number(r, "pipeline_formula_bytes") - 1) for r in rows)
    return Verdict.say(
        "held" if not any(column(rows, "pipeline_bytes")) else "did not hold",
        "A step sends {low:,.0f} to {high:,.0f} kB between two stages, {least:.3g} to {most:.3g} times the bytes of "
        "data parallelism; within {off:.1%} of 2 · tokens · D · itemsize for each micro-batch.",
        "一步在两个阶段之间发送 {low:,.0f} 至 {high:,.0f} kB，是数据并行的 {least:.3g} 至 {most:.3g} 倍；"
        "与每个微批 2 · token · D · 字节数的公式相差不超过 {off:.1%}。",
        low=min(column(rows, "pipeline_bytes")) / 1e3,
        high=max(column(rows, "pipeline_bytes")) / 1e3,
        least=min(ratio),
        most=max(ratio),
        off=off,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = []
    for i, (width, m) in enumerate(product(numbers_in(rows, "width"), numbers_in(rows, "micro_batches"))):
        own = where(rows, width=width, micro_batches=m)
        lines.append(
            Line.of(own, "tokens", "pipeline_bytes", f"pipeline, width {width:g}, {m:g} micro-batches", "o-", i)
        )
        lines.append(Line.of(own, "tokens", "data_bytes", "data parallel, the same", ":", i))
    return [Panel(lines, "Bytes of a step, both ranks", "tokens of a micro-batch", "bytes", "log2", "log")]


LAB = Claim(
    title_en="Bytes of a pipeline",
    title_zh="流水线的通信量",
    claim_en="Pipeline parallelism cuts the model by layers, so its GPUs need no communication.",
    claim_zh="流水线并行把模型按层切开，因此 GPU 之间不需要通信。",
    regime="A Llama of 4 layers in fp32 on 2 processes of one machine, Gloo, the schedule 1f1b.",
    varies="Width, tokens of a micro-batch, number of micro-batches.",
    measures="Bytes of all messages of a step, the formula, and the bytes of an all-reduce of the gradients.",
)
