"""Which ranks of a mesh have a parameter. It decides over which ranks its gradient is summed, and which rank counts it
in the gradient norm.

Ranks with other tokens each have a part of the sum that a gradient is: the ranks of dp, shard, ep and cp. So do the
ranks of tp for a parameter that is not divided over tp, and the first and the last stage for a tied embedding. The
gradient of an expert is complete over ep, because all tokens that chose the expert were on its rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bagu.parallel.collectives import wait_for
from bagu.parallel.mesh import Group, Mesh, MeshConfig


@dataclass(frozen=True, kw_only=True, order=True)
class Spread:
    """How one parameter is spread over the ranks. The default is a parameter that every rank has."""

    expert: bool = False  # divided over ep
    tensor: bool = False  # divided over tp
    tied: bool = False  # an embedding that the first and the last stage of a pipeline have
    copy: bool = False  # the last stage's copy of a tied embedding

    def data_group(self, mesh: Mesh | MeshConfig) -> Group:
        """The ranks over which a gradient is summed because they have other tokens."""
        if self.expert:
            return "experts"
        return "loss" if mesh.size("cp") > 1 else "data"

    def replica_group(self, mesh: Mesh | MeshConfig) -> Group:
        """The same without the ranks of shard, over which ZeRO has summed before."""
        if self.expert:
            return "expert_replicas"
        return "replicas" if mesh.size("cp") * mesh.size("ep") > 1 else "dp"

    def summed_over_tp(self, mesh: Mesh) -> bool:
        return mesh.size("tp") > 1 and not self.tensor

    def counted(self, mesh: Mesh, *, divided: bool) -> bool:
        """Whether this rank counts its gradient in the norm: of ranks with the same values, the first one does.
        `divided`: ranks of shard have different parts (ZeRO)."""
        repeated: list[Group] = ["dp", "cp"]
        repeated += [] if divided else ["shard"]
        repeated += [] if self.expert else ["ep"]
        repeated += [] if self.tensor else ["tp"]
        return not self.copy and all(mesh.coordinate(group) == 0 for group in repeated)


EVERYWHERE = Spread()
SpreadOf = Callable[[str], Spread]  # by the name of a parameter


def everywhere(name: str) -> Spread:
    """The spread of every parameter of a model that is not divided."""
    return EVERYWHERE


def sum_ends(mesh: Mesh, mine: torch.Tensor) -> None:
    """Sum a tensor of the first and of the last rank of pp, in place: the gradient of a tied embedding."""
    group, ranks = mesh.group("pp"), mesh.size("pp")
    assert group is not None
    peer = dist.get_global_rank(group, ranks - 1 if mesh.coordinate("pp") == 0 else 0)
    sent = mine.contiguous()
    other = torch.empty_like(sent)
    mesh.traffic.add("send", "pp", sent.nbytes, ranks)
    exchange = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
    wait_for(mesh, *dist.batch_isend_irecv(exchange))
    mine.add_(other)
