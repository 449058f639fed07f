"""The part of a model that a rank has: rank 0 cuts the whole model and sends each rank its tensors."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from bagu.errors import ArgumentError
from bagu.nn import ModelConfig, Transformer
from bagu.parallel.inference import divide
from bagu.parallel.mesh import Mesh
from bagu.parallel.sharding import Replicated


def send_parts(model: Transformer, mesh: Mesh) -> Transformer:
    """Send each rank its part of `model`, which may be on the host, and return the part of rank 0. Needs the memory of
    one part on the device; `model` does not change."""
    part = Transformer(model.config, device="meta", dtype=model.embedding.weight.dtype)
    whole = model.state_dict()
    if extra := whole.keys() - part.state_dict().keys():
        raise ArgumentError(
            f"engine: tp with a model that has {len(extra)} additional tensors, {sorted(extra)[0]} first",
            hint="merge adapters into the model first",
        )
    places = divide(part, mesh)
    mine: dict[str, torch.Tensor] = {}
    for name, tensor in whole.items():
        place = places.get(name, Replicated())
        for rank in range(mesh.size("tp")):
            piece = place.cut(tensor.detach(), rank, mesh.size("tp")).to(mesh.device).contiguous()
            if rank == 0:
                mine[name] = piece.clone() if piece.data_ptr() == tensor.data_ptr() else piece
            else:
                dist.send(piece, rank)
    return _filled(part, mine)


def receive_part(
    config: ModelConfig, dtype: torch.dtype, tensors: Mapping[str, torch.dtype], mesh: Mesh
) -> Transformer:
    """The part of this rank, from `send_parts` on rank 0."""
    part = Transformer(config, device="meta", dtype=dtype)
    divide(part, mesh)
    shapes = {name: tensor.shape for name, tensor in part.state_dict().items()}
    mine: dict[str, torch.Tensor] = {}
    for name, of in tensors.items():
        mine[name] = torch.empty(shapes[name], dtype=of, device=mesh.device)
        dist.recv(mine[name], 0)
    return _filled(part, mine)


def _filled(part: Transformer, state: Mapping[str, torch.Tensor]) -> Transformer:
    part.load_state_dict(state, assign=True)
    return part.eval().requires_grad_(False)
