"""ZeRO: model states divided over ranks. A unit is a range of the flat parameters that is gathered and reduced at once.

    stage 1    master and optimizer state are divided       reduce-scatter gradients, all-gather parameters
    stage 2    gradients too                                the same; m micro-batches reduce-scatter m times
    stage 3    parameters too                               and all-gather each unit before forward and backward

Every unit is cut into equal parts, one per rank of the mesh's "shard" dimension, without regard to where parameters
begin and end: all rules but Muon are elementwise. Each rank's part is what it stores, updates and saves. With dp > 1
the shard group is repeated dp times: parts are summed over "dp" (hybrid sharding, HSDP), which sends 1/shard as much.

ZeRO: https://arxiv.org/abs/1910.02054
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from bagu.nn.change import around
from bagu.parallel.collectives import all_gather, wait_for
from bagu.parallel.data_parallel import Bucket
from bagu.parallel.mesh import Mesh
from bagu.parallel.spread import EVERYWHERE, Spread


def model_state_bytes(
    parameters: int, *, stage: int, ranks: int, compute_bytes: int, state_bytes: int = 8, master_bytes: int = 4
) -> int:
    """The predicted bytes of parameters, gradients, masters and optimizer state on one rank.

    Gradients have the masters' dtype (decision 005). Stage 0 is one rank, or plain data parallelism, where parameters
    of the masters' dtype are the masters. `state_bytes` is 8 for Adam. Stage 3 leaves out the units that are gathered
    while they compute: `compute_bytes` times the largest two and the root.
    """
    if stage == 0:
        compute = 0 if compute_bytes == master_bytes else compute_bytes
        return parameters * (compute + 2 * master_bytes + state_bytes)
    whole = (compute_bytes if stage < 3 else 0) + (master_bytes if stage < 2 else 0)
    part = master_bytes + state_bytes + (master_bytes if stage > 1 else 0)
    return parameters * whole + parameters * part // ranks


class Unit:
    """The range [start, stop) of the flat order, of one dtype. `full` has the parameters in compute dtype; after `free`
    it has no memory until `gather`. This rank's part is [low, high), at `local` of its local buffers.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        start: int,
        stop: int,
        local: int,
        dtype: torch.dtype,
        members: tuple[int, ...],
        spread: Spread = EVERYWHERE,
    ) -> None:
        ranks, at = mesh.size("shard"), mesh.coordinate("shard")
        assert (stop - start) % ranks == 0, "units are padded to a multiple of the ranks"
        self.mesh, self.start, self.stop, self.local, self.members = mesh, start, stop, local, members
        self.spread = spread  # of all of its parameters
        self.size, self.part_size = stop - start, (stop - start) // ranks
        self.low = start + at * self.part_size
        self.high = self.low + self.part_size
        self.full = torch.zeros(self.size, dtype=dtype, device=mesh.device)
        self.bucket = Bucket(start=start, stop=stop, members=members)
        self._whole_bytes = self.full.untyped_storage().nbytes()
        self.full.untyped_storage().resize_(0)
        self._work: dist.Work | None = None
        self._sent: torch.Tensor | None = None  # alive while the collective reads it
        self.present = False

    def allocate(self) -> None:
        """Give the parameters memory, of zeros."""
        self.full.untyped_storage().resize_(self._whole_bytes)
        self.full.zero_()
        self.present = True

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the unit's size."""
        return whole[self.low - self.start : self.high - self.start]

    def gather(self, master: torch.Tensor) -> None:
        """Start to gather the parameters from the ranks' parts, unless they are there. `master` is the local buffer."""
        if self.present:
            return
        self.full.untyped_storage().resize_(self._whole_bytes)
        self._sent = master[self.local : self.local + self.part_size].to(self.mesh.device, self.full.dtype)
        self._work = all_gather(self.mesh, self.full, self._sent, "shard", async_op=True)
        self.present = True

    def wait(self) -> None:
        """Wait until the parameters are there."""
        wait_for(self.mesh, self._work)
        self._work = self._sent = None

    def free(self) -> None:
        """Free the memory of the parameters; they stay views of it. The next `gather` brings values back."""
        self.wait()
        self.full.untyped_storage().resize_(0)
        self.present = False


class GatherOnUse:
    """Stage 3: the units of each block are gathered before its forward and backward, those of the root before the
    model's forward.

    A block's units are freed after its forward, and by the caller after its backward. While a block computes, the next
    one is gathered. The root (embedding, last norm, head) stays after the forward, because the loss uses the head.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], units: Sequence[Sequence[Unit]], master: torch.Tensor
    ) -> None:
        """`units[0]` are those of the root, `units[i + 1]` those of block i."""
        self.root, self.blocks, self.master = units[0], units[1:], master
        self._handles = around(model, before=lambda *_: self._use(self.root))
        for number, block in enumerate(blocks):
            self._handles += around(block, before=self._before(number), after=self._after(number))

    def _use(self, units: Iterable[Unit], then: Iterable[Unit] = ()) -> None:
        """Have `units` gathered, and start to gather those that are used next."""
        for unit in units:
            unit.gather(self.master)
        for unit in then:
            unit.gather(self.master)
        for unit in units:
            unit.wait()

    def _before(self, number: int) -> Callable[..., None]:
        following = self.blocks[number + 1] if number + 1 < len(self.blocks) else ()
        return lambda *_: self._use(self.blocks[number], following)

    def _after(self, number: int) -> Callable[..., None]:
        preceding = self.blocks[number - 1] if number else ()

        def before_backward(_: torch.Tensor) -> None:
            self._use(self.blocks[number], preceding)

        def hook(module: nn.Module, inputs: object, outputs: object) -> None:
            for unit in self.blocks[number]:
                unit.free()
            for tensor in _tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(before_backward)

        return hook

    def free_all(self) -> None:
        """Free every unit: the masters have changed, or a backward is done."""
        for units in (self.root, *self.blocks):
            for unit in units:
                unit.free()

    def gather_all(self) -> None:
        """Gather every unit."""
        for units in (self.root, *self.blocks):
            self._use(units)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, tuple) else []
