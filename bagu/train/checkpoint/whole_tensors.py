"""The tensors of a checkpoint as one process has them, from and to the ranks of a divided model (divided.py).

A rank's part of a tensor is cut twice: by tp, ep and pp into local tensors (parallel/sharding.py), and by ZeRO into
ranges of the flat order. Gathering goes the other way, one tensor at a time, and only rank 0 keeps the result: a
checkpoint of a divided model is that of one process, and any mesh can read it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bagu.train.memory.divided import DividedModel, buffers_of
from bagu.train.memory.sharded import Cut, ShardedParameters
from bagu.train.optim import Optimizer
from bagu.train.state import TrainState

Copy = Callable[[torch.Tensor], torch.Tensor]


def gathered_model(state: TrainState, divided: DividedModel, copy: Copy) -> dict[str, torch.Tensor]:
    """Masters and buffers of the whole model, on rank 0; the others return nothing. Every rank calls it."""
    own = _local_masters(state) | buffers_of(divided.local)
    names = [*divided.roles, *buffers_of(divided.whole)]
    dtypes = dict.fromkeys(divided.roles, state.flat.dtype)
    return _gathered(divided, names, own, dtypes.get, copy)


def gathered_optimizer(state: TrainState, divided: DividedModel, copy: Copy) -> dict[str, torch.Tensor]:
    """The optimizer's state of the whole model, in the same way."""
    found = {}
    for quantity in _quantities(state.optimizer, divided):
        names = [name for name, role in divided.roles.items() if quantity in state.optimizer.state_names(role)]
        own = _local_state(state, quantity)
        for name, tensor in _gathered(divided, names, own, lambda _: state.flat.dtype, copy).items():
            found[f"{quantity}/{name}"] = tensor
    return found


def whole_shapes(state: TrainState, divided: DividedModel) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of all tensors of a checkpoint, by kind."""
    shapes = {name: tuple(x.shape) for name, x in divided.parallel.whole.items()}
    return {
        "model": {name: shapes[name] for name in (*divided.roles, *buffers_of(divided.whole))},
        "optimizer": {
            f"{quantity}/{name}": shapes[name]
            for name, role in divided.roles.items()
            for quantity in state.optimizer.state_names(role)
        },
    }


def set_local(divided: DividedModel, name: str, place: torch.Tensor | Cut, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor to its place. `name` is that of the parameter or buffer."""
    part = divided.parallel.part_of(name, whole)
    if isinstance(place, Cut):
        place.values.copy_(part.reshape(-1)[place.start : place.start + len(place.values)])
    else:
        place.copy_(part)


def _gathered(
    divided: DividedModel, names: list[str], own: dict[str, torch.Tensor], dtype_of: Callable[[str], Any], copy: Copy
) -> dict[str, torch.Tensor]:
    found = {}
    parameters = dict(divided.local.named_parameters())
    for name in names:
        part, dtype = own.get(name), dtype_of(name)
        if part is None and name in parameters:  # a bias that rank 0 of tp trains: the others have frozen zeros
            part = torch.zeros_like(parameters[name], dtype=dtype)
        whole = divided.parallel.whole_of(name, part, dtype)
        if divided.mesh.rank == 0:
            found[name] = copy(whole)
    return found


def _quantities(optimizer: Optimizer, divided: DividedModel) -> Iterator[str]:
    """The quantities of the optimizer's state, in the same order on every rank."""
    return iter(dict.fromkeys(q for role in divided.roles.values() for q in optimizer.state_names(role)))


def _local_masters(state: TrainState) -> dict[str, torch.Tensor]:
    """The masters of this rank's part of the model, whole over shard."""
    flat = state.flat
    if not isinstance(flat, ShardedParameters):
        return flat.masters()
    return {name: t for unit in flat.units for name, t in flat.whole(flat.master_of, unit).items()}


def _local_state(state: TrainState, quantity: str) -> dict[str, torch.Tensor]:
    """One quantity of the optimizer's state of this rank's part of the model, whole over shard."""
    flat, optimizer = state.flat, state.optimizer
    if not isinstance(flat, ShardedParameters):
        every = optimizer.tensors()
        return {name.partition("/")[2]: t for name, t in every.items() if name.startswith(f"{quantity}/")}
    values = {part.segment.start: part.state.get(quantity) for part in optimizer.parts}
    found: dict[str, torch.Tensor] = {}
    for unit in flat.units:
        names = {flat.slots[i].name for i in unit.members}
        kept = {n for n in names if quantity in optimizer.state_names(flat.role_of[n])}
        if kept:  # the same on every rank of shard
            whole = flat.whole(lambda piece: values[piece.start], unit)
            found |= {name: whole[name] for name in kept}
    return found
