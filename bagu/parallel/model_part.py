"""What one rank of a mesh has of a model, and the bytes that it sends in a step, as formulas.

The part is that of rank 0: the first stage of a pipeline. T is the number of tokens of a micro-batch on a rank of cp,
m the micro-batches of a rank, D the width; every number is multiplied by (n - 1) / n of its group (traffic.py).

    tp    a layer: 8 T D m, half of it all-gathers, half reduce-scatters; 2 T D m at the embedding, and as much before
          the head with 3 T m numbers of the loss; once a step the gradients of parameters that are not divided
    cp    a layer, ring: 2 T G d m (c - 1) sends in the forward, twice that in the backward; ulysses: 4 T (H + G) d m
    ep    a layer with experts: 4 T K D m on average over ranks, and E counts
    pp    a message T D m for each neighbouring stage on another rank; once a step the gradient of a tied embedding
    dp    the gradients of the parameters of the rank (explain.py)
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from bagu.nn.config import ModelConfig
from bagu.parallel.context import Method
from bagu.parallel.mesh import MeshConfig
from bagu.parallel.pipeline import Schedule, stages_of
from bagu.parallel.sharding import EXPERTS, TENSOR, First, Split, placements
from bagu.parallel.spread import Spread
from bagu.parallel.stages import costs, cut
from bagu.parallel.traffic import Kind, sent_bytes

ACCUMULATOR = 4  # bytes of a value of the loss, and of a gradient of keys and values in the ring


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """The trained parameters of rank 0, by their spread, and its layers.

    `root` are those outside of the blocks, by spread. `last`: the rank has the last stage too.
    """

    parameters: Mapping[Spread, int]
    root: Mapping[Spread, int]
    layers: int
    expert_layers: int
    last: bool = True
    stages: int = 1  # of this rank

    @property
    def total(self) -> int:
        return sum(self.parameters.values())


def model_part_of(
    model: nn.Module, config: ModelConfig, mesh: MeshConfig, *, schedule: Schedule, stages_per_rank: int
) -> ModelPart:
    """What rank 0 has of a model. `model` may be on the meta device: only names and shapes are read."""
    mine, blocks = [0], range(config.num_layers)
    own = set(blocks)
    if mesh.pp > 1:
        mine = stages_of(schedule, 0, mesh.pp, stages_per_rank)
        cuts = cut(costs(config, config.max_len), mesh.pp * len(mine))
        own = {layer for stage in mine for layer in cuts[stage]}
    last = mesh.pp == 1 or mesh.pp * len(mine) - 1 in mine
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    tensor, experts = (placements(names, table, config) for table in (TENSOR, EXPERTS))
    parameters: Counter[Spread] = Counter()
    root: Counter[Spread] = Counter()
    for name, p in model.named_parameters():
        top, _, rest = name.partition(".")
        here = int(rest.partition(".")[0]) in own if top == "blocks" else last or top not in ("norm", "mlm", "head")
        if name not in tensor or not here:
            continue
        by_tp, by_ep = mesh.tp > 1 and tensor[name], mesh.ep > 1 and experts[name]
        size = p.numel()
        for place, ranks in ((by_tp, mesh.tp), (by_ep, mesh.ep)):
            if isinstance(place, Split):  # rank 0 has the larger part of a vocabulary that is not divided equally
                length = p.shape[place.dim]
                size = size // length * (-(-length // (place.blocks * ranks)) * place.blocks)
        tied = name == "embedding.weight" and config.tie_embeddings and mesh.pp > 1 and not last
        spread = Spread(expert=isinstance(by_ep, Split), tensor=isinstance(by_tp, Split | First), tied=tied)
        parameters[spread] += size
        if top != "blocks":
            root[spread] += size
    return ModelPart(
        parameters=parameters,
        root=root,
        layers=len(own),
        last=last,
        stages=len(mine),
        expert_layers=sum(config.experts(layer) is not None for layer in own),
    )


def activation_bytes(
    part: ModelPart,
    config: ModelConfig,
    mesh: MeshConfig,
    *,
    tokens: int,
    micro_batches: int,
    compute_bytes: int,
    method: Method,
    schedule: Schedule,
) -> dict[tuple[Kind, str], int]:
    """The predicted bytes that rank 0 sends in a step for activations and for parameters that tp does not divide.

    `tokens` are those of a whole micro-batch, `micro_batches` those of a rank. Blocks are not recomputed.
    """
    found: Counter[tuple[Kind, str]] = Counter()
    m, T = micro_batches, tokens // mesh.cp
    stream = T * config.hidden_size * compute_bytes

    def add(kind: Kind, group: str, size: int, ranks: int, calls: int = 1) -> None:
        found[kind, group] += calls * sent_bytes(kind, size, ranks)

    if mesh.tp > 1:
        calls = (4 * part.layers + 1 + part.last) * m  # 1: the embedding
        add("all_gather", "tp", stream, mesh.tp, calls)
        add("reduce_scatter", "tp", stream, mesh.tp, calls)
        if part.last:
            add("all_reduce", "tp", 3 * T * ACCUMULATOR, mesh.tp, m)
        for spread, number in part.parameters.items():
            add("all_reduce", "tp", 0 if spread.tensor else number * ACCUMULATOR, mesh.tp)
    heads, groups = config.num_heads * config.head_dim // mesh.tp, config.num_kv_heads * config.head_dim // mesh.tp
    if mesh.cp > 1 and config.mla is None and method == "ring":
        pairs = 2 * T * groups * (2 * compute_bytes + max(ACCUMULATOR, compute_bytes))
        add("send", "cp", pairs, mesh.cp, (mesh.cp - 1) * part.layers * m)
    elif mesh.cp > 1 and config.mla is None:
        add("all_to_all", "cp", 2 * T * 2 * (heads + groups) * compute_bytes, mesh.cp, part.layers * m)
    if mesh.ep > 1 and config.moe is not None:
        size = 4 * config.moe.top_k * stream + 8 * config.moe.num_experts
        add("all_to_all", "ep", size, mesh.ep, part.expert_layers * m)
    if mesh.pp > 1:
        messages = 2 if schedule == "zero_bubble" else 2 * part.stages - 1  # the first stage has none before it
        add("send", "pp", stream // mesh.tp, mesh.pp, messages * m)
        for spread, number in part.parameters.items():
            add("send", "pp", number * ACCUMULATOR if spread.tied else 0, mesh.pp)
    return {key: size for key, size in found.items() if size}
