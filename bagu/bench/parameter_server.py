"""`bagu bench parameter-server`: a step on servers beside the same step by Gloo, and the record of kills.

    ratio    tokens/s with servers over tokens/s of data parallelism, on the same cores: servers are further processes,
             and on one machine they take what they need from the workers
    bytes    what a worker pushes and pulls in a step, beside the formula: twice the parameters
    copies   what the servers receive in a step, over what all workers push: 1 + 2/W with two copies of each range
    memory   of a server's process after the steps, without pages that it shares with other processes (Linux)
    delays   (--delays 0,8) four workers whose steps take lognormal times: what they wait, and updates a second

Both sides are timed in the same processes, in turn, as in parallel.py.
"""

import math
import queue
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table

from bagu.bench.harness import RESULTS, Rows, table
from bagu.bench.options import ServerBench
from bagu.bench.parallel import ALONE, CPU, MESH, share, summary
from bagu.bench.server_kills import record
from bagu.bench.shares import MODEL, TOKENS, Waiting
from bagu.bench.train_shapes import SHAPES, Shape
from bagu.data.random_batches import random_batches
from bagu.errors import ArgumentError, UnknownName
from bagu.nn import Transformer, init_weights
from bagu.parallel.local_ranks import on_ranks
from bagu.parallel.mesh import MeshConfig, open_mesh
from bagu.parallel.server.group import SERVER, start_here
from bagu.parallel.server.links import connect
from bagu.parallel.server.place import Place, new_group
from bagu.parallel.server.wire import Message
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step
from bagu.train.prepare import prepared
from bagu.train.served.config import ServedConfig
from bagu.train.served.worker import Served, ServedPlace

STEP_S, SIGMA = 0.15, 0.6  # the median of a jittered step, and its spread
WARM_STEPS = 3
FACTS = ("parameters", "bytes", "pushed_bytes", "received_bytes", "server_memory_bytes")
SETTLED_S = 1.0  # in which every server has sent its byte counts to the manager (five heartbeats)


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
    if given.delays:
        return _delays(given, rows)
    chosen = SHAPES[given.shape]
    with processes(given.servers) as place:
        part = share(chosen, given.workers)
        times = on_ranks(given.workers, timed_rounds, part, given.rounds, place, given.workers)
        found = summary(times, part)
        facts = {name: times[0][name] for name in FACTS}
        common = {"system": "parameter server", "shape": given.shape, "model": asdict(chosen.model), "device": "cpu"}
        rows.add([{**common, **found, "servers": given.servers, **facts}])
        rows.finish(_table(chosen, rows.all))
    return 0


def _delays(given: ServerBench, rows: Rows) -> int:
    """Time workers with jitter at each of --delays."""
    try:
        delays = [int(word) for word in given.delays.split(",")]
    except ValueError:
        raise ArgumentError(f"--delays {given.delays!r}", hint="numbers, such as 0,4,8") from None
    found = delay_rows(delays, given.servers, given.workers, given.delay_steps)
    common = {"system": "server delay", "servers": given.servers, "workers": given.workers}
    rows.add([common | row for row in found])
    cells = [(str(r["delay"]), f"{r['idle_percent']:.1f} %", f"{r['speed']:.2f}", str(r["oldest"])) for r in found]
    title = f"{given.workers} workers, steps of lognormal time (σ {SIGMA}, median {1e3 * STEP_S:.0f} ms)"
    rows.finish(table(title, ("delay", "idle", "updates/s over the first", "oldest read"), cells))
    return 0


@contextmanager
def processes(number: int) -> Iterator[Place]:
    """A manager and servers, until the end."""
    place = new_group(number)
    started = [start_here(place, SERVER)]
    started += [start_here(replace(place, role="server", number=n), SERVER) for n in range(number)]
    try:
        yield place
    finally:
        for process in started:
            process.kill()


def delay_rows(delays: Sequence[int], servers: int, workers: int, steps: int) -> list[dict[str, Any]]:
    """For each delay what workers wait, the oldest weights that they used, and updates a second over the first's."""
    found = list[dict[str, Any]]()
    for delay in delays:
        with processes(servers) as place:
            served = ServedConfig(servers=servers, workers=workers, delay=delay)
            each = on_ranks(workers, jittered, place, served, steps)
        rate, idle = min(one["rate"] for one in each), 100 * statistics.mean(one["idle"] for one in each)
        oldest = max(one["oldest"] for one in each)
        row = {"delay": delay, "idle_percent": idle, "updates_per_s": rate, "oldest": oldest}
        found.append(row | {"speed": rate / (found[0]["updates_per_s"] if found else rate), "steps": steps})
    return found


