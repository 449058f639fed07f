"""Joining a job: which rank this process is, and a first meeting of all ranks that finds what would hang later.

A rank reads its place from the environment: the variables of `bagu train --nproc` and torchrun (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT) or of Slurm's srun (SLURM_PROCID, …). Before the process group exists, ranks meet
at a TCP store on rank 0 (meeting.py) and compare their facts (configuration, code, device). Every rank that does not
go on raises the same sentence.
"""

import contextlib
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import bagu
from bagu.errors import BaguError
from bagu.parallel.meeting import PeerFailed, meet

START_TIMEOUT_S = 60.0  # for all ranks to start; BAGU_START_TIMEOUT overrides it
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process in a job: its rank of `ranks`, its number among the processes of this machine (None: the launcher
    does not say), where rank 0 is."""

    rank: int
    ranks: int
    local_rank: int | None
    host: str
    port: int
    agent_store: bool = False  # torchrun serves a store at that address itself


def find_place(environ: Mapping[str, str]) -> Place | None:
    """The place that a launcher gave this process; None if it was started alone."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        try:
            return Place(
                rank=int(environ["RANK"]),
                ranks=int(environ["WORLD_SIZE"]),
                local_rank=int(environ["LOCAL_RANK"]) if "LOCAL_RANK" in environ else None,
                host=environ["MASTER_ADDR"],
                port=int(environ["MASTER_PORT"]),
                agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        except (KeyError, ValueError) as error:
            raise BaguError(
                f"RANK and WORLD_SIZE are set, and the rest is not as torchrun sets it: {error!r}",
                hint="start with torchrun or bagu train --nproc, or unset them",
            ) from error
    if "SLURM_STEP_ID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environ:
        job = int(environ.get("SLURM_JOB_ID", "0"))
        return Place(
            rank=int(environ["SLURM_PROCID"]),
            ranks=int(environ["SLURM_NTASKS"]),
            local_rank=int(environ.get("SLURM_LOCALID", "0")),
            host=environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "localhost")),
            port=int(environ.get("MASTER_PORT", 20000 + job % 20000)),
        )
    return None


def first_host(nodes: str) -> str:
    """The first machine of a Slurm list such as "gpu[03-05,9],login1"."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if found is None:
        raise BaguError(f"SLURM_STEP_NODELIST is {nodes!r}", hint="set MASTER_ADDR to the machine of rank 0")
    return found[1] + (found[2] or "")


def use_own_gpu(place: Place) -> None:
    """Make this rank's GPU the only one that torch sees. Call before CUDA is used."""
    if (mine := own_gpu(place, os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count)) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = mine


def own_gpu(place: Place, visible: str | None, count: Callable[[], int]) -> str | None:
    """The GPU at this rank's local rank among the `visible` ones; None leaves them as they are.

    Without a local rank, ranks fill the GPUs of a machine in turn (`count` of them): a pod with one GPU gives it to its
    only rank, whatever the rank's number is.
    """
    mine = [v for v in visible.split(",") if v] if visible is not None else None
    gpus = len(mine) if mine is not None else count() if place.local_rank is None else 0
    local = place.local_rank if place.local_rank is not None else place.rank % max(1, gpus)
    if mine is None:
        return str(local)
    return mine[local] if len(mine) > 1 and local < len(mine) else None


def code_digest() -> str:
    """A hash of the package's source, equal on ranks that run the same code."""
    root = Path(bagu.__file__).parent
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def joined(place: Place, device: torch.device, facts: Mapping[str, object]) -> Iterator[None]:
    """Meet the other ranks, and have torch.distributed initialised inside.

    `facts` must be equal on all ranks. If a rank fails inside, rank 0 raises its error; the others raise `PeerFailed`.
    """
    timeout = float(os.environ.get("BAGU_START_TIMEOUT", START_TIMEOUT_S))
    store = meet(_store(place, timeout), place.rank, place.ranks, facts, timeout)
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        group = dist.PrefixStore("group", store)
        dist.init_process_group(
            backend, store=group, rank=place.rank, world_size=place.ranks, timeout=COLLECTIVE_TIMEOUT
        )
        yield
    except BaseException as error:
        _report(store, place, error)
        raise
    dist.destroy_process_group()


def _store(place: Place, timeout: float) -> dist.Store:
    serves = place.rank == 0 and not place.agent_store
    try:
        if not serves:
            _reach(place, timeout)
        return dist.TCPStore(
            place.host, place.port, place.ranks, serves, timedelta(seconds=timeout), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:  # dist.DistStoreError is a RuntimeError
        raise BaguError(
            f"rank {place.rank} cannot {'listen' if serves else 'connect'} at {place.host}:{place.port}: "
            f"{first_line(error)}",
            hint="set MASTER_PORT to a free port",
        ) from error


def _reach(place: Place, timeout: float) -> None:
    """Wait until rank 0 listens. torch's own client prints C++ frames when it does not."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise PeerFailed(
                f"rank {place.rank} did not reach rank 0 at {place.host}:{place.port} within {timeout:.0f} s: "
                f"{error.strerror or error}",
                hint="start rank 0 there; check MASTER_ADDR, MASTER_PORT and the firewall between the machines",
            ) from error


def first_line(error: BaseException) -> str:
    """What an error of torch says, without the frames of C++ that follow."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()


def _report(store: dist.Store, place: Place, error: BaseException) -> None:
    """Leave this rank's error for the others, or raise the one that another rank left, if there is one.

    A rank that fails closes its connections, and collectives of the others raise RuntimeError. Only the first error is
    the reason.
    """
    if isinstance(error, PeerFailed | KeyboardInterrupt | SystemExit):
        return
    lost = isinstance(error, RuntimeError) and not isinstance(error, BaguError)
    try:
        if not lost:
            hint = error.hint if isinstance(error, BaguError) else ""
            said = str(error) if isinstance(error, BaguError) else f"{type(error).__name__}: {first_line(error)}"
            store.set("failed", json.dumps([place.rank, said, hint]))
            if place.rank == 0:  # it serves the store: the others read the reason before it ends
                time.sleep(0.5)
            return
        store.wait(["failed"], timedelta(seconds=2))
        rank, what, hint = json.loads(store.get("failed"))
        raise PeerFailed(f"rank {rank} failed: {what}", hint=hint) from error
    except RuntimeError:  # no store, or nothing was left there: a rank was killed
        pass
    raise PeerFailed(
        f"rank {place.rank} lost its peers: {first_line(error)}", hint="one of them was killed: see the other logs"
    ) from error
