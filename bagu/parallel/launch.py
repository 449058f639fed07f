"""Joining a job: which rank this process is, and a first meeting of all ranks that finds what would hang later.

A rank reads its place from the environment: the variables of `bagu train --nproc` and torchrun (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT) or of Slurm's srun (SLURM_PROCID, …). Before the process group exists, ranks meet
at a TCP store on rank 0: rank 0 waits for all of them and compares their facts (configuration, code, device). It raises
the one error that is printed; the other ranks end quietly.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import bagu
from bagu import config as configs
from bagu.errors import BaguError

START_TIMEOUT_S = 60.0  # for all ranks to start; BAGU_START_TIMEOUT overrides it
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class PeerFailed(BaguError):
    """Another rank failed, and rank 0 has said why."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process in a job: its rank of `ranks`, its number among the processes of this machine, where rank 0 is."""

    rank: int
    ranks: int
    local_rank: int
    host: str
    port: int
    agent_store: bool = False  # torchrun serves a store at that address itself
    generation: str = "0"  # of restarts under torchrun, whose store keeps the keys of earlier ones


def find_place(environ: Mapping[str, str]) -> Place | None:
    """The place that a launcher gave this process; None if it was started alone."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        try:
            return Place(
                rank=int(environ["RANK"]), ranks=int(environ["WORLD_SIZE"]),
                local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])), host=environ["MASTER_ADDR"],
                port=int(environ["MASTER_PORT"]), agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                generation=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
            )  # fmt: skip
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
    """Make this rank's GPU the only one that torch sees: the one at its local rank. Call before CUDA is used."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    mine = [v for v in visible.split(",") if v] if visible is not None else None
    if mine is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(place.local_rank)
    elif len(mine) > 1 and place.local_rank < len(mine):
        os.environ["CUDA_VISIBLE_DEVICES"] = mine[place.local_rank]


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
    store = _store(place, timeout)
    try:
        _meet(store, place, facts, timeout)
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
        store: dist.Store = dist.TCPStore(
            place.host, place.port, place.ranks, serves, timedelta(seconds=timeout), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:  # dist.DistStoreError is a RuntimeError
        if place.rank == 0:
            raise BaguError(
                f"rank 0 cannot listen at {place.host}:{place.port}: {error}", hint="set MASTER_PORT to a free port"
            ) from error
        raise PeerFailed(f"rank {place.rank} did not reach rank 0 at {place.host}:{place.port}") from error
    return dist.PrefixStore(f"bagu/{place.generation}", store) if place.agent_store else store


def _meet(store: dist.Store, place: Place, facts: Mapping[str, object], timeout: float) -> None:
    """Wait for all ranks, and compare their facts. Rank 0 decides; the others read its verdict."""
    store.set(f"facts/{place.rank}", json.dumps(facts))
    if place.rank > 0:
        try:
            store.wait(["verdict"], timedelta(seconds=timeout + 30))
        except RuntimeError as error:
            raise PeerFailed("rank 0 ended before the start") from error
        if store.get("verdict") != b"go":
            raise PeerFailed(store.get("verdict").decode())
        return
    try:
        _compare(_facts(store, place.ranks, timeout))
    except BaguError as error:
        store.set("verdict", str(error))
        raise
    store.set("verdict", "go")


def _facts(store: dist.Store, ranks: int, timeout: float) -> list[dict[str, object]]:
    deadline, missing = time.monotonic() + timeout, set(range(ranks))
    while missing and time.monotonic() < deadline:
        missing = {rank for rank in missing if not store.check([f"facts/{rank}"])}
        if missing:
            time.sleep(0.02)
    if missing:
        named = ", ".join(map(str, sorted(missing)))
        raise BaguError(
            f"{len(missing)} of {ranks} ranks did not start within {timeout:.0f} s: rank {named}",
            hint="start them with the same address and port; BAGU_START_TIMEOUT sets the seconds to wait",
        )
    return [json.loads(store.get(f"facts/{rank}")) for rank in range(ranks)]


def _compare(facts: list[dict[str, object]]) -> None:
    for rank, other in enumerate(facts):
        if other != facts[0]:
            different = configs.diff(facts[0], other)
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise BaguError(
                f"rank {rank} differs from rank 0: {different[0]}{more}",
                hint="start every rank with the same code, configuration and kind of device",
            )


def _report(store: dist.Store, place: Place, error: BaseException) -> None:
    """Leave this rank's error for rank 0; on rank 0 raise the error that another rank left, if there is one.

    A rank that fails closes its connections, and collectives of the others raise RuntimeError. Only the first error is
    the reason.
    """
    if isinstance(error, PeerFailed | KeyboardInterrupt | SystemExit):
        return
    lost = isinstance(error, RuntimeError) and not isinstance(error, BaguError)
    try:
        if place.rank > 0:
            if not lost:
                hint = error.hint if isinstance(error, BaguError) else ""
                store.set("failed", json.dumps([place.rank, f"{type(error).__name__}: {error}", hint]))
        elif lost:
            store.wait(["failed"], timedelta(seconds=2))
            rank, what, hint = json.loads(store.get("failed"))
            raise BaguError(f"rank {rank} failed: {what}", hint=hint) from error
    except RuntimeError:  # no store, or nothing was left there: a rank was killed
        pass
    if lost:
        raise PeerFailed(f"rank {place.rank} lost its peers: {error}") from error
    if place.rank > 0 and isinstance(error, BaguError):
        raise PeerFailed(str(error)) from error
