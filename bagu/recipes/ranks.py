"""`bagu train` over several ranks: start them, or be one of them."""

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagu import config as configs
from bagu.errors import ArgumentError, BaguError
from bagu.machine.cores import usable_cores
from bagu.machine.device import named_device
from bagu.parallel import heartbeat
from bagu.parallel.launch import Place, code_digest, joined
from bagu.parallel.meeting import PeerFailed
from bagu.parallel.mesh import DIMS, Dim, Mesh, MeshConfig, open_mesh
from bagu.parallel.sizes import Sizes
from bagu.parallel.supervise import Job, Start, supervise
from bagu.parallel.unlike.workers import Worker, divide_cores, parse_workers
from bagu.recipes.run import Run
from bagu.recipes.verbs import TrainOptions
from bagu.runs.folder import RunFolder
from bagu.train import checkpoint

OPTIONS: dict[Dim, list[str]] = {  # that a mesh without the dimension does not have, with their defaults
    "shard": ["train.zero=null", "train.offload=false"],
    "pp": ["train.pipeline=null", "train.stages_per_rank=null"],
    "cp": ["train.context_parallel=null"],
}
PER_WORKER = 4  # micro-batches: shares can then differ by a quarter
LOST = 75  # exit status of a rank whose peers are gone (EX_TEMPFAIL)


def asked_workers(run: Run, given: TrainOptions, place: Place | None) -> tuple[Worker, ...]:
    """The data-parallel workers that --workers asks for: none without it, or if they belong to a parameter server."""
    if given.workers is None or given.servers is not None or run.train.served is not None:
        return ()
    workers = parse_workers(given.workers)
    if given.nproc is not None:
        raise ArgumentError("--workers and --nproc are both given", hint="leave --nproc out")
    if place is not None and heartbeat.FOLDER not in os.environ:
        raise ArgumentError(
            "--workers is given, and another launcher has started the ranks",
            hint="for shares by speed use --set train.shares=measured",
        )
    if len({worker.kind for worker in workers}) > 1:
        raise ArgumentError(
            f"--workers {given.workers!r} has workers with and without a GPU, and one collective needs equal devices",
            hint="use one kind",
        )
    return workers


def asked_ranks(run: Run, given: TrainOptions, place: Place | None) -> int:
    """How many ranks run, or are to be started."""
    return place.ranks if place is not None else given.nproc or len(asked_workers(run, given, place)) or 1


def mesh_settings(run: Run, given: TrainOptions, place: Place | None, *, divide: bool) -> list[str]:
    """The settings by which a run gets the mesh that was asked for.

    With `divide`, a step whose micro-batches the ranks cannot share is divided into one per rank and pipeline stage,
    with the same rows; for workers whose shares follow their speed into PER_WORKER each or a few more.
    """
    mesh, data = run.train.mesh, run.data
    if given.nproc is not None and given.nproc < 1:
        raise BaguError(f"--nproc is {given.nproc}", hint="give 1 or more")
    if given.max_restarts < 0:
        raise BaguError(f"--max-restarts is {given.max_restarts}", hint="give 0 or more")
    if not given.hang_timeout > 0:
        raise BaguError(f"--hang-timeout is {given.hang_timeout:g} s", hint="give a time above 0")
    wanted = mesh if given.mesh is None else MeshConfig.parse(given.mesh)
    workers = asked_workers(run, given, place)
    if given.mesh is None and (mesh.ranks == 1 or (workers and mesh.ranks == mesh.dp)):
        wanted = MeshConfig(dp=asked_ranks(run, given, place))
    wanted.check_ranks(asked_ranks(run, given, place))
    settings = [f"train.mesh.{name}={wanted.size(name)}" for name in DIMS if wanted.size(name) != mesh.size(name)]
    ranks_of_data, least = wanted.size("data"), wanted.size("data") * wanted.pp  # a stage works while others do
    too_few = data.micro_batches % ranks_of_data or data.micro_batches < least
    if workers:
        settings += ["train.shares=measured", f"device={workers[0].kind}"]
        least = next(
            (n for n in range(PER_WORKER * least, data.rows_per_step + 1) if data.rows_per_step % n == 0), least
        )
        too_few = data.micro_batches < least
    if divide and too_few and data.rows_per_step % least == 0:
        settings += [f"data.micro_batches={least}", f"data.rows={data.rows_per_step // least}"]
    for dim, options in OPTIONS.items():
        if wanted.size(dim) == 1 < mesh.size(dim):
            settings += options
    return settings


