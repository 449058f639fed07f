"""The search for builtins that tests/ops/interpreter.py installs finds what Triton's own finds."""

from __future__ import annotations

import inspect

import pytest

from bagu.machine.device import triton_interprets
from tests.ops.interpreter import patch_builtin

pytest.importorskip("triton")


@pytest.mark.skipif(not triton_interprets(), reason="kernels are compiled here")
def test_a_kernel_sees_no_builtin_and_all_are_restored() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    from bagu.ops.kernels.rows import load_row

    if interpreter._patch_builtin is not patch_builtin:
        pytest.skip("tests/ops/interpreter.py patches the interpreter of Triton 3.6 only")
    places = (tl, tl.tensor, tl.math)

    def builtins() -> list[str]:
        return [name for p in places for name, member in inspect.getmembers(p) if tl.core.is_builtin(member)]

    before = builtins()
    scope = interpreter._patch_lang(load_row.fn)
    try:
        left = builtins()
    finally:
        scope.restore()
    assert "load" in before and left == [] and builtins() == before
