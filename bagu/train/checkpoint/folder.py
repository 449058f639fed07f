"""The folder with the checkpoints of a run: their names, which ones pass verification, which ones are kept."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from bagu.errors import BaguError

FORMATS = (1, 2, 3)  # 2: in parts; 3: in parts that tp or ep divides
MODEL, STATE, MANIFEST = "model.safetensors", "state.json", "manifest.json"
KINDS = ("model", "optimizer")
PARTIAL = ".partial-"  # prefix of a folder's name until it is complete
BAD = "bad-"  # prefix of a checkpoint that failed verification


class CheckpointError(BaguError, RuntimeError):
    """A checkpoint cannot be written, or an existing one cannot be used."""


class BadCheckpoint(CheckpointError):
    """The files of the checkpoint `path` differ from what was written."""

    def __init__(self, path: Path, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


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
    if keep_best and (path := best(folder)) is not None:
        kept.add(path)
    return [path for path in found if path not in kept]


def best(folder: Path) -> Path | None:
    """The earliest checkpoint with the best evaluation; None if none was evaluated."""
    scores = {path: score for path in checkpoints(folder) if (score := _score(path)) is not None}
    return min(scores, key=scores.__getitem__, default=None)


def _score(path: Path) -> float | None:
    """The validation loss of a checkpoint; None if it has none, or its state.json is missing or unreadable."""
    try:
        facts = state_of(path)
    except (OSError, ValueError, TypeError):
        return None
    score = facts.get("validation_loss")  # the score of its evaluation, the lowest is the best
    return score if isinstance(score, float | int) else None


def verify(path: Path) -> None:
    """Raise BadCheckpoint unless every file has the size and SHA-256 that the manifest records."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] not in FORMATS:
            raise BadCheckpoint(
                path,
                f"{path} has format {manifest['format']}, and this bagu reads {', '.join(map(str, FORMATS))}",
                hint="use the bagu it is from",
            )
        for name, want in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != want["bytes"]:
                raise BadCheckpoint(path, f"{path / name} has {size} of {want['bytes']} bytes")
            if sha256(path / name) != want["sha256"]:
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


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
