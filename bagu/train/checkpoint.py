"""One checkpoint on disk: a folder that is complete or absent, with a checksum for each file and no pickle.

    model.safetensors       fp32 masters by parameter name, and the model's buffers
    optimizer.safetensors   the optimizer's state, named "exp_avg/<parameter>"
    state.json              step, data_step, the loader's cursor, the state of the guard and of the loss, run metadata
    manifest.json           size and SHA-256 of the other files; written last

Everything is written and synced in a temporary folder, which is then renamed: a kill or a full disk leaves that folder
behind and does not change earlier checkpoints. Tensors are stored by name and in fp32, so a checkpoint does not depend
on the layout or the compute dtype of the run that wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from bagu.errors import BaguError
from bagu.train.state import TrainState

__all__ = [
    "BadCheckpoint",
    "CheckpointError",
    "Snapshot",
    "checkpoints",
    "clear_partial",
    "newest_good",
    "restore",
    "set_aside",
    "snapshot",
    "state_of",
    "unneeded",
    "verify",
    "write",
]

FORMAT = 1
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
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
    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]
    ready: torch.cuda.Event | None  # recorded when the copies from the GPU are complete


def snapshot(state: TrainState, facts: Mapping[str, Any]) -> Snapshot:
    """Copy the state that a resume needs. On a GPU the copies are queued on the stream; this does not wait for them."""
    device = state.device
    model = state.flat.masters(_copy) | {name: _copy(value) for name, value in _buffers(state.model).items()}
    optimizer = state.optimizer.tensors(_copy)
    ready = None
    if device.type == "cuda":
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
    own = {
        "step": state.step,
        "data_step": state.data_step,
        "seed": state.config.seed,  # all randomness is a function of the seed and data_step
        "guard": state.guard.state(),
        "frozen": state.frozen_digest,
        "loss": state.loss.state(),
    }
    return Snapshot(step=state.step, model=model, optimizer=optimizer, facts={**facts, **own}, ready=ready)


def write(folder: Path, snap: Snapshot) -> Path:
    """Write `snap` as `folder`/step-…; replaces a checkpoint of the same step. A failure leaves no files behind."""
    final = folder / f"step-{snap.step:09d}"
    partial = folder / f"{PARTIAL}{final.name}"
    try:
        if snap.ready is not None:
            snap.ready.synchronize()
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        safetensors.torch.save_file(dict(snap.model), partial / MODEL)
        safetensors.torch.save_file(dict(snap.optimizer), partial / OPTIMIZER)
        (partial / STATE).write_text(json.dumps(snap.facts, indent=1, allow_nan=False), encoding="utf-8")
        files = {
            n: {"bytes": (partial / n).stat().st_size, "sha256": _sha256(partial / n)}
            for n in (MODEL, OPTIMIZER, STATE)
        }
        (partial / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")
        for name in (*files, MANIFEST):
            _sync(partial / name)
        _sync(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _sync(folder)
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {snap.step} was not written to {folder}: {error}",
            hint="free some disk space; the checkpoints before it are whole",
        ) from error
    return final


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
        if manifest["format"] != FORMAT:
            raise BadCheckpoint(
                path,
                f"{path} has format {manifest['format']}, and this bagu reads {FORMAT}",
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
    files = {MODEL: state.flat.masters() | _buffers(state.model), OPTIMIZER: state.optimizer.tensors()}
    for name, places in files.items():
        _check_fit(path / name, places)
    with torch.no_grad():
        for name, places in files.items():
            with safetensors.safe_open(path / name, framework="pt") as file:
                for key, place in places.items():
                    place.copy_(file.get_tensor(key))
    state.flat.publish()
    state.step, state.data_step = facts["step"], facts["data_step"]
    state.guard.load(facts["guard"])
    state.loss.load_state(facts.get("loss", {}))  # absent in checkpoints from before losses had state
    return facts


def _check_fit(file: Path, places: Mapping[str, torch.Tensor]) -> None:
    """Raise unless the file has exactly these tensors in these shapes."""
    with safetensors.safe_open(file, framework="pt") as saved:
        shapes = {key: tuple(saved.get_slice(key).get_shape()) for key in saved.keys()}  # noqa: SIM118
    wrong = [f"{k} is missing" for k in places.keys() - shapes.keys()]
    wrong += [f"{k} has no place in this run" for k in shapes.keys() - places.keys()]
    wrong += [
        f"{k} is {list(shapes[k])}, here {list(p.shape)}"
        for k, p in places.items()
        if k in shapes and shapes[k] != tuple(p.shape)
    ]
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(
            f"{file} does not fit this run: {'; '.join(sorted(wrong)[:4])}{more}",
            hint="resume with the model and the optimizer that the run began with",
        )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy. From a GPU it goes to pinned memory, queued on the stream that will change the tensor next."""
    on_gpu = tensor.device.type == "cuda"
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
    return copy.copy_(tensor.detach(), non_blocking=on_gpu)


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """State of the model besides its parameters: running statistics, balancing biases."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


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
