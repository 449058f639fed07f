"""What the ranks of a job must share besides their configuration: data, tokenizer, and the folder of the run."""

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bagu.errors import BaguError
from bagu.parallel.meeting import compare
from bagu.parallel.mesh import Mesh

SEEN_S = 10.0  # until a new file of rank 0 must be visible to the others; NFS shows one at once to who lists the folder


def check_equal(mesh: Mesh | None, facts: Mapping[str, Any]) -> None:
    """Raise on every rank, with the same sentence, if a rank has other facts than rank 0."""
    if mesh is not None:
        compare(_from_all(mesh, dict(facts)))


def check_shared(mesh: Mesh | None, folder: Path) -> None:
    """Raise on every rank if one of them does not see what rank 0 writes to `folder`.

    Ranks write their parts of a checkpoint, and read all of it when they resume.
    """
    if mesh is None:
        return
    probe, ((nonce, where), *_) = None, _from_all(mesh, (secrets.token_hex(8), str(folder.resolve())))
    if mesh.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"shared-{nonce}.tmp"
        probe.touch()
    try:
        blind = [rank for rank, sees in enumerate(_from_all(mesh, _sees(folder, f"shared-{nonce}.tmp"))) if not sees]
    finally:
        if probe is not None:
            probe.unlink(missing_ok=True)
    if blind:
        names = ", ".join(map(str, blind))
        raise BaguError(
            f"rank {names} does not see what rank 0 writes to {where}: the folder is not shared",
            hint="give --out on a file system that all machines share (docs/parallel/launch.md)",
        )


def _sees(folder: Path, name: str) -> bool:
    deadline = time.monotonic() + SEEN_S
    while True:
        if folder.is_dir() and any(path.name == name for path in folder.iterdir()):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _from_all(mesh: Mesh, value: Any) -> list[Any]:
    """The value of each rank."""
    found: list[Any] = [None] * mesh.config.ranks
    dist.all_gather_object(found, value)
    return found
