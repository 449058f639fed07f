"""Write one checkpoint: copy the state to host memory, write and sync its files, rename the folder when complete."""

import contextlib
import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from bagu.train.checkpoint.divided_tensors import Tensors, own_tensors, part_of_checkpoint
from bagu.train.checkpoint.folder import KINDS, MANIFEST, PARTIAL, STATE, CheckpointError, path_of, sha256
from bagu.train.checkpoint.saved_tensors import file_name, write_parts
from bagu.train.memory.divided import buffers_of
from bagu.train.memory.on_disk import on_disk
from bagu.train.memory.sharded import Cut
from bagu.train.state import TrainState

PART = "part.json"  # of one rank: its files and their checksums, or why there are none; written last
PART_TIMEOUT_S = 600.0  # how long rank 0 waits for the parts of other ranks
WRITE_ERRORS = (OSError, safetensors.SafetensorError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run, copied to host memory, so that training continues while it is written."""

    step: int
    model: Mapping[str, torch.Tensor | Cut]
    optimizer: Mapping[str, torch.Tensor | Cut]
    facts: Mapping[str, Any]
    ready: torch.cuda.Event | None  # recorded when the copies from the GPU are complete
    part: int = 0  # of a divided run: which of `parts` this rank writes
    parts: int = 1
    serial: int = 0  # of the save in its run: tells its parts from those of an earlier save of the same step


def snapshot(state: TrainState, facts: Mapping[str, Any], *, serial: int = 0, folder: Path | None = None) -> Snapshot:
    """Copy the state that a resume needs. On a GPU the copies are queued on the stream; this does not wait for them.

    A rank takes its part of a divided state; on a CPU, where the copy would double its memory, in files of `folder`.
    """
    device, divided = state.device, state.divided
    part, parts = part_of_checkpoint(state.mesh)
    copy: Callable[[torch.Tensor], torch.Tensor] = _copy
    if folder is not None and parts > 1 and device.type == "cpu":
        copy = functools.partial(on_disk, folder=folder)
    model: Tensors
    optimizer: Tensors
    if divided is not None:
        model, optimizer = own_tensors(divided, state, copy)
    else:
        model = dict(state.flat.masters(copy))
        if part == 0:
            model |= {name: copy(value) for name, value in buffers_of(state.model).items()}
        optimizer = dict(state.optimizer.cuts(copy) if state.flat.divided else state.optimizer.tensors(copy))
    ready = None
    if device.type == "cuda":
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
    own = {
        "step": state.step,
        "data_step": state.data_step,
        "updates": state.updates,
        "seed": state.config.seed,  # all randomness is a function of the seed, data_step and the micro-batch
        "guard": state.guard.state(),
        "best": state.best.state(),
        "frozen": state.frozen_digest,
        "loss": state.loss.state(),
    }
    return Snapshot(
        step=state.step,
        model=model,
        optimizer=optimizer,
        facts={**facts, **own},
        ready=ready,
        part=part,
        parts=parts,
        serial=serial,
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy. From a GPU it goes to pinned memory, queued on the stream that will change the tensor next."""
    on_gpu = tensor.device.type == "cuda"
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
    return copy.copy_(tensor.detach(), non_blocking=on_gpu)


def write(folder: Path, snap: Snapshot) -> Path | None:
    """Write `snap` as `folder`/step-…; replaces a checkpoint of the same step. A failure leaves no files behind.

    Part 0 writes the checkpoint, with the files of the other parts, and returns its path. Another part writes its files
    for part 0 and returns None.
    """
    if snap.ready is not None:
        snap.ready.synchronize()
    if snap.part == 0:
        return _write_checkpoint(folder, snap)
    _write_part(folder, snap)
    return None


def _write_checkpoint(folder: Path, snap: Snapshot) -> Path:
    final = path_of(folder, snap.step)
    partial = folder / f"{PARTIAL}{final.name}"
    try:
        _make_empty(partial)
        files = _write_tensors(partial, snap)
        _write_json(partial / STATE, snap.facts)
        files[STATE] = _facts_of(partial / STATE)
        for part in range(1, snap.parts):
            files |= _collect(folder, snap, part, partial)
        divided = any(isinstance(t, Cut) and t.divisions for t in snap.model.values())
        _write_json(partial / MANIFEST, {"format": 3 if divided else min(snap.parts, 2), "files": files})
        _sync(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _sync(folder)
    except WRITE_ERRORS as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {snap.step} was not written to {folder}: {error}",
            hint="if the disk is full, free some disk space; the checkpoints before it are whole",
        ) from error
    return final


def _write_part(folder: Path, snap: Snapshot) -> None:
    """Write the files of one rank for part 0, or the reason why they cannot be written."""
    partial = _part_folder(folder, snap, snap.part)
    try:
        _make_empty(partial)
        _announce(partial, {"serial": snap.serial, "files": _write_tensors(partial, snap)})
    except WRITE_ERRORS as error:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full disk: part 0 then waits, and reports that it waited in vain
            partial.mkdir()
            _announce(partial, {"serial": snap.serial, "error": str(error)})


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False), encoding="utf-8")
    _sync(path)


def _write_tensors(folder: Path, snap: Snapshot) -> dict[str, dict[str, Any]]:
    """Write and sync the tensor files of a snapshot; return the size and checksum of each."""
    files = {}
    for kind, tensors in zip(KINDS, (snap.model, snap.optimizer), strict=True):
        path = folder / file_name(kind, snap.part, snap.parts)
        write_parts(path, tensors)
        files[path.name] = _facts_of(path)
        _sync(path)
    return files


def _facts_of(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _part_folder(folder: Path, snap: Snapshot, part: int) -> Path:
    return folder / f"{PARTIAL}step-{snap.step:09d}-part-{part:05d}"


def _announce(folder: Path, what: Mapping[str, Any]) -> None:
    """Tell part 0 that a part is there, or why not. The file appears whole."""
    (folder / f"{PART}.tmp").write_text(json.dumps(what), encoding="utf-8")
    (folder / f"{PART}.tmp").rename(folder / PART)


def _collect(folder: Path, snap: Snapshot, part: int, into: Path) -> dict[str, dict[str, Any]]:
    """Wait for another rank's part and move its files; return their sizes and checksums."""
    place, deadline = _part_folder(folder, snap, part), time.monotonic() + PART_TIMEOUT_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((place / PART).read_text(encoding="utf-8"))
            if found["serial"] == snap.serial:
                break
        if time.monotonic() > deadline:
            raise OSError(f"part {part} of {snap.parts} was not written within {PART_TIMEOUT_S:.0f} s")
        time.sleep(0.005)
    if "error" in found:
        shutil.rmtree(place, ignore_errors=True)
        raise OSError(f"part {part} of {snap.parts}: {found['error']}")
    for name in found["files"]:
        (place / name).rename(into / name)
    shutil.rmtree(place)
    return dict(found["files"])


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power failure."""
    if os.name == "nt" and path.is_dir():  # Windows cannot sync folders
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
