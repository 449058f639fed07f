"""Read a verified checkpoint: into the state of a run, or only the tensors of its model."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bagu.train.checkpoint.divided_tensors import set_local, whole_shapes
from bagu.train.checkpoint.folder import KINDS, CheckpointError, state_of
from bagu.train.checkpoint.saved_tensors import SavedTensors
from bagu.train.memory.divided import buffers_of
from bagu.train.memory.sharded import Cut
from bagu.train.state import TrainState


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
    state.publish()
    state.step, state.data_step = facts["step"], facts["data_step"]
    state.updates = facts["updates"]
    state.guard.load(facts["guard"])
    state.best.load(facts.get("best", {}))  # older checkpoints have none
    state.loss.load_state(facts["loss"])
    return facts


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


def load_model_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The masters and buffers of a verified checkpoint, whole, by name."""
    with SavedTensors(path, "model") as saved:
        return {name: saved.whole(name) for name in saved.shapes}
