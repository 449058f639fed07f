"""One checkpoint on disk: a folder that is complete or absent, with a checksum for each file and no pickle.

    model.safetensors       fp32 masters by parameter name, and the model's buffers
    optimizer.safetensors   the optimizer's state, named "exp_avg/<parameter>"
    state.json              step, data_step, the loader's cursor, the state of the guard and of the loss, run metadata
    manifest.json           size and SHA-256 of the other files; written last

A run whose states are divided over ranks (ZeRO) has a model and an optimizer file per rank (saved_tensors.py). Each
rank writes its own to a folder beside the others'; rank 0 waits for all of them and puts the checkpoint together. A run
whose model is divided (tp, cp, pp, ep) gathers whole tensors on rank 0, which writes them (whole_tensors.py).

Everything is written and synced in a temporary folder, which is then renamed: a kill or a full disk leaves that folder
behind and does not change earlier checkpoints. Tensors are stored by name and in fp32, so a checkpoint does not depend
on the layout or the compute dtype of the run that wrote it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from bagu.errors import BaguError
from bagu.train.divided import buffers_of
from bagu.train.saved_tensors import SavedTensors, file_name, write_parts
from bagu.train.sharded import Cut
from bagu.train.state import TrainState
from bagu.train.whole_tensors import gathered_model, gathered_optimizer, set_local, whole_shapes

__all__ = [
    "BadCheckpoint",
    "CheckpointError",
    "Snapshot",
    "checkpoints",
    "clear_partial",
    "load_model_tensors",
    "newest_good",
    "path_of",
    "restore",
    "set_aside",
    "snapshot",
    "state_of",
    "unneeded",
    "verify",
    "write",
]

FORMATS = (1, 2)  # 2: in parts
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
KINDS = ("model", "optimizer")
PART = "part.json"  # of one rank: its files and their checksums, or why there are none; written last
PART_TIMEOUT_S = 600.0  # how long rank 0 waits for the parts of other ranks
PARTIAL = ".partial-"  # prefix of a folder's name until it is complete
BAD = "bad-"  # prefix of a checkpoint that failed verification


class CheckpointError(BaguError, RuntimeError):
    """A checkpoint cannot be written, or an existing one cannot be used."""


class BadCheckpoint(CheckpointError):
    """The files of the checkpoint `path` differ from what was written."""

    def __init__(self, path: Path, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


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


def snapshot(state: TrainState, facts: Mapping[str, Any], *, serial: int = 0) -> Snapshot:
    """Copy the state that a resume needs. On a GPU the copies are queued on the stream; this does not wait for them.

    Every rank of a divided model calls it, and rank 0 has the tensors.
    """
    device, divided = state.device, state.divided
    model: dict[str, torch.Tensor | Cut]
    optimizer: dict[str, torch.Tensor | Cut]
    part, parts = (0, 1) if state.mesh is None else (state.mesh.coordinate("shard"), state.mesh.size("shard"))
    if divided is not None:
        part, parts = state.mesh.rank, 1  # type: ignore[union-attr]
        model, optimizer = {**gathered_model(state, divided, _copy)}, {**gathered_optimizer(state, divided, _copy)}
    else:
        model = dict(state.flat.masters(_copy))
        if part == 0:
            model |= {name: _copy(value) for name, value in buffers_of(state.model).items()}
        optimizer = dict(state.optimizer.cuts(_copy) if state.flat.divided else state.optimizer.tensors(_copy))
    ready = None
    if device.type == "cuda":
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
    own = {
        "step": state.step,
        "data_step": state.data_step,
        "seed": state.config.seed,  # all randomness is a function of the seed, data_step and the micro-batch
        "guard": state.guard.state(),
        "frozen": state.frozen_digest,
        "loss": state.loss.state(),
    }
    return Snapshot(
        step=state.step, model=model, optimizer=optimizer, facts={**facts, **own}, ready=ready, part=part,
        parts=parts, serial=serial,
    )  # fmt: skip


def write(folder: Path, snap: Snapshot) -> Path | None:
    """Write `snap` as `folder`/step-…; replaces a checkpoint of the same step. A failure leaves no files behind.

    Part 0 writes the checkpoint, with the files of the other parts, and returns its path. Another part writes its files
    for part 0 and returns None.
    """
    final = path_of(folder, snap.step)
    partial = folder / f"{PARTIAL}{final.name}" if snap.part == 0 else _part_folder(folder, snap, snap.part)
    try:
        if snap.ready is not None:
            snap.ready.synchronize()
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        files = _write_tensors(partial, snap)
        if snap.part > 0:
            _announce(partial, {"serial": snap.serial, "files": files})
            return None
        (partial / STATE).write_text(json.dumps(snap.facts, indent=1, allow_nan=False), encoding="utf-8")
        _sync(partial / STATE)
        files[STATE] = _facts_of(partial / STATE)
        for part in range(1, snap.parts):
            files |= _collect(folder, snap, part, partial)
        manifest = {"format": 1 if snap.parts == 1 else 2, "files": files}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _sync(partial / MANIFEST)
        _sync(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _sync(folder)
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if snap.part > 0:
            with contextlib.suppress(OSError):  # a full disk: part 0 then waits, and reports that it waited in vain
                partial.mkdir()
                _announce(partial, {"serial": snap.serial, "error": str(error)})
            return None
        raise CheckpointError(
            f"the checkpoint of step {snap.step} was not written to {folder}: {error}",
            hint="if the disk is full, free some disk space; the checkpoints before it are whole",
        ) from error
    return final


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
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


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


def path_of(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return folder / f"step-{step:09d}"


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, by ascending step. Their content is not verified here: see `verify`."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir())


def clear_partial(folder: Path) -> None:
    """Remove the incomplete checkpoint of a killed run."""
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path)


def unneeded(folder: Path, *, keep_last: int, keep_best: bool) -> list[Path]:
    """The checkpoints that are neither among the last `keep_last` nor the best one."""
    found = checkpoints(folder)
    kept = set(found[-keep_last:])
    if keep_best:
        scores = {path: score for path in found if (score := _score(path)) is not None}
        kept |= set(sorted(scores, key=scores.__getitem__)[:1])
    return [path for path in found if path not in kept]


def _score(path: Path) -> float | None:
    """The validation loss of a checkpoint; None if it has none, or its state.json is missing or unreadable."""
    try:
        facts = state_of(path)
    except (OSError, ValueError, TypeError):
        return None
    score = facts.get("validation_loss", facts.get("val_loss_nats"))  # the second is the name in older checkpoints
    return score if isinstance(score, float | int) else None


def verify(path: Path) -> None:
    """Raise BadCheckpoint unless every file has the size and SHA-256 that the manifest records."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] not in FORMATS:
            raise BadCheckpoint(
                path,
                f"{path} has format {manifest['format']}, and this bagu reads {' and '.join(map(str, FORMATS))}",
                hint="use the bagu it is from",
            )
        for name, want in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != want["bytes"]:
                raise BadCheckpoint(path, f"{path / name} has {size} of {want['bytes']} bytes")
            if _sha256(path / name) != want["sha256"]:
                raise BadCheckpoint(path, f"{path / name} is not what was written: its SHA-256 differs")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(path, f"{path} cannot be read: {error}") from error


