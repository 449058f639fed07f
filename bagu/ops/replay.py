"""Host code that runs twice and is replayed after: views, block sizes and grids are worked out once.

What the host code of a Triton backend does depends on nothing but its arguments' shapes, strides, dtypes, device,
alignment and scalars (`kind_of`): it makes views, allocates, and launches. So when a kind of call comes for the second
time, its host code runs under a recorder (record.py). From then on such a call allocates the same tensors and launches
the same compiled kernels with the pointers at hand. That is about 10 us of the host, where the host code takes 70 to
280.

A call whose host code does anything else (a copy of a tensor that does not lie well, a matrix product, a fill) is not
replayed: its host code runs each time. A plan holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from bagu.ops.launcher import Launcher
from bagu.ops.plan import Plan, Results
from bagu.ops.record import recorded

__all__ = ["Host", "Repeated", "kind_of", "remember"]

KINDS = 4096  # of calls that are remembered, per op
T = TypeVar("T")
Host = Callable[[Sequence[Any]], Results]  # of tensors, None and scalars


class Repeated:
    """The calls of one kind: `host` at first, then a plan of what it did, if that can be replayed."""

    def __init__(self, host: Host, launcher: Launcher | None) -> None:
        self.host, self.launcher = host, launcher
        self.plan: Plan | None = None
        self._calls = 0

    def __call__(self, values: Sequence[Any], pointers: Sequence[int]) -> Results:
        """`values`, and the addresses of the tensors among them as `kind_of` gives them."""
        if self.launcher is None or not self.launcher.ready():
            return self.host(values)
        if self.plan is not None:
            return self.plan.run(pointers)
        self._calls = calls = self._calls + 1
        if calls != 2:  # a kind that comes once is not worth a recording; one that cannot be replayed is recorded once
            return self.host(values)
        results, self.plan = recorded(self.host, values, self.launcher)
        return results


def kind_of(values: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """All that host code may depend on, to be made a key; and the addresses of the tensors among the values.

    Raises RuntimeError for a tensor that has no memory of its own (fake, sparse, nested).
    """
    kind: list[Any] = []
    pointers: list[int] = []
    for v in values:
        if isinstance(v, torch.Tensor):
            at, lazy = v.data_ptr(), v.is_neg() or v.is_conj()
            pointers.append(at)
            # Triton compiles another kernel for a pointer that is not on 16 bytes
            kind.append((type(v), v.shape, v.stride(), v.dtype, v.get_device(), at & 15, lazy, v.requires_grad))
        else:
            kind.append((type(v), v or str(v)))  # 0.0 == -0.0 == False
    return kind, pointers


def remember(known: dict[tuple[Any, ...], T], key: tuple[Any, ...], value: T) -> T:
    """`value`, now known under `key`; of too many all are forgotten."""
    if len(known) >= KINDS:
        known.clear()
    known[key] = value
    return value
