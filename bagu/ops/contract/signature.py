"""An op's signature: one line that declares its arguments, results and residuals.

    "x[*M, N], w[N]: float, eps: float -> y[*M, N]; r[*M]: acc"
     ───────────── inputs ────────────    outputs    residuals (kept for the backward)

    N           a dim: the same name has the same size everywhere
    *M          any number of dims, with the same sizes everywhere (`x[*M, N]` takes [N], [T, N], [B, T, N], …)
    2*N         twice a dim;   4   exactly four;   groups   the value of the scalar argument `groups`
    mask[…]?    may be None
    : dtype     none: the dtype of the first tensor, which must be a float · float: any float dtype
                int: int32 or int64 · any: any dtype · acc: max(fp32, the first tensor's dtype)
                fp32, f8 (e4m3), i8, u8, i32, i64, bool: exactly this dtype
                given (a result): the value of the scalar `dtype`
    eps: float  a scalar: float, int, bool or str, with `?` if it may be None

This line defines the argument checks of a call, the schema and the fake function of a custom op, and the expected
shapes of a backend's results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from string import ascii_lowercase
from typing import Any

import torch

from bagu.errors import ArgumentError

Dims = dict[str, Any]  # dim -> size, group -> tuple of sizes, scalar argument -> value

EXACT = {
    "fp32": torch.float32,
    "f8": torch.float8_e4m3fn,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}
KINDS = {"": "the first tensor's dtype", "float": "a float dtype", "int": "int32 or int64", "any": "any dtype"}
SCALARS = {"float": (float, int), "int": (int, torch.SymInt), "bool": (bool,), "str": (str,)}
SCHEMA = {"float": "float", "int": "SymInt", "bool": "bool", "str": "str"}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulators: fp32, or fp64 for fp64 inputs (which gradcheck needs)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument or result. Each dim is (factor, name): (1, "N"), (2, "N"), (4, "") or (0, "M") for `*M`."""

    name: str
    dims: tuple[tuple[int, str], ...]
    dtype: str
    optional: bool

    # as in a signature; formatted once, since torch.compile cannot format it in a message
    text: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        shown = [("*" + n if f == 0 else n if f == 1 and n else f"{f}*{n}" if n else str(f)) for f, n in self.dims]
        text = f"{self.name}[{', '.join(shown)}]{'?' if self.optional else ''}" + (self.dtype and f": {self.dtype}")
        object.__setattr__(self, "text", text)

    def __str__(self) -> str:
        return self.text

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """The concrete shape, from known dims."""
        out: list[int] = []
        for factor, name in self.dims:
            if factor == 0:
                out.extend(dims[name])
            else:
                out.append(factor * (dims[name] if name else 1))
        return tuple(out)

    def result_dtype(self, first: torch.dtype, given: str | None = None) -> torch.dtype:
        """The dtype of this result: `first` is the first tensor's, `given` the value of the scalar argument `dtype`."""
        if self.dtype == "given":
            assert given is not None, f"{self} takes its dtype from a scalar argument `dtype: str`"
            return getattr(torch, given)
        if self.dtype == "acc":
            return accumulator(first)
        return EXACT.get(self.dtype, first)


@dataclass(frozen=True)
class ScalarArg:
    name: str
    kind: str
    optional: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}{'?' if self.optional else ''}"