def newest_good(folder: Path) -> tuple[Path | None, list[BadCheckpoint]]:
    """The last checkpoint that passes verification, and the errors of the later ones. Nothing in the folder changes.

    Returns (None, []) if there is no checkpoint. If there are checkpoints and none is usable, every call raises:
    starting again from step 0 is the user's decision. Checkpoints that `set_aside` has renamed count too.
    """
    found = checkpoints(folder)
    bad: list[BadCheckpoint] = []
    for path in reversed(found):
        try:
            verify(path)
        except BadCheckpoint as error:
            bad.append(error)
        else:
            return path, bad
    aside = sorted(folder.glob(f"{BAD}step-*"))
    if found or aside:
        why = str(bad[0]) if bad else f"{aside[-1].name} failed its check earlier"
        raise CheckpointError(
            f"none of the {len(found) + len(aside)} checkpoints in {folder} can be used: {why}",
            hint="restore one from a backup, or begin a new run in another folder",
        )
    return None, []


def set_aside(path: Path) -> None:
    """Rename a checkpoint that is not usable, so that it is neither tried again nor deleted."""
    name = path.with_name(BAD + path.name)
    shutil.rmtree(name, ignore_errors=True)  # an earlier bad checkpoint of the same step
    path.rename(name)


def state_of(path: Path) -> dict[str, Any]:
    """The content of state.json of a verified checkpoint."""
    return dict(json.loads((path / STATE).read_text(encoding="utf-8")))


