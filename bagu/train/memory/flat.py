"""Flat memory: every trained parameter is a view of one long buffer, and so are its master and its gradient.

    master   [N] fp32               the optimizer updates it
    compute  [n] per segment        the model computes with it; an fp32 segment uses the masters themselves
    grad     [N] fp32               the sum over a step's micro-batches

(fp64 instead of fp32 if the model is fp64, which only tests use.) N counts all trained parameters, each padded to a
multiple of `ALIGN` elements; padding is zero and stays zero. With one buffer the gradient norm is one reduction and an
update is a few passes over memory, for any number of layers. A segment is a contiguous range of the buffer with one
role (optimizer rule, decay or not) and one compute dtype.

A hook moves each gradient out of autograd as soon as it is complete (gradients.py). Under data parallelism gradients
are summed over the ranks; sharded.py divides the buffers over them.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

import torch
from torch import nn

from bagu.errors import BaguError
from bagu.nn.change import place
from bagu.nn.hollow import Values, value_of
from bagu.nn.linear import Linear
from bagu.nn.moe import MoE
from bagu.parallel.mesh import Mesh
from bagu.parallel.spread import SpreadOf, everywhere
from bagu.train.memory.gradients import DividedGradients, WholeGradients

ALIGN = 64  # elements: 128 bytes of bf16, so a kernel's vector loads stay aligned for every parameter


class Role(StrEnum):
    """A parameter's role in the optimizer. Matrices and embeddings are decayed, vectors (norms, biases) are not."""

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    VECTOR = "vector"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter and its range [start, start + numel) in the flat buffers."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()

    def of(self, flat: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """This parameter's part of a buffer that begins at flat position `offset`, in the parameter's shape."""
        start = self.start - offset
        return flat[start : start + self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Adjacent parameters of one role and dtype."""

    role: Role
    dtype: torch.dtype
    start: int
    stop: int
    slots: tuple[Slot, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.stop]


def roles(model: nn.Module) -> dict[str, Role]:
    """The role of each trained parameter, by name; a parameter that is used twice (a tied head) has one name.

    A matrix maps activations to activations: it belongs to a linear layer or to experts. Any other table of vectors
    (tokens, positions) is an embedding.
    """
    maps = {id(p) for m in model.modules() if isinstance(m, (Linear, MoE)) for p in m.parameters(recurse=False)}

    def role(p: nn.Parameter) -> Role:
        if p.ndim < 2:
            return Role.VECTOR
        return Role.MATRIX if id(p) in maps else Role.EMBEDDING

    return {name: role(p) for name, p in model.named_parameters() if p.requires_grad}


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name, in the order of the model. Raises if there are none."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise BaguError("the model has no trainable parameter", hint="set requires_grad on what is to be trained")
    return found


def master_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """fp32, or fp64 if a parameter is."""
    return torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32


def lay_out(
    by_name: Mapping[str, nn.Parameter], role_of: Mapping[str, Role], spread: SpreadOf = everywhere
) -> tuple[Segment, ...]:
    """The places of parameters in flat buffers: by role, dtype and spread, each in the order of the model."""
    order = list(Role)
    names = sorted(role_of, key=lambda n: (order.index(role_of[n]), str(by_name[n].dtype), spread(n)))  # stable
    segments, end = [], 0
    for (role, dtype), members in groupby(names, key=lambda n: (role_of[n], by_name[n].dtype)):
        start, slots = end, []
        for name in members:
            slots.append(Slot(name=name, parameter=by_name[name], start=end))
            end += -(-by_name[name].numel() // ALIGN) * ALIGN
        segments.append(Segment(role=role, dtype=dtype, start=start, stop=end, slots=tuple(slots)))
    return tuple(segments)


class GradientHooks:
    """Moves every gradient out of autograd as soon as it is complete: hooks on the parameters of `slots`."""

    def __init__(self, slots: Sequence[Slot], gradients: WholeGradients | DividedGradients) -> None:
        self.slots, self.gradients = slots, gradients
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(functools.partial(self._take, i))
            for i, slot in enumerate(slots)
        ]

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.gradients.take(index, parameter.grad)
        parameter.grad = None

    def collect(self) -> None:
        """Move gradients that autograd has kept: a backward in two parts (zero-bubble) does not run the hooks."""
        for index, slot in enumerate(self.slots):
            if slot.parameter.grad is not None:
                self._take(index, slot.parameter)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class FlatParameters:
    """The trained parameters of a model in flat buffers. The constructor moves the data and keeps the values.

    With a mesh, gradients are summed over its ranks as the `spread` of each parameter says, in buckets of
    `bucket_bytes`. `values` has those of a hollow model. Frozen parameters do not change. `release()` removes the
    hooks; the parameters stay views of these buffers.
    """

    divided = False  # every rank has the whole master and the whole gradient

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh | None = None,
        *,
        bucket_bytes: int = 25 << 20,
        spread: SpreadOf = everywhere,
        values: Values | None = None,
    ) -> None:
        by_name, role_of = trained(model), roles(model)
        self.device = next(iter(by_name.values())).device
        self.dtype, self.role_of = master_dtype(by_name.values()), role_of
        self.segments = lay_out(by_name, role_of, spread)
        self.slots = [slot for segment in self.segments for slot in segment.slots]
        end = self.segments[-1].stop
        self.master = torch.zeros(end, dtype=self.dtype, device=self.device)
        self._compute = [self._adopt(segment, values) for segment in self.segments]
        self.gradients = WholeGradients(self.slots, end, self.dtype, self.device)
        if mesh is not None:
            depth = [list(by_name).index(slot.name) for slot in self.slots]
            self.gradients.reduce_over(mesh, depth, bucket_bytes, [spread(slot.name) for slot in self.slots])
        self._hooks = GradientHooks(self.slots, self.gradients)

    @property
    def pieces(self) -> tuple[Segment, ...]:
        """What the optimizer of this rank updates: here all."""
        return self.segments

    @property
    def state_device(self) -> torch.device:
        """Where masters and optimizer state are."""
        return self.device

    @property
    def grad(self) -> torch.Tensor:
        return self.gradients.grad

    def master_of(self, piece: Segment) -> torch.Tensor:
        return piece.of(self.master)

    def grad_of(self, piece: Segment) -> torch.Tensor:
        return piece.of(self.grad)

    def _adopt(self, segment: Segment, values: Values | None) -> torch.Tensor | None:
        """Copy a segment's parameters into the master and make them views; returns the compute buffer, if any."""
        low = segment.dtype != self.dtype
        size = segment.stop - segment.start
        compute = torch.zeros(size, dtype=segment.dtype, device=self.device) if low else None
        with torch.no_grad():
            for slot in segment.slots:
                slot.of(self.master).copy_(value_of(slot.name, slot.parameter, values))
                place(slot.parameter, slot.of(self.master) if compute is None else slot.of(compute, segment.start))
        if compute is not None:
            compute.copy_(segment.of(self.master))
        return compute

    def collect(self) -> None:
        """Move the gradients that the hooks have not moved."""
        self._hooks.collect()

    def begin(self, backwards: int | None = 1) -> None:
        """Start a step of so many backward passes (None: unknown): its first gradients replace the last step's. Writes
        no memory."""
        self.gradients.begin(backwards)

    def end_backward(self) -> None:
        """Called after each backward pass."""
        self.gradients.end_backward()

    def finish(self) -> torch.Tensor:
        """End the backward passes of a step; return the norm of the gradients that this rank counts."""
        return self.gradients.finish()

    def publish(self) -> None:
        """Cast the masters into the model's parameters; fp32 parameters are the masters themselves."""
        for segment, compute in zip(self.segments, self._compute, strict=True):
            if compute is not None:
                compute.copy_(segment.of(self.master))

    def masters(self, copy: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> dict[str, torch.Tensor]:
        """The fp32 masters by parameter name: views of the buffer, or of the copy that `copy` returns."""
        flat = copy(self.master)
        return {slot.name: slot.of(flat) for slot in self.slots}

    def in_turn(self) -> Iterator[list[str] | None]:
        """Yields once, None: all parameters are there."""
        yield None

    @contextmanager
    def present(self) -> Iterator[None]:
        """Inside, the model has all of its parameters: it always has."""
        yield

    def release(self, *, gather: bool = True) -> None:
        """Remove the hooks, so that other code can train the model."""
        self._hooks.remove()
