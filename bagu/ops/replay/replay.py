"""Replay of host code: after two calls of a kind, its launches are repeated without running the host code again.

The host code of a Triton backend makes views, allocates and launches. What it does depends only on its arguments'
shapes, strides, dtypes, device, alignment and scalars (`kind_of`). So the second call of a kind runs its host code
under a recorder (record.py). Later calls allocate the same tensors and launch the same compiled kernels with the new
pointers. That takes about 10 us on the host; the host code takes 70 to 280. Calls of `torch.mm` are repeated as well.

If the host code does anything else (a copy of a tensor with unsuitable strides, a sum of products, a fill), the call is
not replayed, and its host code runs each time. A plan holds no tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from bagu.ops.replay.launcher import Launcher
from bagu.ops.replay.plan import Plan, Results
from bagu.ops.replay.record import recorded

KINDS = 4096  # the number of kinds of calls that are cached per op
T = TypeVar("T")
Host = Callable[[Sequence[Any]], Results]  # takes tensors, None and scalars
# what runs the calls of one kind: (arguments in order, addresses of GPU tensors) -> outputs and residuals
Route = Callable[[Sequence[Any], Sequence[int]], Sequence[Any]]


class Repeated:
    """Runs the calls of one kind: `host` for the first two, then the recorded plan if it can be replayed."""

    def __init__(self, host: Host, launcher: Launcher | None) -> None:
        self.host, self.launcher = host, launcher
        self.plan: Plan | None = None
        self._calls = 0

    def __call__(self, values: Sequence[Any], pointers: Sequence[int]) -> Results:
        """`pointers` are the addresses of the tensors in `values`, as `kind_of` returns them."""
        launcher, plan = self.launcher, self.plan
        if launcher is None or not launcher.ready():
            return self.host(values)
        if plan is None:
            return self._first(values)
        if launcher.current_device() != plan.device:
            with torch.cuda.device(plan.device):  # allocations and launches use the current device
                return self(values, pointers)
        # torch.empty fills memory in deterministic mode
        empty = launcher.filled if torch._C._get_deterministic_algorithms() else launcher.empty
        stream = launcher.stream(plan.device)
        if plan.products:
            return _with_products(plan, empty, stream, values, pointers)
        return plan.replay(empty, stream, *pointers)

    def _first(self, values: Sequence[Any]) -> Results:
        assert self.launcher is not None
        self._calls = calls = self._calls + 1
        if calls != 2:  # a single call does not pay for a recording; a kind that cannot be replayed is recorded once
            return self.host(values)
        results, self.plan = recorded(self.host, values, self.launcher)
        return results


def _with_products(
    plan: Plan, empty: Callable[..., Any], stream: int, values: Sequence[Any], pointers: Sequence[int]
) -> Results:
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if torch._C._is_any_autocast_enabled():
        with torch.autocast(tensors[0].device.type, enabled=False):  # as the host code
            return plan.replay(empty, stream, *pointers, *tensors)
    return plan.replay(empty, stream, *pointers, *tensors)


class Replayed:
    """Host code whose launches are replayed, for every kind of call: a backward, or a part of host code that cannot be
    replayed as a whole."""

    def __init__(self, host: Host, launcher: Callable[[], Launcher | None]) -> None:
        self.host, self.launcher = host, launcher
        self.kinds: dict[tuple[Any, ...], Repeated] = {}

    def __call__(self, *values: Any) -> Results:
        launcher = self.launcher()
        if launcher is None or torch._C._len_torch_dispatch_stack():  # a dispatch mode must see the ops
            return self.host(values)
        kind, pointers = kind_of(values)
        calls = self.kinds.get(key := tuple(kind))
        if calls is None:
            calls = remember(self.kinds, key, Repeated(self.host, launcher))
        return calls(values, pointers)


def kind_of(values: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """The properties of the values that host code may depend on, as parts of a key; and the addresses of the tensors.

    Raises RuntimeError for a tensor without its own memory (fake, sparse, nested).
    """
    kind: list[Any] = []
    pointers: list[int] = []
    for v in values:
        if isinstance(v, torch.Tensor):
            at, lazy = v.data_ptr(), v.is_neg() or v.is_conj()
            pointers.append(at)
            # Triton compiles another kernel for a pointer that is not 16-byte aligned
            kind.append((type(v), v.shape, v.stride(), v.dtype, v.get_device(), at & 15, lazy, v.requires_grad))
        else:
            kind.append((type(v), v or str(v)))  # 0.0 == -0.0 == False
    return kind, pointers


def remember(known: dict[tuple[Any, ...], T], key: tuple[Any, ...], value: T) -> T:
    """Store `value` under `key` and return it. A full cache is cleared first."""
    if len(known) >= KINDS:
        known.clear()
    known[key] = value
    return value
