"""A faster Triton interpreter, in which most tests of ops spend their time. What a kernel computes does not change.

- The interpreter replaces the builtins of `triton.language` by its own before it runs a kernel and again at every call of
  a device function inside it. To find them it lists all members of five modules and classes with `inspect.getmembers`:
  1 ms for each `tl.sum`. Here the names are listed once, and a device function finds what its kernel has replaced.
- It computes every addition, subtraction and multiplication of int32 a second time in int64, compares, and drops the
  result, because its `device_assert` does nothing. Here it does not compute them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from functools import cache
from typing import Any

from bagu.machine.device import triton_interprets

VERSIONS = ("3.6.",)  # whose functions do what those here do


def install() -> None:
    """Replace these parts of the interpreter. Must be called before the first kernel runs: a kernel hides builtins."""
    if not triton_interprets() or importlib.util.find_spec("triton") is None:
        return
    import triton

    if triton.__version__.startswith(VERSIONS):
        from triton.runtime import interpreter

        interpreter._patch_builtin = patch_builtin
        builder = interpreter.interpreter_builder
        if not builder.options.debug:  # device_assert does nothing
            builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
    """Replace each builtin of a module or class that is not replaced yet; `scope` restores it."""
    from triton.language.core import is_builtin
    from triton.runtime.interpreter import _patch_attr

    for name in builtins_of(pkg):
        if is_builtin(member := getattr(pkg, name)):
            _patch_attr(pkg, name, member, builder, scope)


@cache
def builtins_of(pkg: Any) -> tuple[str, ...]:
    from triton.language.core import is_builtin

    return tuple(name for name, member in inspect.getmembers(pkg) if is_builtin(member))
