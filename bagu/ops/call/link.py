"""The link between forward and backward: which values the backward receives, and which gradient belongs to which input.

Indices are computed once per spec, so that a call looks up no names. The custom ops (custom.py) and the autograd node
(node.py) share this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagu.ops.contract.core import OpSpec
from bagu.ops.contract.signature import ScalarArg, TensorArg

Forward = Callable[..., Sequence[torch.Tensor]]
Backward = Callable[..., Sequence[torch.Tensor | None]]


def received(spec: OpSpec) -> list[TensorArg | ScalarArg]:
    """The arguments of a backward: the gradients of the outputs, the saved tensors, the scalars."""
    known = {t.name: t for t in (*spec.sig.tensors, *spec.sig.results)}
    douts = [TensorArg(f"d{o}", known[o].dims, "", False) for o in spec.differentiable]
    return [*douts, *(known[s] for s in spec.saves), *spec.sig.scalars]


def selective(backward: Backward) -> bool:
    """Whether a backward can skip gradients that are not needed."""
    return "needs" in inspect.signature(backward).parameters


@dataclass(frozen=True, kw_only=True)
class Link:
    """Indices into a call's inputs, its results, and the gradients that its backward returns."""

    saves: tuple[int, ...]  # in inputs + results: tensors that the backward reads
    scalars: tuple[int, ...]  # in inputs
    constant: tuple[int, ...]  # in results: without a gradient
    flows: tuple[int, ...]  # in results: with a gradient
    sources: tuple[int | None, ...]  # for each input, the index of its gradient
    grad_inputs: tuple[tuple[int, ...], ...]  # for each gradient, the inputs it belongs to (two for twins)

    @classmethod
    def of(cls, spec: OpSpec) -> Link:
        inputs, results = [a.name for a in spec.sig.inputs], [r.name for r in spec.sig.results]
        places = {name: i for i, name in enumerate((*inputs, *results))}
        made = {name: spec.made.index(spec.twins.get(name, name)) for name in spec.grads}
        return cls(
            saves=tuple(places[s] for s in spec.saves),
            scalars=tuple(places[s.name] for s in spec.sig.scalars),
            constant=tuple(i for i, r in enumerate(results) if r not in spec.differentiable),
            flows=tuple(i for i, r in enumerate(results) if r in spec.differentiable),
            sources=tuple(made.get(name) for name in inputs),
            grad_inputs=tuple(tuple(places[n] for n, m in made.items() if m == i) for i in range(len(spec.made))),
        )

    def keep(self, ctx: Any, inputs: Sequence[Any], results: Sequence[torch.Tensor], returned: int) -> None:
        """Store the values that the backward receives in the context of the forward, which returns so many results."""
        known = (*inputs, *results)
        ctx.mark_non_differentiable(*[results[i] for i in self.constant if i < returned])
        ctx.save_for_backward(*map(known.__getitem__, self.saves))
        ctx.scalars = list(map(inputs.__getitem__, self.scalars))

    def needs(self, wanted: Sequence[bool]) -> tuple[bool, ...]:
        """For each gradient of the backward, whether an input needs it (`needs_input_grad`)."""
        return tuple([any(wanted[i] for i in inputs) for inputs in self.grad_inputs])

    def hand_out(self, wanted: Sequence[bool], made: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The gradient of each input that needs one; None for the others."""
        return tuple(
            [made[source] if source is not None and wanted[i] else None for i, source in enumerate(self.sources)]
        )
