"""`bagu bench parameter-server`: a step on servers beside the same step by Gloo, and the record of kills.

    ratio    tokens/s with servers over tokens/s of data parallelism, on the same cores: servers are further processes,
             and on one machine they take what they need from the workers
    bytes    what a worker pushes and pulls in a step, beside the formula: twice the parameters

Both sides are timed in the same processes, in turn, as in parallel.py.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist
from rich.table import Table

from bagu.bench.harness import RESULTS, Rows, table
from bagu.bench.options import ServerBench
from bagu.bench.parallel import ALONE, CPU, MESH, share, summary
from bagu.bench.server_kills import record
from bagu.bench.train_shapes import SHAPES, Shape
from bagu.data.random_batches import random_batches
from bagu.errors import ArgumentError, UnknownName
from bagu.nn import Transformer, init_weights
from bagu.parallel.local_ranks import on_ranks
from bagu.parallel.mesh import MeshConfig, open_mesh
from bagu.parallel.server.group import COMMANDS, start_here
from bagu.parallel.server.place import Place, new_group
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step
from bagu.train.prepare import prepared
from bagu.train.served.config import ServedConfig
from bagu.train.served.worker import Served, ServedPlace


def main(given: ServerBench) -> int:
    """Time the comparison, or record kills; print a table and append the rows to `out`."""
    UnknownName.check("shape", given.shape, SHAPES)
    if given.workers < 2 or given.servers < 1 or given.rounds < 1 or given.kills < 0:
        raise ArgumentError(
            f"{given.workers} workers, {given.servers} servers, {given.rounds} rounds, {given.kills} kills",
            hint="2 or more workers, 1 or more servers and rounds, 0 or more kills",
        )
    rows = Rows(given.out, default=RESULTS / "parallel", as_json=given.as_json)
    if given.kills:
        found = record(given.kills, servers=given.servers, workers=given.workers, how=given.fault).row()
        rows.add([{"system": "server kills", "servers": given.servers, "fault": given.fault, **found}])
        cells = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in found.values()]
        rows.finish(table("kills of servers", list(found), [cells]))
        return int(found["wrong_updates"] > 0)
    chosen, place = SHAPES[given.shape], new_group(given.servers)
    manager = start_here(place, COMMANDS["manager"])
    servers = [start_here(replace(place, role="server", number=n), COMMANDS["server"]) for n in range(given.servers)]
    try:
        part = share(chosen, given.workers)
        times = on_ranks(given.workers, timed_rounds, part, given.rounds, place, given.workers)
        found = summary(times, part)
        facts = {"parameters": times[0]["parameters"], "bytes": times[0]["bytes"]}
        common = {"system": "parameter server", "shape": given.shape, "model": asdict(chosen.model), "device": "cpu"}
        rows.add([{**common, **found, "servers": given.servers, **facts}])
        rows.finish(_table(chosen, rows.all))
    finally:
        for process in (*servers, manager):
            process.kill()
    return 0


def timed_rounds(shape: Shape, rounds: int, place: Place, workers: int) -> dict[str, Any]:
    """The seconds of a step by Gloo (ALONE in the names of parallel.py) and on servers (MESH), by round."""
    served = ServedConfig(servers=place.servers, workers=workers)
    optimizer, rank = OptimizerConfig(kind="adamw"), dist.get_rank()
    gloo = TrainConfig(optimizer=optimizer, mesh=MeshConfig(dp=workers), steps=10_000)
    mine = TrainConfig(optimizer=optimizer, served=served, steps=10_000)
    models = [init_weights(Transformer(shape.model), 0) for _ in range(2)]
    states = [TrainState(models[0], gloo, mesh=open_mesh(gloo.mesh, CPU)), TrainState(models[1], mine)]
    lengths = shape.lengths * workers
    batches = random_batches(shape.model.vocab_size, lengths, micro_batches=workers, device=CPU)
    worker = Served(ServedPlace(worker=rank, manager=place.manager, token=place.token), served)
    times: dict[str, Any] = {ALONE: [], MESH: []}
    with prepared(models[0], gloo, CPU), prepared(models[1], mine, CPU):
        worker.begin(states[1])
        worker.stop = 10_000
        worker.row()  # what was read before the first step is not part of a step
        for number in range(rounds + 1):
            for name in (ALONE, MESH):
                dist.barrier()
                begun = time.perf_counter()
                if name == ALONE:
                    step(states[0], batches)
                else:
                    worker.step(states[1], lambda: batches)
                if number:  # the first is a warm-up
                    times[name].append(time.perf_counter() - begun)
    row = worker.row()
    moved = int((row["pushed_bytes"] or 0) + (row["pulled_bytes"] or 0))
    times |= {"parameters": len(states[1].flat.master), "bytes": moved // (rounds + 1)}
    worker.close()
    return times


def _table(shape: Shape, rows: Sequence[dict[str, Any]]) -> Table:
    heads = ("workers", "servers", "Gloo, tokens/s", "servers, tokens/s", "ratio", "range", "bytes a step over formula")
    lines = [
        (
            str(r["ranks"]), str(r["servers"]), f"{r['alone_tokens_per_s']:,.0f}",
            f"{r['mesh_tokens_per_s']:,.0f}",
            f"{r['ratio']:.3f}", f"{r['low_ratio']:.3f} to {r['high_ratio']:.3f}",
            f"{r['bytes'] / (8 * r['parameters']):.3f}",
        )
        for r in rows
    ]  # fmt: skip
    return table(f"{shape.why}; one thread per worker, medians of {rows[0]['rounds']} rounds", heads, lines)
