"""A plan: the allocations and launches of one kind of call, and the generated Python code that repeats them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bagu.ops.launcher import Direct, Launcher

__all__ = ["Allocation", "Made", "Plan", "Pointer", "Results", "Step"]

Results = tuple[torch.Tensor | None, ...]
Allocation = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # size, stride, dtype


class Pointer(NamedTuple):
    """A kernel argument that is an address: the index of its tensor (inputs, then allocations), and the offset in bytes
    from the tensor's first element."""

    tensor: int
    offset: int


class Step(NamedTuple):
    """A launch and the arguments of the kernel: pointers and constants."""

    direct: Direct
    args: tuple[Any, ...]


class Made(NamedTuple):
    """A result: an allocation, or a view of one."""

    allocation: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None  # size, stride, offset


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The allocations and launches of one kind of call, as a function of the addresses of its tensors."""

    launcher: Launcher
    device: int
    inputs: int  # the number of input tensors
    allocations: tuple[Allocation, ...]
    steps: tuple[Step, ...]
    results: tuple[Made | None, ...]
    replay: Callable[..., Results] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "replay", _function(self))

    def run(self, pointers: Sequence[int]) -> Results:
        """`pointers` are the addresses of the input tensors, in order."""
        launcher = self.launcher
        if launcher.current_device() != self.device:
            with torch.cuda.device(self.device):  # allocations and launches use the current device
                return self.run(pointers)
        filled = torch._C._get_deterministic_algorithms()  # torch.empty fills memory in this mode
        return self.replay(launcher.filled if filled else launcher.empty, launcher.stream(self.device), *pointers)


def source(plan: Plan) -> tuple[str, dict[str, Any]]:
    """The source of `replay(empty, stream, p0, p1, …)` and its globals. A loop over the steps would take 5 us more.

    def replay(empty, stream, p0, p1):
        t0 = empty(*a0)
        p2 = t0.data_ptr()
        run0(64, 1, 1, stream, *more0, p0, p1, p2, 512, c0)
        return t0,
    """
    names: dict[str, Any] = {}

    def name(kind: str, value: Any) -> str:
        names[f"{kind}{len(names)}"] = value
        return f"{kind}{len(names) - 1}"

    def argument(value: Any) -> str:
        if isinstance(value, Pointer):
            return f"p{value.tensor} + {value.offset}" if value.offset else f"p{value.tensor}"
        return repr(value) if value is None or type(value) in (bool, int, str) else name("c", value)

    lines = []
    for i, allocation in enumerate(plan.allocations):
        lines.append(f"t{i} = empty({', '.join(name('a', part) for part in allocation)})")
        lines.append(f"p{plan.inputs + i} = t{i}.data_ptr()")
    for direct, args in plan.steps:
        given = [*map(argument, direct.before), "stream", *map(argument, direct.after), *map(argument, args)]
        lines.append(f"{name('run', direct.run)}({', '.join(given)})")
    results = [
        "None" if made is None
        else f"t{made.allocation}" if made.view is None
        else f"t{made.allocation}.as_strided({', '.join(map(repr, made.view))})"
        for made in plan.results
    ]  # fmt: skip
    lines.append(f"return ({''.join(f'{r}, ' for r in results)})")
    taken = ", ".join(["empty", "stream", *(f"p{i}" for i in range(plan.inputs))])
    return f"def replay({taken}):\n    " + "\n    ".join(lines), names


def _function(plan: Plan) -> Callable[..., Results]:
    text, names = source(plan)
    exec(compile(text, "<launches of a call>", "exec"), names)
    replay: Callable[..., Results] = names["replay"]
    return replay
