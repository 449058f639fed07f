"""Ring all-reduce, written out: reduce-scatter, then all-gather, with point-to-point messages to the next rank only.

The tensor is cut into N chunks. In the first N - 1 rounds each rank sends one chunk on and adds the one it receives to
its own: every chunk travels around the ring and collects all ranks' values, and ends complete on one rank. In N - 1
more rounds the complete chunks travel around once more. Each rank sends 2 (N - 1) chunks of S / N bytes:

    2 (N - 1) / N * S      almost independent of N, where sending everything to one rank and back costs it 2 (N - 1) S

It stands beside the library's all_reduce, which training uses: it has the same result, and shows what it costs.
https://andrew.gibiansky.com/blog/machine-learning/baidu-allreduce
"""

import torch
import torch.distributed as dist

from bagu.parallel.mesh import Group, Mesh


def ring_all_reduce(mesh: Mesh, tensor: torch.Tensor, group: Group) -> None:
    """Sum a contiguous `tensor` over the group, in place."""
    ranks, me, n = mesh.group(group), mesh.coordinate(group), mesh.size(group)
    if ranks is None:
        return
    chunks = tensor.view(-1).tensor_split(n)
    right, left = (dist.get_global_rank(ranks, (me + d) % n) for d in (1, -1))

    def pass_on(sent: int, into: torch.Tensor) -> None:
        """Send one chunk to the right while another arrives from the left."""
        out = chunks[sent % n]
        mesh.traffic.add("send", group, out.nbytes, n)
        ops = [dist.P2POp(dist.isend, out, right, ranks), dist.P2POp(dist.irecv, into, left, ranks)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    for step in range(n - 1):  # reduce-scatter: afterwards chunk me + 1 is complete here
        target = chunks[(me - step - 1) % n]
        arrived = torch.empty_like(target)
        pass_on(me - step, arrived)
        target.add_(arrived)
    for step in range(n - 1):  # all-gather
        pass_on(me + 1 - step, chunks[(me - step) % n])


def tree_all_reduce(mesh: Mesh, tensor: torch.Tensor, group: Group) -> None:
    """The same over a binomial tree: in round k of the way up, rank r + 2^k sends its sum to rank r, for r a multiple
    of 2^(k + 1); the way down is the reverse. There are 2 ceil(log2 N) rounds, fewer than the ring's 2 (N - 1), but
    every message has all S bytes: few rounds suit small tensors, small chunks large ones."""
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