@dataclass(frozen=True)
class Signature:
    text: str
    inputs: tuple[TensorArg | ScalarArg, ...]
    outputs: tuple[TensorArg, ...]
    residuals: tuple[TensorArg, ...]

    @classmethod
    def parse(cls, text: str) -> Signature:
        left, _, right = text.partition("->")
        outputs, _, residuals = right.partition(";")
        parsed = [_parse(part) for part in _split(left)]
        results = [[_parse(part) for part in _split(side)] for side in (outputs, residuals)]
        for side in results:
            for result in side:
                assert isinstance(result, TensorArg), f"a result is a tensor, not {result}: {text}"
        first = next(a for a in parsed if isinstance(a, TensorArg))
        assert not first.optional, f"the first tensor gives dtype and device and cannot be None: {text}"
        return cls(text.strip(), tuple(parsed), *(tuple(side) for side in results))  # type: ignore[arg-type]

    @property
    def tensors(self) -> tuple[TensorArg, ...]:
        return tuple(a for a in self.inputs if isinstance(a, TensorArg))

    @property
    def scalars(self) -> tuple[ScalarArg, ...]:
        return tuple(a for a in self.inputs if isinstance(a, ScalarArg))

    @property
    def results(self) -> tuple[TensorArg, ...]:
        return self.outputs + self.residuals

    def bind(self, op: str, args: Mapping[str, Any]) -> Dims:
        """Check every argument and return the dims; raises ArgumentError for the first argument that does not match."""
        dims: Dims = {}
        first: torch.Tensor | None = None
        for scalar in self.scalars:
            _check_scalar(op, scalar, args[scalar.name], self.text)
            dims[scalar.name] = args[scalar.name]
        for arg in self.tensors:
            value = args[arg.name]
            if value is None and arg.optional:
                continue
            if not isinstance(value, torch.Tensor):
                raise ArgumentError(
                    f"{op}: {arg.name} is {type(value).__name__}, expected a tensor {arg.text}", hint=self.hint
                )
            if first is None:
                first = value
            _check_tensor(op, arg, value, first, dims, self.hint)
        return dims

    def measure(self, tensors: Mapping[str, torch.Tensor | None], scalars: Mapping[str, Any]) -> Dims:
        """The dims, computed without checks from the given inputs and results (a backward has only some of them)."""
        dims: Dims = dict(scalars)
        for arg in (*self.tensors, *self.results):
            value = tensors.get(arg.name)
            if value is not None:
                _match(arg, tuple(value.shape), dims)
        return dims

    def schema(self, inputs: Iterable[TensorArg | ScalarArg], results: int, mutates: Sequence[str] = ()) -> str:
        """A torch.library schema with these inputs; the inputs in `mutates` are marked as modified."""
        parts, letters = [], iter(ascii_lowercase)
        for a in inputs:
            kind = "Tensor" if isinstance(a, TensorArg) else SCHEMA[a.kind]
            kind += f"({next(letters)}!)" if a.name in mutates else ""
            parts.append(f"{kind}{'?' if a.optional else ''} {a.name}")
        returns = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        return f"({', '.join(parts)}) -> {returns}"

    @property
    def hint(self) -> str:
        return f"signature: {self.text}"


def sizes(dims: Dims) -> dict[str, int]:
    """Dims as plain numbers for cost functions; a group is the product of its sizes."""
    return {k: prod(v) if isinstance(v, tuple) else v for k, v in dims.items()}


