"""Flat parameters divided over ranks (ZeRO): this rank's parts are the buffers of master, gradient and optimizer state.

    master   [N / d] fp32                     the optimizer updates it
    full     [n] per unit, compute dtype      the parameters are views of it; stage 3 frees it when it is not used
    grad     [N] or [N / d] fp32              stage 1 keeps the whole sum, stages 2 and 3 this rank's part

d is the size of the mesh's "shard" dimension. Parameters lie in the flat order in which `FlatParameters` has them; in
stage 3, where a unit is a block, first by block. A unit has parameters of one spread (parallel/spread.py). It is padded
so that d divides it: nothing where d divides ALIGN. With `offload`, master and optimizer state are in host memory: a
step copies this rank's gradient there, the host updates, and the parameters are gathered from there.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import nn

from bagu.nn.change import place
from bagu.nn.hollow import Values, value_of
from bagu.parallel.collectives import all_gather, wait_for
from bagu.parallel.data_parallel import buckets_of
from bagu.parallel.mesh import Mesh
from bagu.parallel.sharding import Division
from bagu.parallel.spread import Spread, SpreadOf, everywhere
from bagu.parallel.zero import GatherOnUse, Unit
from bagu.train.memory.flat import ALIGN, GradientHooks, Role, Segment, Slot, master_dtype, roles, trained
from bagu.train.memory.gradients import DividedGradients, WholeGradients

Stage = Literal[1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class Piece(Segment):
    """This rank's part of the parameters of one role in one unit: [start, stop) of the flat order, which may cut its
    first and last parameter."""

    unit: Unit

    @property
    def local(self) -> slice:
        """Its place in the local buffers."""
        first = self.unit.local + self.start - self.unit.low
        return slice(first, first + self.stop - self.start)


class Cut(NamedTuple):
    """The elements [start, start + len(values)) of a parameter of this shape, flattened. With `divisions`, of the part
    that they cut out of it (parallel/sharding.py)."""

    values: torch.Tensor
    start: int
    shape: tuple[int, ...]
    divisions: tuple[Division, ...] = ()


class ShardedParameters:
    """The trained parameters of a model, divided over the "shard" ranks of a mesh. The constructor keeps the values."""

    divided = True

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        stage: Stage,
        *,
        bucket_bytes: int = 25 << 20,
        offload: bool = False,
        spread: SpreadOf = everywhere,
        values: Values | None = None,
    ) -> None:
        by_name = trained(model)
        self.mesh, self.stage, self.device = mesh, stage, mesh.device
        self.dtype = master_dtype(by_name.values())
        self.state_device = torch.device("cpu") if offload else mesh.device
        blocks = list(model.get_submodule("blocks").children())
        home = {id(p): i + 1 for i, block in enumerate(blocks) for p in block.parameters()} if stage == 3 else {}
        self._spread = spread
        self._lay_out(by_name, roles(model), home, bucket_bytes)
        depth = [list(by_name).index(slot.name) for slot in self.slots]
        size = sum(u.part_size for u in self.units)
        self.master = torch.zeros(size, dtype=self.dtype, device=self.state_device)
        pinned = offload and mesh.device.type == "cuda"
        self._host_grad = torch.zeros(size, dtype=self.dtype, pin_memory=pinned) if offload else None
        for unit in self.units:
            self._adopt(unit, values)
        self.pieces = tuple(piece for unit in self.units for piece in self._pieces(unit))
        self.gradients: WholeGradients | DividedGradients
        if stage == 1:
            self.gradients = WholeGradients(self.slots, self.units[-1].stop, self.dtype, self.device)
            self.gradients.scatter_over(mesh, self.units, depth)
        else:
            used = Unit.free if stage == 3 else lambda unit: None
            self.gradients = DividedGradients(mesh, self.slots, self.units, depth, self.dtype, used)
        self._hooks = GradientHooks(self.slots, self.gradients)
        self._gathering: GatherOnUse | None = None
        if stage == 3:
            grouped = [
                [u for u, at in zip(self.units, self._homes, strict=True) if at == i] for i in range(len(blocks) + 1)
            ]
            self._gathering = GatherOnUse(model, blocks, grouped, self.master)
            self._gathering.free_all()

    # --- layout -------------------------------------------------------------------------------------------------------

    def _lay_out(
        self, by_name: dict[str, nn.Parameter], role_of: dict[str, Role], home: dict[int, int], bucket_bytes: int
    ) -> None:
        """Set `slots`, `units`, and the block of each unit (0: the root)."""
        order, ranks = list(Role), self.mesh.size("shard")
        unit_align = math.lcm(ALIGN, ranks)

        def place(name: str) -> tuple[int, str, Spread, int]:
            dtype = str(by_name[name].dtype)
            return home.get(id(by_name[name]), 0), dtype, self._spread(name), order.index(role_of[name])

        self.role_of = role_of
        self.slots: list[Slot] = []
        self.units: list[Unit] = []
        self._homes: list[int] = []
        start = local = 0
        for (block, _, spread), group in groupby(sorted(by_name, key=place), key=lambda n: place(n)[:3]):
            names = list(group)
            sizes = [-(-by_name[n].numel() // ALIGN) * ALIGN for n in names]
            ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            limit = ends[-1] if home else bucket_bytes // self.dtype.itemsize
            for bucket in buckets_of(list(zip([0, *ends], ends, strict=False)), limit):
                first, end = len(self.slots), start
                for index in bucket.members:
                    self.slots.append(Slot(name=names[index], parameter=by_name[names[index]], start=end))
                    end += sizes[index]
                stop = start + math.ceil((end - start) / unit_align) * unit_align
                members = tuple(range(first, len(self.slots)))
                dtype = by_name[names[0]].dtype
                unit = Unit(self.mesh, start=start, stop=stop, local=local, dtype=dtype, members=members, spread=spread)
                self.units.append(unit)
                self._homes.append(block)
                start, local = stop, local + unit.part_size

    def _adopt(self, unit: Unit, values: Values | None) -> None:
        """Move the parameters of a unit into its buffer, and this rank's part into the master. In stage 3 the buffer
        has memory only inside."""
        unit.allocate()
        with torch.no_grad():
            for index in unit.members:
                slot = self.slots[index]
                view = slot.of(unit.full, unit.start)
                view.copy_(value_of(slot.name, slot.parameter, values))
                place(slot.parameter, view)
            self.master[unit.local : unit.local + unit.part_size].copy_(unit.part_of(unit.full))
        if self.stage == 3:
            unit.free()

    def _pieces(self, unit: Unit) -> list[Piece]:
        """This rank's part of a unit, cut where the role changes."""
        runs = [
            (role, [self.slots[i] for i in group])
            for role, group in groupby(unit.members, key=lambda i: self.role_of[self.slots[i].name])
        ]
        stops = [slots[0].start for _, slots in runs[1:]] + [unit.stop]
        pieces = []
        for (role, slots), end in zip(runs, stops, strict=True):
            low, high = max(slots[0].start, unit.low), min(end, unit.high)
            mine = tuple(s for s in slots if s.start < high and low < s.stop)
            if low < high:
                pieces.append(Piece(role=role, dtype=unit.full.dtype, start=low, stop=high, slots=mine, unit=unit))
        return pieces

    # --- the interface of FlatParameters ------------------------------------------------------------------------------

    @property
    def grad(self) -> torch.Tensor:
        return self.gradients.grad

    def master_of(self, piece: Piece) -> torch.Tensor:
        return self.master[piece.local]

    def grad_of(self, piece: Piece) -> torch.Tensor:
        if self._host_grad is not None:
            return self._host_grad[piece.local]
        return self._device_grad_of(piece)

    def _device_grad_of(self, piece: Piece) -> torch.Tensor:
        return self.grad[piece.start : piece.stop] if self.stage == 1 else self.grad[piece.local]

    def collect(self) -> None:
        self._hooks.collect()

    def begin(self, backwards: int | None = 1) -> None:
        self.gradients.begin(backwards)

    def end_backward(self) -> None:
        self.gradients.end_backward()

    def finish(self) -> torch.Tensor:
        """End the backward passes of a step; return the norm of what this rank counts of its part."""
        norm = self.gradients.finish()
        if self._host_grad is not None:
            for piece in self.pieces:
                self._host_grad[piece.local].copy_(self._device_grad_of(piece))
        return norm

    def publish(self) -> None:
        """Bring the updated masters into the model's parameters: gather them now, or in stage 3 when they are used."""
        if self._gathering is not None:
            self._gathering.free_all()
            return
        works = []
        for unit in self.units:
            part = self.master[unit.local : unit.local + unit.part_size].to(self.device, unit.full.dtype)
            works.append(all_gather(self.mesh, unit.full, part, "shard", async_op=True))
        wait_for(self.mesh, *works)

    def whole_gradient(self, unit: Unit) -> torch.Tensor:
        """The gradient of a unit from all ranks' parts, for a rule that needs whole matrices."""
        start, stop = (unit.low, unit.high) if self.stage == 1 else (unit.local, unit.local + unit.part_size)
        part = self.grad[start:stop]
        if self._host_grad is not None:  # where the rule has changed it
            part = self._host_grad[unit.local : unit.local + unit.part_size].to(self.device)
        whole = torch.empty(unit.size, dtype=self.dtype, device=self.device)
        all_gather(self.mesh, whole, part, "shard")
        return whole

    def cuts(self, piece: Piece, values: torch.Tensor) -> dict[str, Cut]:
        """The parts of parameters that a piece has, by name. `values` is the piece's own tensor of one quantity."""
        found = {}
        for slot in piece.slots:
            low, high = max(slot.start, piece.start), min(slot.stop, piece.stop)
            inside = values[low - piece.start : high - piece.start]
            found[slot.name] = Cut(inside, low - slot.start, tuple(slot.parameter.shape))
        return found

    def masters(self, copy: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> dict[str, Cut]:
        """This rank's parts of the masters by parameter name."""
        flat = copy(self.master)
        return {n: cut for piece in self.pieces for n, cut in self.cuts(piece, flat[piece.local]).items()}

    def whole(self, values_of: Callable[[Piece], torch.Tensor | None], unit: Unit) -> dict[str, torch.Tensor]:
        """One quantity of the parameters of a unit, from all ranks' parts, by name. Every rank of shard calls it.

        `values_of` gives this rank's values of a piece, or None if pieces of its role have no such quantity.
        """
        part = torch.zeros(unit.part_size, dtype=self.dtype, device=self.device)
        for piece in self.pieces:
            values = values_of(piece) if piece.unit is unit else None
            if values is not None:
                part[piece.start - unit.low : piece.stop - unit.low].copy_(values)
        whole = torch.empty(unit.size, dtype=self.dtype, device=self.device)
        all_gather(self.mesh, whole, part, "shard")
        return {self.slots[i].name: self.slots[i].of(whole, unit.start) for i in unit.members}

    def in_turn(self) -> Iterator[list[str] | None]:
        """Yields the names of parameters that the model has meanwhile: in stage 3 unit by unit, else None for all."""
        if self._gathering is None:
            yield None
            return
        for unit in self.units:
            unit.gather(self.master)
            unit.wait()
            yield [self.slots[i].name for i in unit.members]
            unit.free()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Inside, the model has all of its parameters on every rank."""
        if self._gathering is not None:
            self._gathering.gather_all()
        yield
        if self._gathering is not None:
            self._gathering.free_all()

    def release(self, *, gather: bool = True) -> None:
        """Remove the hooks. With `gather`, the model then has all of its parameters on every rank."""
        if self._gathering is not None:
            if gather:
                self._gathering.gather_all()
            self._gathering.remove()
        self._hooks.remove()
