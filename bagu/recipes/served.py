"""`bagu train --servers S --workers W`: start the processes of a run with a parameter server, or be one of them."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bagu.config import write_atomic
from bagu.errors import ArgumentError, BaguError
from bagu.machine.cores import usable_cores
from bagu.machine.terminal import counted
from bagu.parallel.server.group import Group, Process, start_here
from bagu.parallel.server.links import Link, connect
from bagu.parallel.server.place import FILE, Place, new_group, write_place
from bagu.parallel.server.wire import Message
from bagu.parallel.unlike.workers import divide_cores, parse_workers
from bagu.recipes.run import Run, load_run
from bagu.recipes.verbs import TrainOptions
from bagu.runs.folder import RunFolder
from bagu.train.optim import OptimizerConfig
from bagu.train.rl.prompt_data import PromptObjective
from bagu.train.served.config import ServedConfig
from bagu.train.served.worker import Served, ServedPlace

STATUS = "servers.json"  # in the folder of a run: ranges, holders, clocks, bytes
DELAY = "delay.json"  # in the folder of a run: a bound that was set while it runs
STATUS_S = 0.5
ADAMW_LR = 3e-3  # where a recipe's own optimizer cannot run on servers


def asked(run: Run, given: TrainOptions) -> bool:
    """Whether options of the parameter server are given; --workers is one if the run has servers."""
    options = (given.servers, given.delay, given.compress, given.local_steps, given.ray)
    return any(value is not None for value in options) or (given.workers is not None and run.train.served is not None)


def with_servers(run: Run, given: TrainOptions, *, divide: bool, say: Callable[[str], None]) -> Run:
    """The run with the servers that were asked for; as it is, if none were and it has none."""
    if not asked(run, given):
        return run
    before = run.train.served
    if given.servers is None and before is None:
        raise ArgumentError("options of a parameter server are given without --servers", hint="add --servers 4")
    if given.nproc is not None or given.mesh is not None or given.minutes is not None:
        others = {"--nproc": given.nproc, "--mesh": given.mesh, "--minutes": given.minutes}
        other = next(name for name, value in others.items() if value is not None)
        raise ArgumentError(f"--servers and {other} do not go together", hint="leave one out")
    if isinstance(run.objective, PromptObjective):
        raise ArgumentError(
            f"objective {run.objective.kind!r} cannot be trained on servers: one engine makes its batches",
            hint="leave --servers out",
        )
    number = None if given.workers is None else len(parse_workers(given.workers, kinds=("cpu",)))
    named: dict[str, Any] = {
        "servers": given.servers,
        "workers": number,
        "delay": given.delay,
        "compress": given.compress,
        "local_steps": given.local_steps,
    }
    served = replace(before or ServedConfig(), **{k: v for k, v in named.items() if v is not None})
    optimizer, train, data = run.train.optimizer, run.train, run.data
    if optimizer.kind == "muon" and served.local_steps is None and before is None and _is_default(given):
        optimizer = OptimizerConfig(kind="adamw", lr=given.lr or ADAMW_LR)
        say(f"muon needs whole matrices, and servers have blocks of them: using adamw with lr {optimizer.lr:g}")
    if divide and data.micro_batches % served.workers and data.rows_per_step % served.workers == 0:
        data = replace(data, micro_batches=served.workers, rows=data.rows_per_step // served.workers)
    if data.micro_batches % served.workers:
        raise ArgumentError(
            f"a step has {data.micro_batches} micro-batches, and {served.workers} workers share them",
            hint=f"set data.micro_batches to a multiple of {served.workers}",
        )
    return replace(run, data=data, train=replace(train, served=served, optimizer=optimizer))


def _is_default(given: TrainOptions) -> bool:
    return given.config is None and not any(s.startswith("train.optimizer.kind") for s in given.settings)


def as_worker(run: Run, place: Place | None) -> Served | None:
    """This process as a worker of the run; None if it is not one."""
    served = run.train.served
    if place is None or served is None:
        return None
    every = [n for n in (run.train.eval_every, run.train.save_every, run.train.sample_every) if n is not None]
    here = ServedPlace(worker=place.number, manager=place.manager, token=place.token)
    return Served(here, replace(served, servers=place.servers), due=lambda step: any(step % n == 0 for n in every))


def start_group(run: Run, given: TrainOptions, again: Sequence[str], say: Callable[[str], None]) -> int:
    """Start manager, servers and workers, and watch them until the workers end; returns the exit status."""
    served = run.train.served
    assert served is not None
    workers = parse_workers(str(served.workers) if given.workers is None else given.workers, kinds=("cpu",))
    cores = divide_cores(workers, usable_cores())

    def here(place: Place, command: Sequence[str]) -> Process:
        return start_here(place, command, cores.of[place.number] if place.role == "worker" else None)

    start: Any = here
    host = "127.0.0.1"
    if given.ray is not None and any(worker.cores is not None for worker in workers):
        raise ArgumentError(
            f"--workers {given.workers!r} names cores, and Ray places workers", hint="give their number"
        )
    if given.ray is not None:
        from bagu.parallel.server.on_ray import OnRay

        start = OnRay(given.ray)
        host = start.node()
    if served.servers < 3:
        copies = "no copy" if served.servers == 1 else "one copy"
        say(f"{served.servers} server{'s' if served.servers > 1 else ''}: each range has {copies}; 3 have two")
    place = new_group(served.servers, host)

    def worker(number: int, restarted: bool) -> list[str]:
        words = (
            ["train", "--resume", "--out", str(given.out)]
            if restarted and RunFolder(given.out).is_run()
            else ["train", *again]
        )
        return [sys.executable, "-m", "bagu", *words]

    group = Group(place, served.workers, worker, say, start=start, max_restarts=given.max_restarts)
    status = _Status(place, given.out)
    try:
        return group.run(status.poll)
    finally:
        status.close()


class _Status:
    """Writes the state of the servers to the run's folder, and passes on a delay that is set there."""

    def __init__(self, place: Place, out: Path) -> None:
        self._place, self._out = place, out
        self._link: Link | None = None
        self._at, self._delay = 0.0, 0.0
        self._lock = threading.Lock()

    def poll(self) -> None:
        now = time.monotonic()
        if now - self._at < STATUS_S or not RunFolder(self._out).is_run():
            return
        self._at = now
        if not (self._out / FILE).exists():
            write_place(self._place, self._out)
        if self._link is None:
            hello = Message(kind="hello", more={"who": "watcher", "number": 0})
            with contextlib.suppress(OSError):
                self._link = connect(self._place.manager, self._place.token, hello, self._message, self._gone)
            return
        self._link.send(Message(kind="status"))
        path = self._out / DELAY
        if path.is_file() and (changed := path.stat().st_mtime) > self._delay:
            self._delay = changed
            self._link.send(Message(kind="delay", more={"delay": json.loads(path.read_text(encoding="utf-8"))}))

    def _message(self, link: Link, m: Message) -> None:
        if m.kind == "status":
            with contextlib.suppress(OSError):
                write_atomic(self._out / STATUS, json.dumps({**m.more, "time": time.time()}))

    def _gone(self, link: Link) -> None:
        self._link = None

    def close(self) -> None:
        (self._out / FILE).unlink(missing_ok=True)
        if self._link is not None:
            self._link.close()