def _split(text: str) -> list[str]:
    """Split at the commas that are outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def _parse(text: str) -> TensorArg | ScalarArg:
    if found := re.fullmatch(r"(\w+)\[([^\]]*)\](\??)(?:\s*:\s*(\w+))?", text):
        name, dims, optional, dtype = found.groups()
        assert (dtype or "") in EXACT | KINDS.keys() | {"acc", "given"}, f"unknown dtype {dtype!r} in {text!r}"
        return TensorArg(
            name, tuple(_dim(d.strip()) for d in dims.split(",") if d.strip()), dtype or "", bool(optional)
        )
    if found := re.fullmatch(r"(\w+)\s*:\s*(\w+)(\??)", text):
        name, kind, optional = found.groups()
        assert kind in SCALARS, f"unknown scalar type {kind!r} in {text!r}"
        return ScalarArg(name, kind, bool(optional))
    raise AssertionError(f"not a signature part: {text!r}")


def _dim(text: str) -> tuple[int, str]:
    if text.startswith("*"):
        return 0, text[1:]
    if text.isdigit():
        return int(text), ""
    factor, _, name = text.rpartition("*")
    return int(factor or 1), name


def _match(arg: TensorArg, shape: tuple[int, ...], dims: Dims) -> bool:
    """Whether `shape` matches the argument, given the known dims; adds the dims that it determines."""
    singles = sum(1 for factor, _ in arg.dims if factor)
    spread = len(shape) - singles  # the number of dims in the group
    if spread < 0 or (spread > 0 and singles == len(arg.dims)):
        return False
    at = 0
    for factor, name in arg.dims:
        if factor == 0:
            if dims.setdefault(name, shape[at : at + spread]) != shape[at : at + spread]:
                return False
            at += spread
            continue
        size = shape[at]
        at += 1
        if name and name not in dims:
            if size % factor:
                return False
            dims[name] = size // factor
        elif size != factor * (dims[name] if name else 1):
            return False
    return True


def _check_scalar(op: str, arg: ScalarArg, value: Any, text: str) -> None:
    if value is None and arg.optional:
        return
    wrong = not isinstance(value, SCALARS[arg.kind]) or (isinstance(value, bool) and arg.kind != "bool")
    if wrong and not (arg.kind == "float" and isinstance(value, torch.SymFloat)):
        raise ArgumentError(
            f"{op}: {arg.name} is {value!r} ({type(value).__name__}), expected {arg.kind}",
            hint=f"signature: {text}",
        )


def _number(size: Any) -> Any:
    """A size or a group of sizes without symbols: torch.compile cannot format symbols in a message."""
    return tuple(len(range(n)) for n in size) if isinstance(size, tuple) else len(range(size))


def _check_tensor(op: str, arg: TensorArg, value: torch.Tensor, first: torch.Tensor, dims: Dims, hint: str) -> None:
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else "sparse" if "sparse" in str(value.layout) else str(value.layout)[6:]
        raise ArgumentError(
            f"{op}: {arg.name} is a {kind} tensor, expected a strided one",
            hint="pass the values of a nested tensor packed, with cu_seqlens" if kind == "nested" else "x.to_dense()",
        )
    known = dict(dims)
    if not _match(arg, tuple(value.shape), dims):
        where = {k: v for k, v in known.items() if any(k == name for _, name in arg.dims)}
        given = f" with {', '.join(f'{k} = {v}' for k, v in where.items())}" if where else ""
        raise ArgumentError(
            f"{op}: {arg.name} has shape {list(_number(value.shape))}, expected {arg.text}{given}", hint=hint
        )
    if value.device != first.device:
        raise ArgumentError(
            f"{op}: {arg.name} is on {value.device}, and the first tensor is on {first.device}",
            hint=f"move it there: {arg.name}.to({str(first.device)!r})",
        )
    dtype = value.dtype
    if arg.dtype == "":
        ok, want = dtype.is_floating_point and dtype == first.dtype, f"{first.dtype} (the first tensor's)"
        if not first.dtype.is_floating_point:
            want = "a float dtype"
    elif arg.dtype == "acc":
        ok, want = dtype == accumulator(first.dtype), str(accumulator(first.dtype))
    elif arg.dtype in EXACT:
        ok, want = dtype == EXACT[arg.dtype], str(EXACT[arg.dtype])
    elif arg.dtype == "float":
        ok, want = dtype.is_floating_point, "a float dtype"
    elif arg.dtype == "int":
        ok, want = dtype in (torch.int32, torch.int64), "int32 or int64"
    else:
        ok, want = True, "any dtype"
    if ok and dtype.is_floating_point and dtype.itemsize == 1 and arg.dtype != "any":
        ok, want = False, "fp16, bf16, fp32 or fp64"
    if not ok:
        raise ArgumentError(f"{op}: {arg.name} has dtype {dtype}, expected {want}", hint=hint)
