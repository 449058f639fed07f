"""A faster Triton interpreter, in which most tests of ops spend their time.

What a kernel computes does not change, except numbers that become fp8: the interpreter drops the carry when it rounds
(127.6 becomes 64, and on a GPU 128). Here PyTorch rounds them.

- The interpreter replaces the builtins of `triton.language` by its own before it runs a kernel and again at every call
  of a device function inside it. To find them it lists all members of five modules and classes: 1 ms for each `tl.sum`.
  Here the names are listed once, and a device function finds what its kernel has replaced.
- It computes every addition, subtraction and multiplication of int32 a second time in int64, compares, and drops the
  result, because its `device_assert` does nothing. Here it does not compute them.
- It builds the shape of every intermediate tensor three times, with a type for each size and each tuple of sizes, and a
  table of all dtypes at each conversion. Here each shape and dtype is built once, and shapes are compared as lists.
- It works out from the types of two operands what an operator does. Here once per pair of types: operators.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, wraps
from typing import Any

import torch

from bagu.machine.device import triton_interprets
from tests.ops import operators

VERSIONS = ("3.6.", "3.7.")  # whose functions do what those here do


def install() -> None:
    """Replace these parts of the interpreter. Must be called before the first kernel runs: a kernel hides builtins."""
    if not triton_interprets() or importlib.util.find_spec("triton") is None:
        return
    import triton
    from triton.runtime import interpreter

    interpreter._convert_float = converted_by_torch(interpreter._convert_float)
    if not triton.__version__.startswith(VERSIONS):
        return
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # device_assert does nothing
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = OncePerKernel(interpreter).patch
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    core.block_type.__init__ = block_type_init(core)
    core.tensor.__init__ = tensor_init(core)
    core.tuple.__eq__ = tuple_eq(core)
    core.dtype.__eq__ = dtype_eq(core)
    TritonSemantic.to_tensor = operators.to_tensor(core, TritonSemantic.to_tensor)
    TritonSemantic.load = operators.load(core, interpreter, TritonSemantic.load)
    TritonSemantic.store = operators.store(core, interpreter, TritonSemantic.store)
    TritonSemantic.broadcast_impl_value = operators.broadcast(TritonSemantic.broadcast_impl_value)


def converted_by_torch(convert: Callable[..., Any]) -> Callable[..., Any]:
    """The conversion of fp32 to fp8 by PyTorch, all others by `convert`."""
    fp8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}

    @wraps(convert)
    def converted(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source.name != "fp32" or target.name not in fp8:
            return convert(data, source, target, rounding_mode)
        return torch.tensor(data).to(fp8[target.name]).view(torch.uint8).numpy()

    return converted


def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
    """Replace each builtin of a module or class that is not replaced yet; `scope` restores it."""
    from triton.language import core

    is_builtin = core.is_builtin
    for name in builtins_of(pkg):
        if is_builtin(member := getattr(pkg, name)):
            scope.set_attr(pkg, name, interpreted(member, builder, name if pkg is core.tensor else ""))


@cache
def builtins_of(pkg: Any) -> tuple[str, ...]:
    from triton.language.core import is_builtin

    return tuple(name for name, member in inspect.getmembers(pkg) if is_builtin(member))


@cache
def fast_operators() -> Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
    from triton.language import core
    from triton.runtime import interpreter

    return operators.operators(core, interpreter)


@cache
def interpreted(member: Callable[..., Any], builder: Any, method: str = "") -> Callable[..., Any]:
    """A builtin that runs through the interpreter's builder. `method` is its name if it is a method of tl.tensor."""
    from triton.language.semantic import TritonSemantic

    semantic = TritonSemantic(builder)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    return fast_operators()[method](call) if method in fast_operators() else call


class OncePerKernel:
    """Replaces the language of a kernel, and that of its device functions only where the kernel has not.

    As in Triton, what a kernel replaces is restored when it ends, and what a device function replaces stays replaced.
    """

    def __init__(self, interpreter: Any) -> None:
        self.replace = interpreter._patch_lang
        self.scope = interpreter._LangPatchScope
        self.replaced: set[str] = set()  # the modules of the language that are replaced while a kernel runs

    def patch(self, fn: Callable[..., Any]) -> Any:
        if languages(fn) <= self.replaced:
            return self.scope()
        scope = self.replace(fn)
        if not self.replaced:
            restore = scope.restore
            scope.restore = lambda: (self.replaced.clear(), restore())
        self.replaced |= languages(fn)
        return scope


@cache
def languages(fn: Callable[..., Any]) -> frozenset[str]:
    """The modules of the language that a function can name: those that the interpreter replaces for it."""
    import triton.language as tl

    seen = [v for v in fn.__globals__.values() if inspect.ismodule(v)]
    return frozenset(v.__name__ for v in seen if v in (tl, tl.core))


def by_name(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The numpy dtype of a Triton dtype, looked up by its name."""
    known: dict[str, Any] = {}

    @wraps(np_dtype)
    def lookup(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = np_dtype(scalar)
        return known[scalar.name]

    return lookup


def block_type_init(core: Any) -> Callable[..., None]:
    """The type of a block; Triton checks and builds each shape once."""
    constexpr, build = core.constexpr, core.block_type.__init__

    @lru_cache(maxsize=None, typed=True)
    def built(*sizes: Any) -> tuple[Any, int, str]:
        build(block := core.block_type.__new__(core.block_type), core.int32, list(sizes))
        return block.shape, block.numel, str(block.shape)

    @wraps(build)
    def init(self: Any, element_ty: Any, shape: Any) -> None:
        shape, self.numel, text = built(*[s.value if isinstance(s, constexpr) else s for s in shape])
        self.element_ty, self.shape, self.name = element_ty, shape, f"<{text}, {element_ty}>"

    return init


def tensor_init(core: Any) -> Callable[..., None]:
    """A tensor; all tensors of one shape share the tuple of its sizes, which nothing changes."""
    build = core.tensor.__init__

    @cache
    def built(*sizes: int) -> tuple[Any, Any]:
        dtype = core.block_type(core.int32, list(sizes)) if sizes else core.int32
        build(tensor := core.tensor.__new__(core.tensor), None, dtype)
        return tensor.shape, tensor.numel

    @wraps(build)
    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = built(*type.shape.values) if type.is_block() else built()

    return init


def tuple_eq(core: Any) -> Callable[[Any, Any], Any]:
    """Compare with integers as they are; Triton first builds a tuple of them, with a type."""
    equal, constexpr = core.tuple.__eq__, core.constexpr

    @wraps(equal)
    def eq(self: Any, other: Any) -> Any:
        values = other.values if type(other) is core.tuple else other
        if type(values) is list and all(type(v) is int for v in values):
            return constexpr(self.values == values)
        return equal(self, other)

    return eq


def dtype_eq(core: Any) -> Callable[[Any, Any], bool]:
    """A dtype is itself, without a look at its name."""
    equal = core.dtype.__eq__

    @wraps(equal)
    def eq(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    return eq
