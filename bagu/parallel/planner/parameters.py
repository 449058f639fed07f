"""How a layout divides layers and parameters over the ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagu.parallel.planner.layouts import Layouts
from bagu.parallel.planner.model_cost import ModelCost
from bagu.parallel.planner.software import Stages

Array = NDArray[np.float64]


def stage_layers(cost: ModelCost, pp: NDArray[np.int64], stages: Stages) -> tuple[Array, Array]:
    """(layers of the longest stage without the head, layers of the last stage).

    even: the stages differ by one layer at most, and the last is one of the short ones. ceil: all stages but the last
    have the same number (DeepSpeed). ends: embedding and head count as one layer each. balanced: the head counts as
    many layers as it costs.
    """
    layers = cost.config.num_layers
    if stages == "balanced":
        longest = np.ceil((layers + cost.head_layers) / pp - 1e-9)
        rest = np.maximum(layers - (pp - 1) * longest, 0)
        return np.where(pp == 1, layers, longest), np.where(pp == 1, layers, rest)
    if stages == "ends":
        units = np.ceil((layers + 2) / pp)
        last = np.where(pp == 1, layers, units - 1)
        return np.where(pp == 1, layers, np.where(pp == 2, units - 1, units)), last
    longest = np.ceil(layers / pp)
    rest = layers - (pp - 1) * longest if stages == "ceil" else np.floor(layers / pp)
    return longest, np.where(pp == 1, layers, np.maximum(rest, 0))


def local_parameters(cost: ModelCost, x: Layouts, stages: Stages) -> tuple[Array, Array]:
    """(parameters without routed experts, parameters of routed experts) of the rank that has most."""
    config = cost.config
    most, last = stage_layers(cost, x.pp, stages)
    share = {"dense": 0.0, "replicated": 0.0, "experts": 0.0}
    for layer in cost.layers:
        weight = layer.count / config.num_layers
        share["dense"] += weight * layer.sharded
        share["replicated"] += weight * layer.replicated
        share["experts"] += weight * layer.expert_parameters
    per_layer = share["dense"] / x.tp + share["replicated"]
    tied = cost.embedding if config.tie_embeddings else 0
    ends = cost.embedding + cost.head - tied
    first = most * per_layer + np.where(x.pp == 1, ends, cost.embedding) / x.tp
    final = last * per_layer + np.where(x.pp == 1, ends, cost.head) / x.tp
    return np.maximum(first, final) + cost.final, most * share["experts"] / x.ep
