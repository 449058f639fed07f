"""Tree all-reduce, written out: sums travel up a binomial tree to rank 0, and the result travels down again.

In round k of the way up, rank r + 2^k sends its sum to rank r, for r a multiple of 2^(k + 1); the way down is the
reverse. There are 2 ceil(log2 N) rounds, fewer than the ring's 2 (N - 1), but every message has all S bytes: rank 0
sends ceil(log2 N) S, and a leaf S. It stands beside ring.py: few rounds suit small tensors, small chunks large ones.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from bagu.parallel.mesh import Group, Mesh


def tree_all_reduce(mesh: Mesh, tensor: torch.Tensor, group: Group) -> None:
    """Sum a contiguous `tensor` over the group, in place."""
    ranks, me, n = mesh.group(group), mesh.coordinate(group), mesh.size(group)
    if ranks is None:
        return

    def send(to: int) -> None:
        mesh.traffic.add("send", group, tensor.nbytes, n)
        dist.send(tensor, group=ranks, group_dst=to)

    rounds = [1 << k for k in range((n - 1).bit_length())]
    arrived = torch.empty_like(tensor)
    for half in rounds:  # up: half of the ranks that are left send to the other half
        if me % (2 * half) == half:
            send(me - half)
            break
        if me + half < n:
            dist.recv(arrived, group=ranks, group_src=me + half)
            tensor.add_(arrived)
    for half in reversed(rounds):  # down
        if me % (2 * half) == half:
            dist.recv(tensor, group=ranks, group_src=me - half)
        elif me % (2 * half) == 0 and me + half < n:
            send(me + half)