def shares_said(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What shares by speed have done: the later half of the steps beside their prediction; None without one."""
    steps = [row for row in rows if row.get("predicted_step_s") is not None]
    if not steps:
        return None
    later = steps[len(steps) // 2 :]
    measured, predicted = (
        statistics.median(r["tokens"] / r[name] for r in later) for name in ("step_s", "predicted_step_s")
    )
    idle = statistics.median(row["shares_idle_percent"] for row in later)
    return f"shares by speed: {measured:,.0f} tokens/s, predicted {predicted:,.0f}; workers idle {idle:.0f} %"


def start_ranks(
    run: Run, given: TrainOptions, command: Callable[[MeshConfig], Sequence[str]], say: Callable[[str], None]
) -> int:
    """Start the ranks of a run and watch them. `command` is the command line of the first start.

    A later start resumes the run. If the last two starts made no checkpoint, it has fewer ranks, until that start has
    made some.
    """
    workers = asked_workers(run, given, None)
    cores = divide_cores(workers, usable_cores())
    if cores.shared:
        say(f"--workers {given.workers!r} asks for more cores than the {len(usable_cores())} here: workers share them")
    folder, sizes, steps = RunFolder(given.out), Sizes(run.train.mesh, run.data.micro_batches), set[str]()

    def reached() -> int:
        """The number of checkpoints so far; old ones are deleted."""
        steps.update(path.name for path in checkpoint.checkpoints(folder.checkpoints))
        return len(steps)

    def plan(attempt: int) -> Start:
        before = sizes.mesh
        mesh = sizes.next(reached())
        if mesh.ranks < before.ranks:
            say(f"the last two starts made no progress: going on with {mesh.ranks} instead of {before.ranks} ranks")
        elif mesh.ranks > before.ranks:
            say(f"a start with {before.ranks} ranks made progress: going on with {mesh.ranks}")
        again = attempt > 0 and folder.is_run()
        words = ["train", "--resume", "--out", str(given.out), "--mesh", str(mesh)] if again else command(mesh)
        return Start(ranks=mesh.ranks, command=[sys.executable, "-m", "bagu", *words], cores=cores.of)

    job = Job(
        plan=plan,
        max_restarts=given.max_restarts,
        hang_timeout_s=given.hang_timeout,
        progress=reached,
        replan=lambda: sizes.may_grow(reached()),
    )
    return supervise(job, say)


@contextlib.contextmanager
def opened_mesh(run: Run, place: Place | None, out: Path) -> Iterator[Mesh | None]:
    """The mesh of a run, after all ranks have met; None for a run in one process."""
    if place is None:
        yield None
        return
    device = named_device(run.device)
    facts = {
        "config": configs.to_dict(run),
        "code": code_digest(),
        "device": device.type,
        "out": out.name,
        "the folder holds the run": RunFolder(out).is_run(),
    }
    with joined(place, device, facts):
        mesh = open_mesh(run.train.mesh, device)
        folder = os.environ.get(heartbeat.FOLDER)
        with contextlib.ExitStack() as stack:
            if folder is not None:
                progress = lambda: (mesh.traffic.calls, mesh.traffic.step)  # noqa: E731
                stack.enter_context(heartbeat.Heartbeat(Path(folder), place.rank, progress))
            yield mesh


@contextlib.contextmanager
def one_sentence(place: Place | None) -> Iterator[None]:
    """An error of a rank as one sentence in its log, with its rank; where ranks share a terminal, rank 0 says it."""
    try:
        yield
    except BaguError as error:
        if place is None or place.rank == 0:
            raise
        if heartbeat.FOLDER not in os.environ:
            hint = f"\n  -> {error.hint}" if error.hint else ""
            said = str(error) if str(error).startswith(f"rank {place.rank} ") else f"rank {place.rank}: {error}"
            print(f"bagu: {said}{hint}", file=sys.stderr, flush=True)
        raise SystemExit(LOST if isinstance(error, PeerFailed) else 2) from None
