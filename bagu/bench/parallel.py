"""`bagu bench parallel`: what data parallelism costs on this machine's cores, with Gloo.

    efficiency   N ranks of one thread, each with its share of a step, against N independent processes with the same
                 share: tokens/s over the sum of their tokens/s
    one rank     the trainer with a mesh of one rank against the trainer without a mesh

Both sides of a ratio are timed in the same processes, in turn: in a round every rank runs a step of each, and all start
it together. A ratio is the median over the rounds, so that load that comes and goes does not decide it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from bagu.bench.harness import RESULTS, Rows, table
from bagu.bench.options import ParallelBench
from bagu.bench.train_shapes import SHAPES, Shape
from bagu.data.random_batches import random_batches
from bagu.errors import ArgumentError, UnknownName
from bagu.nn import Transformer, init_weights
from bagu.parallel.local_ranks import on_ranks
from bagu.parallel.mesh import Mesh, MeshConfig, open_mesh
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step
from bagu.train.prepare import prepared

Times = Mapping[str, Sequence[float]]  # seconds of each round, by implementation
ALONE, MESH = "without a mesh", "with a mesh"
CPU = torch.device("cpu")


def main(given: ParallelBench) -> int:
    """Time both comparisons, print a table and append the rows to `out`. A step has the documents of `shape`, divided
    over the ranks."""
    shape, ranks, rounds = given.shape, given.ranks, given.rounds
    UnknownName.check("shape", shape, SHAPES)
    chosen = SHAPES[shape]
    if ranks < 2 or rounds < 1 or len(chosen.lengths) % ranks:
        raise ArgumentError(
            f"{ranks} ranks, {rounds} rounds",
            hint=f"2 or more ranks that divide the {len(chosen.lengths)} documents of {shape}, and 1 or more rounds",
        )
    rows = Rows(given.out, default=RESULTS / "parallel", as_json=given.as_json)
    common = {"system": "parallel", "shape": shape, "model": asdict(chosen.model), "device": "cpu", "dtype": "fp32"}
    for n in (ranks, 1):
        rows.add([common | summary(on_ranks(n, timed_rounds, share(chosen, ranks), rounds), share(chosen, ranks))])
    rows.finish(_table(chosen, rows.all))
    return 0


def share(shape: Shape, ranks: int) -> Shape:
    """The documents that one rank has of a step."""
    return Shape(why=shape.why, model=shape.model, lengths=shape.lengths[: len(shape.lengths) // ranks])


def timed_rounds(shape: Shape, rounds: int) -> Times:
    """On each rank: the seconds of its steps alone, and of its steps as one rank of the mesh."""
    mesh = open_mesh(MeshConfig(dp=dist.get_world_size()), CPU)
    with _step(shape, None) as alone, _step(shape, mesh) as together:
        steps = {ALONE: alone, MESH: together}
        found: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(1 + rounds):  # the first warms up
            for name in reversed(list(steps)) if turn % 2 else list(steps):  # which comes first alternates
                dist.barrier()
                began = time.perf_counter()
                steps[name]()
                if turn:
                    found[name].append(time.perf_counter() - began)
    return found


@contextmanager
def _step(shape: Shape, mesh: Mesh | None) -> Iterator[Callable[[], object]]:
    """A full optimizer step on this rank's share of the documents, alone or with the other ranks' shares."""
    ranks = 1 if mesh is None else mesh.size("dp")
    config = TrainConfig(steps=10**6, optimizer=OptimizerConfig(kind="adamw", lr=1e-4), mesh=MeshConfig(dp=ranks))
    model = init_weights(Transformer(shape.model, dtype=torch.float32), seed=0)
    state = TrainState(model, config, mesh=mesh)
    lengths = shape.lengths * ranks
    batches = random_batches(shape.model.vocab_size, lengths, micro_batches=ranks, device=CPU)
    with prepared(model, config, CPU):
        yield lambda: step(state, batches)
    state.close()


def summary(found: Sequence[Times], shape: Shape) -> dict[str, Any]:
    """Tokens/s without a mesh (the sum over processes) and with it (the slowest rank), and their ratio by round."""
    ranks = len(found)
    alone = [sum(shape.tokens / s for s in each) for each in zip(*(f[ALONE] for f in found), strict=True)]
    mesh = [ranks * shape.tokens / max(each) for each in zip(*(f[MESH] for f in found), strict=True)]
    ratios = [m / a for m, a in zip(mesh, alone, strict=True)]
    return {
        "ranks": ranks,
        "tokens": ranks * shape.tokens,
        "rounds": len(ratios),
        "alone_tokens_per_s": statistics.median(alone),
        "mesh_tokens_per_s": statistics.median(mesh),
        "ratio": statistics.median(ratios),
        "low_ratio": min(ratios),
        "high_ratio": max(ratios),
    }


def _table(shape: Shape, rows: Sequence[dict[str, Any]]) -> Table:
    heads = ("ranks", "tokens a step", "independent, tokens/s", "data parallel, tokens/s", "ratio", "range of rounds")
    lines = [
        (
            str(r["ranks"]),
            f"{r['tokens']:,}",
            f"{r['alone_tokens_per_s']:,.0f}",
            f"{r['mesh_tokens_per_s']:,.0f}",
            f"{r['ratio']:.3f}",
            f"{r['low_ratio']:.3f} to {r['high_ratio']:.3f}",
        )
        for r in rows
    ]
    return table(f"{shape.why}; one thread per rank, medians of {rows[0]['rounds']} rounds", heads, lines)
