"""Operators of Triton's interpreter that remember what they do for each pair of types.

`a + b` takes 60 us in the interpreter, of which numpy takes 2. Triton checks the types, promotes, casts and broadcasts
both sides and builds a type for each step, and all of that follows from the operator and the two types. So the first
time two types meet, Triton's own code runs, and this keeps what it ends in: the numpy function, the dtypes of its two
arguments and the type of the result. After that the numpy function is called with the two arrays, which numpy
broadcasts by the same rules. What is kept must give the same bits as Triton's code on the arrays at hand. Where it does
not, Triton's code runs each time, as it does for bf16 and fp8 (whose arrays hold bit patterns) and for scalars that do
not fit the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

# the operators of a tensor -> whether it is the right operand
BINARY = {
    **dict.fromkeys(("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"), False),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), False),
    **dict.fromkeys(("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rand", "ror", "rxor"), True),
}
FP32_MIN, FP32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # outside, a Python float is fp64 for Triton
Slow = Callable[..., Any]


class Plan(NamedTuple):
    """What an operator does for two types."""

    apply: Callable[[Any, Any], Any]  # of numpy
    swap: bool  # whether the tensor that has the operator is the second argument
    own: np.dtype[Any]  # of the array of that tensor, when `apply` gets it
    other: np.dtype[Any]
    low: float  # the Python numbers that the operator takes
    high: float
    type: Any  # of the result, as a tensor and as a handle
    handle_dtype: Any


def operators(core: Any, interpreter: Any) -> dict[str, Callable[[Slow], Slow]]:
    """name -> wraps Triton's own method of that name of `tl.tensor`."""
    table = {f"__{name}__": _binary(f"__{name}__", reflected, core, interpreter) for name, reflected in BINARY.items()}
    return table | {"__getitem__": _getitem(core, interpreter)}


def _binary(name: str, reflected: bool, core: Any, interpreter: Any) -> Callable[[Slow], Slow]:
    # by type, dtype of the handle and dtype of the array. They differ: `x < y` is an int1 whose handle has the dtype of
    # x, and becomes an array of that dtype in a block; an argument 3e9 is an int64 whose array is uint32.
    plans: dict[tuple[Any, ...], Plan | None] = {}
    tensor, constexpr, result = core.tensor, core.constexpr, _maker(core, interpreter)

    def wrap(slow: Slow) -> Slow:
        def operator(self: Any, given: Any) -> Any:
            other = given.value if type(given) is constexpr else given
            kind, own, mine, theirs = type(other), self.handle, self.handle.data, None
            key: tuple[Any, ...]
            if kind is tensor:
                handle, theirs = other.handle, other.handle.data
                key = (
                    self.type.name,
                    own.dtype.name,
                    mine.dtype.num,
                    other.type.name,
                    handle.dtype.name,
                    theirs.dtype.num,
                )
            elif kind is int and -(2**31) <= other < 2**31:
                key = self.type.name, own.dtype.name, mine.dtype.num, int
            elif kind is float and (FP32_MIN <= abs(other) <= FP32_MAX or other == 0 or abs(other) == np.inf):
                key = self.type.name, own.dtype.name, mine.dtype.num, float
            else:
                return slow(self, given)
            if key not in plans:
                plans[key], value = _learned(slow, self, given, other, reflected, interpreter)
                return value
            plan = plans[key]
            if plan is None:
                return slow(self, given)
            if theirs is None:
                if not plan.low <= other <= plan.high:
                    return slow(self, given)
                theirs = np.array([other or 0], plan.other)  # Triton's constant -0.0 is 0
            elif theirs.dtype is not plan.other:
                theirs = theirs.astype(plan.other)
            if mine.dtype is not plan.own:
                mine = mine.astype(plan.own)
            data = plan.apply(theirs, mine) if plan.swap else plan.apply(mine, theirs)
            return result(data, plan.handle_dtype, plan.type)

        return operator

    return wrap


