"""The tensors of a checkpoint that one rank of a divided model (divided.py) writes, and those that it reads.

A rank's part of a tensor is cut twice: by tp, ep and pp into local tensors (parallel/sharding.py), and by ZeRO into
ranges of the flat order. It writes what no other rank writes too, with its place in the whole (saved_tensors.py). Any
mesh can read that: a rank takes its part of each whole tensor, one at a time.
"""

from collections.abc import Callable, Mapping

import torch

from bagu.parallel.mesh import Dim, Mesh
from bagu.train.memory.divided import DividedModel, buffers_of
from bagu.train.memory.sharded import Cut
from bagu.train.state import TrainState

Tensors = dict[str, torch.Tensor | Cut]
WRITERS: tuple[Dim, ...] = ("pp", "shard", "ep", "tp")  # ranks of dp and cp have equal states


def part_of_checkpoint(mesh: Mesh | None) -> tuple[int, int]:
    """The number of this rank's part of a checkpoint, and how many there are."""
    part, parts = 0, 1
    if mesh is not None:
        for dim in WRITERS:
            part, parts = part * mesh.size(dim) + mesh.coordinate(dim), parts * mesh.size(dim)
    return part, parts


def own_tensors(
    divided: DividedModel, state: TrainState, copy: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Tensors, Tensors]:
    """What this rank writes of the model, and of the optimizer's state."""
    flat, optimizer = state.flat, state.optimizer
    states: Mapping[str, torch.Tensor | Cut] = optimizer.cuts(copy) if flat.divided else optimizer.tensors(copy)
    model = _placed(divided, flat.masters(copy))
    if divided.mesh.coordinate("shard") == 0:
        known = buffers_of(divided.whole)
        model |= {
            name: copy(value)
            for name, value in buffers_of(divided.local).items()
            if name in known
            and divided.parallel.owner(name) == divided.mesh.coordinate("pp")
            and _writes(divided, name)
        }
    return model, _placed(divided, states)


def _placed(divided: DividedModel, tensors: Mapping[str, torch.Tensor | Cut]) -> Tensors:
    """Those of this rank's tensors that it writes, each with its place in the whole."""
    found: Tensors = {}
    for name, t in tensors.items():
        parameter = name.rpartition("/")[2]  # "exp_avg/blocks.0.…" in the optimizer's state
        if not _writes(divided, parameter):
            continue
        divisions = divided.parallel.divisions(parameter)
        shape = tuple(divided.parallel.whole[parameter].shape)
        if isinstance(t, Cut):
            found[name] = t._replace(shape=shape, divisions=divisions)
        else:
            found[name] = Cut(t.reshape(-1), 0, shape, divisions) if divisions else t
    return found


def _writes(divided: DividedModel, name: str) -> bool:
    """Whether this rank writes its part of a tensor: of ranks that have the same values, the first one does."""
    spread, mesh = divided.parallel.spread(name), divided.mesh
    first_of_ep = spread.expert or mesh.coordinate("ep") == 0
    return not spread.copy and first_of_ep and (spread.tensor or mesh.coordinate("tp") == 0)


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