def watch_main(folder: Path, *, delay: int | None, once: bool) -> int:
    """Show the servers of a run until it ends; with `delay`, set its bound first."""
    if not (folder / STATUS).is_file():
        raise BaguError(f"{folder} is not a run with parameter servers that has begun", hint="bagu train … --servers 4")
    if delay is not None:
        ServedConfig(delay=delay)  # raises for one that cannot be
        served = load_run(RunFolder(folder).config_path).train.served
        if delay and served is not None and served.own_ahead and not served.delay:
            raise BaguError(
                f"{folder} began without a delay: its servers run the optimizer, and learn little from old gradients",
                hint=f"bagu train --resume --out {folder} --delay {delay}",
            )
        write_atomic(folder / DELAY, json.dumps(delay))
    while True:
        found = json.loads((folder / STATUS).read_text(encoding="utf-8"))
        rows = RunFolder(folder).metrics()
        print(shown(found, rows[-1] if rows else {}), flush=True)
        if once or time.time() - found["time"] > 5:
            return 0
        time.sleep(1)


def shown(status: dict[str, Any], row: dict[str, Any]) -> str:
    """The state of the servers as lines."""
    facts = dict(status["servers"])
    lines = [f"epoch {status['epoch']}, {counted(status['deaths'], 'death')}, {counted(len(facts), 'server')}"]
    for number, slots in enumerate(status["holders"]):
        versions = [facts.get(slot, {}).get("versions", {}).get(str(number), "-") for slot in slots]
        held = ", ".join(f"server {slot} at {version}" for slot, version in zip(slots, versions, strict=True))
        lines.append(f"range {number}: {held or 'lost'}")
    for slot, more in facts.items():
        sent, received = (more.get(name, 0) / 1e6 for name in ("sent", "received"))
        lines.append(f"server {slot}: {sent:.1f} MB sent, {received:.1f} MB received")
    for number, clock in sorted(status["workers"]):
        lines.append(f"worker {number}: step {clock.get('step')}, read weights {clock.get('age')} updates old")
    if "idle_percent" in row:
        pushed, pulled = row["pushed_bytes"] / 1e6, row["pulled_bytes"] / 1e6
        idle = f"step {row['step']}: worker 0 idle {row['idle_percent']:.0f} %"
        lines.append(f"{idle}, pushed {pushed:.2f} MB, pulled {pulled:.2f} MB")
    return "\n".join(lines)