def _learned(
    slow: Slow, self: Any, given: Any, other: Any, reflected: bool, interpreter: Any
) -> tuple[Plan | None, Any]:
    """The plan for the types of two operands, and what Triton's method gives for these two."""
    with _recorded(interpreter) as calls:
        value = slow(self, given)
    scalars = [x.type.scalar for x in (self, other, value) if hasattr(x, "handle")]
    if len(calls) != 1 or any(s.is_bf16() or s.is_fp8() for s in scalars):
        return None, value
    apply, *arrays = calls[0]
    swap = not self.type.scalar.is_ptr() if value.type.scalar.is_ptr() else reflected  # a pointer is the first argument
    own, theirs = arrays[::-1] if swap else arrays
    integers = [d for d in (self.handle.data.dtype, theirs) if d.kind in "iu"]  # beside int8, Triton refuses 300
    limits = (np.iinfo(integers[0]).min, np.iinfo(integers[0]).max) if integers else (-np.inf, np.inf)
    plan = Plan(apply, swap, own, theirs, *limits, value.type, value.handle.dtype)
    both = [
        self.handle.data.astype(own),
        (other.handle.data if hasattr(other, "handle") else np.array([other or 0], theirs)).astype(theirs),
    ]
    with np.errstate(all="ignore"):
        got, want = apply(*(both[::-1] if swap else both)), value.handle.data
    same = (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())
    return plan if same else None, value


@contextmanager
def _recorded(interpreter: Any) -> Iterator[list[tuple[Callable[[Any, Any], Any], Any, Any]]]:
    """Inside, the numpy functions that the interpreter calls for operators, with the dtypes of their two arguments."""
    builder, calls = interpreter.interpreter_builder, []
    kind = type(builder)

    def binary_op(lhs: Any, rhs: Any, op: Any) -> Any:
        calls.append((op, lhs.data.dtype, rhs.data.dtype))
        return kind.binary_op(builder, lhs, rhs, op)

    def create_idiv(lhs: Any, rhs: Any) -> Any:
        calls.append((_quotient, lhs.data.dtype, rhs.data.dtype))
        return kind.create_idiv(builder, lhs, rhs)

    def create_addptr(ptr: Any, offset: Any) -> Any:
        width = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        advanced = lambda pointers, offsets: pointers + width * offsets.astype(np.uint64)  # noqa: E731
        calls.append((advanced, ptr.data.dtype, offset.data.dtype))
        return kind.create_addptr(builder, ptr, offset)

    replaced = {"binary_op": binary_op, "create_idiv": create_idiv, "create_addptr": create_addptr}
    vars(builder).update(replaced)
    try:
        yield calls
    finally:
        for name in replaced:
            delattr(builder, name)


def _quotient(lhs: Any, rhs: Any) -> Any:
    """The interpreter's integer division, which rounds toward 0."""
    return (lhs - np.fmod(lhs, rhs)) // rhs


def _getitem(core: Any, interpreter: Any) -> Callable[[Slow], Slow]:
    """`x[:, None]`: numpy's own reshape, once Triton has said which type it gives."""
    types: dict[tuple[str, tuple[bool, ...]], Any] = {}
    everything, result = slice(None), _maker(core, interpreter)

    def wrap(slow: Slow) -> Slow:
        def getitem(self: Any, index: Any) -> Any:
            parts = index if type(index) is tuple else (index,)
            if not self.type.is_block() or any(p is not None and p != everything for p in parts):
                return slow(self, index)
            key = self.type.name, tuple(p is None for p in parts)
            if key not in types:
                value = slow(self, index)
                types[key] = value.type
                return value
            return result(self.handle.data.reshape(types[key].shape.values), self.handle.dtype, types[key])

        return getitem

    return wrap


def to_tensor(core: Any, slow: Slow) -> Slow:
    """A tensor is one already. Every assignment in a kernel asks."""
    tensor = core.tensor
    return wraps(slow)(lambda self, x, check_type=True: x if type(x) is tensor else slow(self, x, check_type))


