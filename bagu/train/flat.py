"""Flat memory: every trained parameter is a view of one long buffer, and so are its master and its gradient.

    master   [N] fp32               the optimizer updates it
    compute  [n] per segment        the model computes with it; an fp32 segment uses the masters themselves
    grad     [N] fp32               the sum over a step's micro-batches

N counts all trained parameters, each padded to a multiple of `ALIGN` elements; padding is zero and stays zero. With one
buffer the gradient norm is one reduction and an update is a few passes over memory, for any number of layers. A segment
is a contiguous range of the buffer with one role (optimizer rule, decay or not) and one compute dtype.

A hook moves each gradient out of autograd as soon as it is complete: the first micro-batch copies it into `grad`, the
later ones add to it, and `p.grad` is set to None. So micro-batches are summed in fp32 also if the model is bf16, and a
bf16 gradient is freed when its layer's backward ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

import torch
from torch import nn

from bagu.errors import BaguError
from bagu.nn.linear import Linear
from bagu.nn.moe import MoE

__all__ = ["ALIGN", "FlatParameters", "Role", "Segment", "Slot", "roles"]

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


class FlatParameters:
    """The trained parameters of a model in flat buffers. The constructor moves the data and keeps the values.

    Frozen parameters do not change. `release()` removes the hooks; the parameters stay views of these buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        by_name, role_of = dict(model.named_parameters()), roles(model)
        if not role_of:
            raise BaguError("the model has no trainable parameter", hint="set requires_grad on what is to be trained")
        device = next(iter(by_name.values())).device
        order = list(Role)
        names = sorted(role_of, key=lambda n: (order.index(role_of[n]), str(by_name[n].dtype)))  # stable: model order
        segments, end = [], 0
        for (role, dtype), members in groupby(names, key=lambda n: (role_of[n], by_name[n].dtype)):
            start, slots = end, []
            for name in members:
                slots.append(Slot(name=name, parameter=by_name[name], start=end))
                end += -(-by_name[name].numel() // ALIGN) * ALIGN
            segments.append(Segment(role=role, dtype=dtype, start=start, stop=end, slots=tuple(slots)))
        self.segments = tuple(segments)
        self.master = torch.zeros(end, dtype=torch.float32, device=device)
        self.grad = torch.zeros(end, dtype=torch.float32, device=device)
        self._compute = [self._adopt(segment) for segment in self.segments]
        self._has_grad = [False] * len(self.slots)
        self._grads = [slot.of(self.grad) for slot in self.slots]
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(functools.partial(self._take, i))
            for i, slot in enumerate(self.slots)
        ]

    @property
    def slots(self) -> list[Slot]:
        return [slot for segment in self.segments for slot in segment.slots]

    @property
    def device(self) -> torch.device:
        return self.master.device

    def _adopt(self, segment: Segment) -> torch.Tensor | None:
        """Copy a segment's parameters into the master and make them views; returns the compute buffer, if any."""
        low = segment.dtype != torch.float32
        size = segment.stop - segment.start
        compute = torch.zeros(size, dtype=segment.dtype, device=self.device) if low else None
        with torch.no_grad():
            for slot in segment.slots:
                slot.of(self.master).copy_(slot.parameter)
                slot.parameter.data = slot.of(self.master) if compute is None else slot.of(compute, segment.start)
        if compute is not None:
            compute.copy_(segment.of(self.master))
        return compute

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """The hook: move a complete gradient into the flat buffer."""
        assert parameter.grad is not None
        if self._has_grad[index]:
            self._grads[index].add_(parameter.grad)
        else:
            self._grads[index].copy_(parameter.grad)
            self._has_grad[index] = True
        parameter.grad = None

    def begin(self) -> None:
        """Start a step: the next gradient of each parameter replaces the last step's. Writes no memory."""
        self._has_grad = [False] * len(self._has_grad)

    def finish(self) -> torch.Tensor:
        """End the backward passes of a step; return the global gradient norm, on the device.

        A parameter without a gradient (an expert that no token chose) still holds the last step's: zero it.
        """
        for index, seen in enumerate(self._has_grad):
            if not seen:
                self._grads[index].zero_()
        return torch.linalg.vector_norm(self.grad)

    def publish(self) -> None:
        """Cast the masters into the model's parameters; fp32 parameters are the masters themselves."""
        for segment, compute in zip(self.segments, self._compute, strict=True):
            if compute is not None:
                compute.copy_(segment.of(self.master))

    def masters(self, copy: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> dict[str, torch.Tensor]:
        """The fp32 masters by parameter name: views of the buffer, or of the copy that `copy` returns."""
        flat = copy(self.master)
        return {slot.name: slot.of(flat) for slot in self.slots}

    def release(self) -> None:
        """Remove the hooks, so that other code can train the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