def restore(path: Path, state: TrainState) -> dict[str, Any]:
    """Load a verified checkpoint into `state`; return the facts that were saved with it.

    Changes nothing unless the names and shapes of all tensors match.
    """
    facts = state_of(path)
    if facts["frozen"] != state.frozen_digest:
        raise CheckpointError(
            f"the frozen weights of the model are not those {path} was trained on", hint="load the same base model"
        )
    divided = state.divided
    masters, states = state.flat.masters(), state.optimizer.cuts() if state.flat.divided else state.optimizer.tensors()
    buffers = buffers_of(state.model)
    places: dict[str, dict[str, torch.Tensor | Cut]] = {"model": {**masters, **buffers}, "optimizer": {**states}}
    shapes = {
        "model": {slot.name: tuple(slot.parameter.shape) for slot in state.flat.slots}
        | {name: tuple(value.shape) for name, value in buffers.items()},
        "optimizer": state.optimizer.shapes(),
    }
    if divided is not None:
        shapes = whole_shapes(state, divided)
    with contextlib.ExitStack() as stack, torch.no_grad():
        saved = {kind: stack.enter_context(SavedTensors(path, kind)) for kind in KINDS}
        for kind in KINDS:
            _check_fit(path, kind, saved[kind].shapes, shapes[kind])
        for kind in KINDS:
            for name, place in places[kind].items():
                if divided is not None:
                    set_local(divided, name.rpartition("/")[2], place, saved[kind].whole(name))
                elif isinstance(place, Cut):
                    place.values.copy_(saved[kind].read(name, place.start, place.start + len(place.values)))
                else:
                    place.copy_(saved[kind].whole(name))
    state.flat.publish()
    state.step, state.data_step = facts["step"], facts["data_step"]
    state.guard.load(facts["guard"])
    state.loss.load_state(facts.get("loss", {}))  # absent in checkpoints from before losses had state
    return facts


def load_model_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The masters and buffers of a verified checkpoint, whole, by name."""
    with SavedTensors(path, "model") as saved:
        return {name: saved.whole(name) for name in saved.shapes}


def _check_fit(
    path: Path, kind: str, saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise unless the checkpoint has exactly these tensors in these shapes."""
    wrong = [f"{k} is missing" for k in wanted.keys() - saved.keys()]
    wrong += [f"{k} has no place in this run" for k in saved.keys() - wanted.keys()]
    wrong += [
        f"{k} is {list(saved[k])}, here {list(shape)}"
        for k, shape in wanted.items()
        if k in saved and tuple(saved[k]) != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(
            f"{path / kind}.safetensors does not fit this run: {'; '.join(sorted(wrong)[:4])}{more}",
            hint="resume with the model and the optimizer that the run began with",
        )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy. From a GPU it goes to pinned memory, queued on the stream that will change the tensor next."""
    on_gpu = tensor.device.type == "cuda"
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
    return copy.copy_(tensor.detach(), non_blocking=on_gpu)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power failure."""
    if os.name == "nt" and path.is_dir():  # Windows cannot sync folders
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