def broadcast(slow: Slow) -> Slow:
    """Blocks of one shape stay as they are."""

    @wraps(slow)
    def run(self: Any, lhs: Any, rhs: Any) -> Any:
        one, two = lhs.type, rhs.type
        if one.is_block() and two.is_block() and one.shape.values == two.shape.values:
            return lhs, rhs
        return slow(self, lhs, rhs)

    return run


def load(core: Any, interpreter: Any, slow: Slow) -> Slow:
    """A load through pointers, one or a block of them; block pointers and booleans are left to Triton."""
    result = _maker(core, interpreter)
    types: dict[str, Any] = {}  # of what pointers of a type point to

    @wraps(slow)
    def run(self: Any, ptr: Any, mask: Any, other: Any, boundary_check: Any, padding: Any, *how: Any) -> Any:
        given = _accessed(core, interpreter, ptr, mask, other)
        if given is None or boundary_check or padding or (mask is None and other is not None):
            return slow(self, ptr, mask, other, boundary_check, padding, *how)
        pointers, element, dtype, chosen, default = given
        if ptr.type.name not in types:
            types[ptr.type.name] = ptr.type.with_element_ty(element) if ptr.type.is_block() else element
        default = np.zeros(pointers.shape, dtype) if default is None else default
        return result(interpreter._interpreter.load(pointers, chosen, default, dtype), element, types[ptr.type.name])

    return run


def store(core: Any, interpreter: Any, slow: Slow) -> Slow:
    """A store through pointers, as `load`."""

    @wraps(slow)
    def run(self: Any, ptr: Any, val: Any, mask: Any, boundary_check: Any, *how: Any) -> Any:
        given = _accessed(core, interpreter, ptr, mask, val)
        if given is None or boundary_check or ptr.dtype.is_const():
            return slow(self, ptr, val, mask, boundary_check, *how)
        pointers, _, _, chosen, values = given
        return core.tensor(interpreter._interpreter.store(pointers, values, chosen), core.void)

    return run


def _accessed(core: Any, interpreter: Any, ptr: Any, mask: Any, value: Any) -> tuple[Any, ...] | None:
    """Arrays of one shape (pointers, mask, values) with the two dtypes of a value; None where Triton must look."""
    if type(ptr.handle) is not interpreter.TensorHandle or not ptr.dtype.is_ptr():
        return None
    element, pointers = ptr.dtype.element_ty, ptr.handle.data
    shape, dtype = pointers.shape, interpreter._get_np_dtype(element)
    if element is core.int1 or any(x is not None and x.type.is_block() > ptr.type.is_block() for x in (mask, value)):
        return None
    chosen = np.ones(shape, bool) if mask is None else mask.handle.data
    values = None if value is None else value.handle.data
    if value is not None and value.dtype is not element:
        if any(t.is_bf16() or t.is_fp8() or t.is_ptr() for t in (value.dtype, element)):
            return None
        values = values.astype(dtype)
    if chosen.dtype != bool or (values is not None and values.dtype != dtype):
        return None
    try:
        chosen = chosen if chosen.shape == shape else np.broadcast_to(chosen, shape)
        values = values if values is None or values.shape == shape else np.broadcast_to(values, shape)
    except ValueError:  # pointers of fewer dims
        return None
    return pointers, element, dtype, chosen, values


def _maker(core: Any, interpreter: Any) -> Callable[[Any, Any, Any], Any]:
    """(array, dtype of its handle, type) -> tensor"""
    tensor, handle_type = core.tensor, interpreter.TensorHandle
    shapes: dict[str, tuple[Any, Any]] = {}

    def make(data: Any, handle_dtype: Any, type: Any) -> Any:
        handle, value = object.__new__(handle_type), object.__new__(tensor)
        handle.data, handle.dtype, handle.attr = data, handle_dtype, {}
        if type.name not in shapes:
            like = tensor(handle, type)
            shapes[type.name] = like.shape, like.numel
        value.handle, value.type, value.dtype = handle, type, type.scalar
        value.shape, value.numel = shapes[type.name]
        return value

    return make
