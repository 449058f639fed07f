"""Collective times by algorithm, group size, message size and link level. Vectorized over numpy arrays.

A group of `size` ranks has `local` members in each node. Inside a node a ring or the switch (NVLS, from 5 ranks)
carries it; across nodes the members of a node drive `local` shares of the network, so the slower of the two levels
counts. Latency is per step: the ranks of a ring (all-gather, reduce-scatter), or the depth of a tree across nodes
(all-reduce, which NCCL runs as a tree where the ring would be long).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagu.parallel.planner.calibration import Calibration
from bagu.parallel.planner.cluster import Cluster

Array = NDArray[np.float64]
NVLS_FROM = 5  # ranks from which NCCL reduces in the switch (measured on H200: ml-engineering, network/README)


@dataclass(frozen=True, kw_only=True)
class Group:
    size: Array
    local: Array  # members in one node
    stride: Array  # distance of neighbouring ranks: the whole group spans size · stride GPUs


def group(cluster: Cluster, size: Array, stride: Array) -> Group:
    """A group of `size` ranks whose numbers differ by `stride`."""
    local = np.clip(cluster.gpus_per_node // np.maximum(stride, 1), 1, size)
    return Group(size=size, local=local, stride=stride)


def _network(cluster: Cluster, c: Calibration, g: Group, one_rail: bool) -> Array:
    """Bytes/s that the group moves across nodes."""
    rails = np.where(one_rail, 1.0, g.local)
    rate = cluster.network_gb_per_s * 1e9 * c.network * rails
    if cluster.pod_gpus is not None:
        rate = np.where(g.size * g.stride > cluster.pod_gpus, rate / cluster.pod_oversubscription, rate)
    return rate


def _bandwidth(cluster: Cluster, c: Calibration, g: Group, *, switch: bool, one_rail: bool = False) -> Array:
    nvlink = np.full_like(g.size, cluster.nvlink_gb_per_s * 1e9)
    if switch and cluster.nvls_gb_per_s is not None:
        nvlink = np.where(g.local >= NVLS_FROM, cluster.nvls_gb_per_s * 1e9, nvlink)
    inside = g.local >= g.size
    return np.where(inside, nvlink, np.minimum(nvlink, _network(cluster, c, g, one_rail)))


def _latency(cluster: Cluster, g: Group, *, tree: bool) -> Array:
    """Of one pass over the group."""
    nodes = np.ceil(g.size / g.local)
    inside = (g.local - 1) * cluster.nvlink_latency_us
    if tree:
        return (inside + np.ceil(np.log2(nodes)) * cluster.network_latency_us) * 1e-6
    return ((g.size - nodes) * cluster.nvlink_latency_us + (nodes - 1) * cluster.network_latency_us) * 1e-6


def all_reduce_s(cluster: Cluster, c: Calibration, g: Group, size: Array, *, calls: Array | float = 1.0) -> Array:
    """Seconds to all-reduce `size` bytes in `calls` parts."""
    share = (g.size - 1) / g.size
    steps = 2 * np.minimum(_latency(cluster, g, tree=True), _latency(cluster, g, tree=False))
    return np.where(g.size > 1, 2 * share * size / _bandwidth(cluster, c, g, switch=True) + calls * steps, 0.0)


def all_gather_s(
    cluster: Cluster, c: Calibration, g: Group, size: Array, *, one_rail: bool = False, calls: Array | float = 1.0
) -> Array:
    """Seconds to all-gather to, or reduce-scatter from, `size` bytes per rank in `calls` parts."""
    share = (g.size - 1) / g.size
    rate = _bandwidth(cluster, c, g, switch=False, one_rail=one_rail)
    return np.where(g.size > 1, share * size / rate + calls * _latency(cluster, g, tree=False), 0.0)


def all_to_all_s(cluster: Cluster, c: Calibration, g: Group, size: Array) -> Array:
    """Seconds of an all-to-all in which each rank sends `size` bytes in total. Each rank has its own share of the
    network, and what stays in the node goes over NVLink."""
    outside = np.maximum(g.size - g.local, 0) / g.size
    inside = (g.local - 1) / g.size
    own = Group(size=g.size, local=np.ones_like(g.local), stride=g.stride)
    slow = outside * size / _network(cluster, c, own, False)
    fast = inside * size / (cluster.nvlink_gb_per_s * 1e9)
    return np.where(g.size > 1, np.maximum(slow, fast) + _latency(cluster, g, tree=True), 0.0)


def send_s(cluster: Cluster, c: Calibration, size: Array, stride: Array) -> Array:
    """Seconds to send `size` bytes to the rank `stride` away."""
    inside = stride < cluster.gpus_per_node
    rate = np.where(inside, cluster.nvlink_gb_per_s, cluster.network_gb_per_s * c.network) * 1e9
    latency = np.where(inside, cluster.nvlink_latency_us, cluster.network_latency_us) * 1e-6
    return size / rate + latency
