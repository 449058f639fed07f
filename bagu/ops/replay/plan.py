"""A plan: the allocations and launches of one kind of call, and the generated Python code that repeats them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bagu.ops.replay.launcher import Direct, Scratch

ALIGNMENT = 512  # bytes, as torch's allocator has it
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


class Operand(NamedTuple):
    """A matrix of a product: a tensor (inputs, then allocations), or a view that begins where the tensor does."""

    tensor: int
    view: tuple[tuple[int, ...], tuple[int, ...]] | None  # size, stride


class Product(NamedTuple):
    """`torch.mm` of two matrices, which makes an allocation."""

    result: int
    operands: tuple[Operand, Operand]


class Made(NamedTuple):
    """A result: an allocation, or a view of one."""

    allocation: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None  # size, stride, offset


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The allocations and launches of one kind of call, as a function of the addresses of its tensors."""

    device: int
    inputs: int  # the number of input tensors
    allocations: tuple[Allocation | None, ...]  # None: a product makes it
    steps: tuple[Step | Product, ...]
    results: tuple[Made | None, ...]
    products: bool = field(init=False)
    replay: Callable[..., Results] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "products", any(isinstance(step, Product) for step in self.steps))
        object.__setattr__(self, "replay", _function(self))


def _shared(plan: Plan) -> tuple[dict[int, int], int]:
    """Where each tensor that is neither returned nor an operand of a product begins in the memory that they share, by
    its index, and the bytes of that memory: an allocation takes an H200's host 3 us."""
    own = {made.allocation for made in plan.results if made is not None}
    own |= {o.tensor - plan.inputs for step in plan.steps if isinstance(step, Product) for o in step.operands}
    begins, end = {}, 0
    for i, allocation in enumerate(plan.allocations):
        if allocation is not None and i not in own:
            size, stride, dtype = allocation
            begins[plan.inputs + i] = end
            last = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
            end += -(-last * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return begins, end


def source(plan: Plan) -> tuple[str, dict[str, Any]]:
    """The source of `replay(empty, stream, p0, p1, …)` and its globals. A loop over the steps would take 5 us more.
    With products it takes the input tensors x0, x1, … as well.

    def replay(empty, stream, p0, p1):
        t0 = empty(*a0)
        p2 = t0.data_ptr()
        run0(64, 1, 1, stream, *more0, p0, p1, p2, 512, c0)
        return t0,
    """
    names: dict[str, Any] = {}
    lines: list[str] = []
    shared, shared_bytes = _shared(plan)

    def name(kind: str, value: Any) -> str:
        names[f"{kind}{len(names)}"] = value
        return f"{kind}{len(names) - 1}"

    def argument(value: Any) -> str:
        if isinstance(value, Scratch):
            lines.append(f"s{len(lines)} = {empty(((value.bytes,), (1,), torch.int8))}")
            return f"s{len(lines) - 1}"
        if isinstance(value, Pointer) and value.tensor in shared:
            return f"shared + {shared[value.tensor] + value.offset}"
        if isinstance(value, Pointer):
            return f"p{value.tensor} + {value.offset}" if value.offset else f"p{value.tensor}"
        return repr(value) if value is None or type(value) in (bool, int, str) else name("c", value)

    def empty(allocation: Allocation) -> str:
        return f"empty({', '.join(name('a', part) for part in allocation)})"

    def operand(value: Operand) -> str:
        tensor = f"x{value.tensor}" if value.tensor < plan.inputs else f"t{value.tensor - plan.inputs}"
        return tensor if value.view is None else f"{tensor}.as_strided({', '.join(map(repr, value.view))})"

    def make(i: int, tensor: str) -> list[str]:
        return [f"t{i} = {tensor}", f"p{plan.inputs + i} = t{i}.data_ptr()"]

    for i, allocation in enumerate(plan.allocations):
        if allocation is not None and plan.inputs + i not in shared:
            lines += make(i, empty(allocation))
    if shared:
        lines += [f"memory = {empty(((shared_bytes,), (1,), torch.int8))}", "shared = memory.data_ptr()"]
    for step in plan.steps:
        if isinstance(step, Product):
            lines += make(step.result, f"{name('mm', torch.mm)}({', '.join(map(operand, step.operands))})")
            continue
        direct = step.direct
        given = [*map(argument, direct.before), "stream", *map(argument, direct.after), *map(argument, step.args)]
        lines.append(f"{name('run', direct.run)}({', '.join(given)})")
    results = [
        "None"
        if made is None
        else f"t{made.allocation}"
        if made.view is None
        else f"t{made.allocation}.as_strided({', '.join(map(repr, made.view))})"
        for made in plan.results
    ]
    lines.append(f"return ({''.join(f'{r}, ' for r in results)})")
    tensors = [f"x{i}" for i in range(plan.inputs)] if plan.products else []
    taken = ", ".join(["empty", "stream", *(f"p{i}" for i in range(plan.inputs)), *tensors])
    return f"def replay({taken}):\n    " + "\n    ".join(lines), names


def _function(plan: Plan) -> Callable[..., Results]:
    text, names = source(plan)
    exec(compile(text, "<launches of a call>", "exec"), names)
    replay: Callable[..., Results] = names["replay"]
    return replay
