"""Expert parallelism: each rank of ep has E / e of the experts, and tokens travel to them.

Paper: https://arxiv.org/abs/2006.16668

Ranks of ep have different tokens, like ranks of dp, and the same weights except for the experts. In an MoE layer

    all-to-all   the number of tokens for each expert     [E] integers
    all-to-all   the tokens, top_k copies of each         T K rows of D
    the experts of this rank, as grouped matmuls
    all-to-all   their outputs, back to the tokens' ranks

The backward has the two all-to-alls of rows in opposite order. No token is dropped, so a rank may receive up to e times
as many rows as it sends. The gradient of an expert is complete on its rank: it is not summed over ep, unlike all other
gradients. The router, its balance loss and the shared experts use the tokens of their rank only, as on one device.
"""

import torch

from bagu.errors import ArgumentError
from bagu.nn import ModelConfig, Transformer
from bagu.nn.change import override, place
from bagu.nn.hollow import Values, value_of
from bagu.nn.moe import MoE
from bagu.parallel import collectives
from bagu.parallel.exchange import swap_rows
from bagu.parallel.mesh import Mesh
from bagu.parallel.sharding import EXPERTS, Placement, placements


def check_expert_parallel(config: ModelConfig, ep: int) -> None:
    """Raise if the experts of the model cannot be divided over this many ranks."""
    if config.moe is None:
        raise ArgumentError(f"ep={ep} with a model that has no experts", hint="use dp")
    if config.moe.num_experts % ep:
        raise ArgumentError(f"ep={ep} does not divide {config.moe.num_experts} experts", hint="choose a divisor")


def expert_parallel(model: Transformer, mesh: Mesh, values: Values | None = None) -> dict[str, Placement]:
    """Divide the experts of a model, or of a stage of one, over ep, in place. Returns the placement of each parameter.

    All ranks have the same weights before. Flat buffers and optimizers are created afterwards.
    """
    check_expert_parallel(model.config, mesh.size("ep"))
    places = placements([name for name, _ in model.named_parameters()], EXPERTS, model.config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            place(p, places[name].cut(value_of(name, p, values), mesh.coordinate("ep"), mesh.size("ep")).clone())
    for layer in model.modules():
        if isinstance(layer, MoE):
            override(layer, visit=_Visit(layer, mesh))
    return places


class _Visit:
    """`MoE.visit` with experts on several ranks."""

    def __init__(self, layer: MoE, mesh: Mesh) -> None:
        self.layer, self.mesh = layer, mesh

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, load: torch.Tensor
    ) -> torch.Tensor:
        layer, mesh, (T, D), K = self.layer, self.mesh, x.shape, self.layer.moe.top_k
        ranks = mesh.size("ep")
        order = experts.flatten().argsort(stable=True)  # choices sorted by expert, so by rank; as in MoE.visit
        counts = torch.empty_like(load)  # [rank, own expert]: the rows that each rank sends here
        collectives.all_to_all(mesh, counts, load, "ep")
        sent, received = (n.view(ranks, -1).sum(1).tolist() for n in (load, counts))
        rows = swap_rows(x.index_select(0, order // K), received, sent, mesh, "ep")
        # Rows arrive by rank, then by expert; the grouped matmul wants them by expert.
        own = torch.arange(len(load) // ranks, device=x.device).repeat(ranks)
        by_expert = own.repeat_interleave(counts, output_size=len(rows)).argsort(stable=True)
        offsets = counts.view(ranks, -1).sum(0).cumsum(0).to(torch.int32)
        y = layer.run_experts(rows.index_select(0, by_expert), offsets)
        y = swap_rows(y.index_select(0, _inverse(by_expert)), sent, received, mesh, "ep")
        choices = y.index_select(0, _inverse(order)).view(T, K, D)
        return torch.einsum("tkd,tk->td", choices, weights.to(x.dtype))


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
