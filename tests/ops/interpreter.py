"""A faster search for builtins in Triton's interpreter.

Before it runs a kernel, and at every call of a device function inside it, the interpreter replaces the builtins of
`triton.language` by its own. To find them it lists all members of five modules and classes with `inspect.getmembers`:
1 ms for each `tl.sum`, half of the time of a test of a kernel. The names of the builtins do not change, so they are
listed once here.
"""

from __future__ import annotations

import importlib.util
import inspect
from functools import cache
from typing import Any

from bagu.machine.device import triton_interprets

VERSIONS = ("3.6.",)  # whose `_patch_builtin` does what this one does


def install() -> None:
    """Replace the interpreter's search. Must be called before the first kernel runs, since a kernel hides builtins."""
    if not triton_interprets() or importlib.util.find_spec("triton") is None:
        return
    import triton

    if triton.__version__.startswith(VERSIONS):
        from triton.runtime import interpreter

        interpreter._patch_builtin = patch_builtin


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