def jittered(place: Place | None, served: ServedConfig, steps: int, sigma: float = SIGMA) -> dict[str, float]:
    """A worker whose steps take random times, on servers or (without a place) by all-reduce. Those after the last
    counted step are not made: a worker would wait there for the end of the others."""
    rank, mesh = dist.get_rank(), None if place is not None else open_mesh(MeshConfig(dp=served.workers), CPU)
    draw, loss = random.Random(rank), Waiting(0.0)
    how = MeshConfig() if mesh is None else mesh.config
    config = TrainConfig(
        optimizer=OptimizerConfig(kind="adamw"), served=served if mesh is None else None, mesh=how, steps=10_000
    )
    state = TrainState(init_weights(Transformer(MODEL), 0), config, loss, mesh=mesh)
    batches = random_batches(MODEL.vocab_size, (TOKENS,) * served.workers, micro_batches=served.workers, device=CPU)
    worker = None
    if place is not None:
        worker = Served(ServedPlace(worker=rank, manager=place.manager, token=place.token), served)
        worker.begin(state)
        worker.stop = WARM_STEPS + steps + served.delay + 1
    idle, oldest, begun = 0.0, 0, 0.0

    def drawn() -> Any:
        loss.new_step()
        loss.wait_s = STEP_S * math.exp(sigma * draw.gauss(0, 1))
        return batches

    for number in range(WARM_STEPS + steps):
        last = time.perf_counter()
        if number == WARM_STEPS:
            begun = last
        if worker is None:
            step(state, drawn())
            continue
        worker.step(state, drawn)
        row = worker.row()
        if number >= WARM_STEPS:
            idle += (row["idle_percent"] or 0.0) / 100 * (time.perf_counter() - last)
            oldest = max(oldest, int(row["read_age_updates"] or 0))
    took = time.perf_counter() - begun
    dist.barrier()  # one that leaves would be missed by the others
    if worker is not None:
        worker.close()
    return {"idle": idle / took, "rate": steps / took, "oldest": oldest}


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
        before = received_bytes(server_facts(place))
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
    row, made = worker.row(), rounds + 1
    pushed, pulled = int(row["pushed_bytes"] or 0), int(row["pulled_bytes"] or 0)
    facts = server_facts(place)
    times |= {
        "parameters": len(states[1].flat.master),
        "bytes": (pushed + pulled) // made,
        "pushed_bytes": workers * pushed // made,
        "received_bytes": (received_bytes(facts) - before) // made,
        "server_memory_bytes": largest_private_memory(facts),
    }
    worker.close()
    return times


def server_facts(place: Place) -> list[dict[str, Any]]:
    """What the manager knows of each server by its heartbeats. To be called by all workers at once."""
    answers = queue.SimpleQueue[Message]()
    dist.barrier()
    time.sleep(SETTLED_S)
    hello = Message(kind="hello", more={"who": "watcher", "number": dist.get_rank()})
    link = connect(place.manager, place.token, hello, lambda _, m: answers.put(m), lambda _: None)
    link.send(Message(kind="status"))
    while (status := answers.get(timeout=60)).kind != "status":
        pass
    link.close()
    dist.barrier()
    return [facts for _, facts in status.more["servers"]]


def received_bytes(servers: Sequence[dict[str, Any]]) -> int:
    """Of all servers together: pushes, decisions and copies."""
    return sum(int(facts["received"]) for facts in servers)


def largest_private_memory(servers: Sequence[dict[str, Any]]) -> int | None:
    """Bytes of the server that has the most; None where the kernel does not tell."""
    sizes = list[int]()
    for facts in servers:
        try:
            lines = Path(f"/proc/{facts['pid']}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        sizes.append(sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_")))
    return max(sizes)


def _table(shape: Shape, rows: Sequence[dict[str, Any]]) -> Table:
    heads = ("workers", "servers", "Gloo, tokens/s", "servers, tokens/s", "ratio", "range", "bytes", "copies", "server")
    lines = [
        (
            str(r["ranks"]),
            str(r["servers"]),
            f"{r['alone_tokens_per_s']:,.0f}",
            f"{r['mesh_tokens_per_s']:,.0f}",
            f"{r['ratio']:.3f}",
            f"{r['low_ratio']:.3f} to {r['high_ratio']:.3f}",
            f"{r['bytes'] / (8 * r['parameters']):.3f}",
            f"{r['received_bytes'] / r['pushed_bytes']:.3f}",
            f"{r['server_memory_bytes'] / 2**20:.0f} MiB" if r["server_memory_bytes"] else "–",
        )
        for r in rows
    ]
    return table(f"{shape.why}; one thread per worker, medians of {rows[0]['rounds']} rounds", heads, lines)
