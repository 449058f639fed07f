"""Inputs for timing: a spec's benchmark cases at a size for this machine, created on the device in the right dtype.

A conformance check draws in fp64 and rounds; at 4096 x 262,144 that would take 8.6 GB. Here tensors are drawn in the
dtype under test on the target device, or on "meta", where they have only a shape, which is enough to compute a cost.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bagu.bench.roofline import costs
from bagu.errors import ArgumentError, UnknownName
from bagu.ops.contract.core import Case, OpSpec, Streams
from bagu.ops.contract.signature import TensorArg

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
FEWEST_ROWS = 16  # an independent dim is not shrunk below this while another one can be shrunk


def dtype_named(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UnknownName.among("dtype", name, DTYPES)
    return DTYPES[name]


class BenchStreams(Streams):
    """Random tensors in one dtype on one device; on "meta" only their shapes."""

    def __init__(self, *key: object, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(*key, device=device)
        self.dtype = dtype
        self.meta = torch.device(device).type == "meta"

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        if self.meta:
            return torch.empty(shape, dtype=self.dtype, device="meta")
        return torch.randn(shape, generator=self.generator(name), dtype=self.dtype, device=self.device)

    def uniform(self, name: str, *shape: int) -> torch.Tensor:
        if self.meta:
            return torch.empty(shape, dtype=self.dtype, device="meta")
        return torch.rand(shape, generator=self.generator(name), dtype=self.dtype, device=self.device)

    def integers(self, name: str, low: int, high: int, *shape: int) -> torch.Tensor:
        if self.meta:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return super().integers(name, low, high, *shape)

    def choice(self, name: str, usual: Any, *others: Any) -> Any:
        return usual


def bench_inputs(spec: OpSpec, case: Case, dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    """The arguments of a call at this case."""
    streams = BenchStreams(spec.name, case.name, dtype=dtype, device=device)
    with _ShapesOnly() if streams.meta else nullcontext():
        drawn = spec.inputs(case, streams)
    args = spec.cast(case, drawn, dtype)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}


class _ShapesOnly(TorchFunctionMode):
    """Computes the shape of meta tensors that are sorted, concatenated, or scaled or shifted by a number.

    torch uses Python decompositions for these; their first call imports sympy (1 s of CPU) or the compiler (2 s).
    """

    ELEMENTWISE = (torch.Tensor.mul, torch.Tensor.add, torch.Tensor.sub, torch.Tensor.div, torch.Tensor.add_)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first, second = (*args, 0, 0)[:2]
        if func in self.ELEMENTWISE and isinstance(second, int | float) and first.is_meta and first.is_floating_point():
            return first
        if func is torch.Tensor.sort and first.is_meta:
            return torch.return_types.sort((first, first.new_empty(first.shape, dtype=torch.int64)))
        if func is torch.cat and not kwargs and first[0].is_meta:
            shape = list(first[0].shape)
            shape[second] = sum(x.shape[second] for x in first)
            return first[0].new_empty(shape)
        return func(*args, **(kwargs or {}))


def first_tensor(spec: OpSpec, args: dict[str, Any]) -> torch.Tensor:
    """The tensor that gives the dtype and device of the call."""
    return next(a for t in spec.sig.tensors if isinstance(a := args[t.name], torch.Tensor))


def forward_bytes(spec: OpSpec, case: Case, dtype: torch.dtype) -> int:
    """Minimum bytes that the forward of a case moves; raises ArgumentError if the sizes are inconsistent."""
    args = bench_inputs(spec, case, dtype, "meta")
    return costs(spec, spec.bind(args), first_tensor(spec, args).dtype)["fwd"].bytes


def input_bytes(spec: OpSpec, case: Case, dtype: torch.dtype) -> int:
    """Bytes of the inputs of a case: a KV cache counts as a whole, of which a forward may read little."""
    args = bench_inputs(spec, case, dtype, "meta")
    spec.bind(args)
    return sum(a.nbytes for a in args.values() if isinstance(a, torch.Tensor))


def shrink(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    budget: int,
    size: Callable[[OpSpec, Case, torch.dtype], int] = forward_bytes,
) -> Case:
    """The case, with sizes halved until its forward moves (or another `size` is) at most `budget` bytes.

    Independent dims shrink first, each down to 16: those that are parameters of the case, in the spec's order, then the
    first number of a parameter that is a shape. So there are fewer rows, of the same length. After them the largest
    number shrinks. A number that hardly lowers the bytes, or whose half is not valid (channels and groups), stays.
    """
    rows = [(d, None) for d in spec.independent if type(case.params.get(d)) is int]
    first = (*rows, *(knob for knob in _numbers(case) if knob[1] == 0))
    fixed: set[Knob] = set()
    while (now := size(spec, case, dtype)) > budget:
        free = {k: v for k, v in _numbers(case).items() if v > 1 and k not in fixed}
        if not free:
            break
        many = [k for k in first if free.get(k, 0) > FEWEST_ROWS]
        knob = many[0] if many else max(free, key=lambda k: (k not in first, free[k]))
        smaller = _with(case, knob, free[knob] // 2)
        try:
            helps = size(spec, smaller, dtype) < 0.95 * now
        except (ArgumentError, RuntimeError):  # torch raises RuntimeError if shapes cannot be broadcast
            helps = False
        if helps:
            case = smaller
        else:
            fixed.add(knob)
    return case


Knob = tuple[str, int | None]  # a parameter that is a number, or one number of a parameter that is a shape


def _numbers(case: Case) -> dict[Knob, int]:
    found: dict[Knob, int] = {}
    for name, value in case.params.items():
        if type(value) is int:
            found[name, None] = value
        elif isinstance(value, tuple) and all(type(v) is int for v in value):
            found |= {(name, i): v for i, v in enumerate(value)}
    return found


def _with(case: Case, knob: Knob, value: int) -> Case:
    name, index = knob
    if index is None:
        return case.replace(**{name: value})
    shape = case[name]
    return case.replace(**{name: (*shape[:index], value, *shape[index + 1 :])})


def parse_size(text: str, option: str = "--sizes") -> dict[str, int | tuple[int, ...]]:
    """ "M=4096,shape=32x64x7x7" as {"M": 4096, "shape": (32, 64, 7, 7)}."""
    size: dict[str, int | tuple[int, ...]] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", value.strip()):
            raise ArgumentError(f"{option} has {part!r}; expected NAME=NUMBER", hint=f"{option} M=4096,N=4096")
        numbers = tuple(int(v) for v in value.split("x"))
        size[name.strip()] = numbers if len(numbers) > 1 else numbers[0]
    return size


def resize(spec: OpSpec, case: Case, size: Mapping[str, int | tuple[int, ...]]) -> Case:
    """The case at other sizes, by the names of its parameters."""
    known = sorted({name for name, _ in _numbers(case)})
    for name, value in size.items():
        if name not in known:
            raise UnknownName.among(f"size of {spec.name}[{case.name}]", name, known)
        if type(value) is not type(case[name]):
            expected = "a shape like 32x64x8" if isinstance(case[name], tuple) else "a number"
            raise ArgumentError(f"{spec.name}: size {name} is {value}; expected {expected}")
    return case.replace(**size)


def shape_label(spec: OpSpec, args: dict[str, Any]) -> str:
    """The shape of the first tensor, then the dims that only other arguments have: "4096×4096 V=128256"."""
    first = first_tensor(spec, args)
    named = [t for t in spec.sig.tensors if isinstance(args[t.name], torch.Tensor)]
    dims, own = spec.bind(args), _names(named[0])
    other = {n: dims[n] for t in named[1:] for n in _names(t) if n not in own and type(dims[n]) is int}
    return " ".join(["×".join(str(n) for n in first.shape) or "1", *(f"{n}={v}" for n, v in other.items())])


def _names(arg: TensorArg) -> list[str]:
    return [name for _, name in arg.dims if name]
