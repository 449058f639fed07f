"""The interpreter that tests/ops/interpreter.py makes faster does what Triton's own does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from bagu.machine.device import triton_interprets
from tests.ops.interpreter import patch_builtin

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not triton_interprets(), reason="kernels are compiled here")


@pytest.fixture
def interpreter() -> Any:
    from triton.runtime import interpreter

    if interpreter._patch_builtin is not patch_builtin:
        pytest.skip("tests/ops/interpreter.py patches the interpreter of Triton 3.6 only")
    return interpreter


def builtins() -> list[str]:
    import triton.language as tl

    places = (tl, tl.tensor, tl.math)
    return [name for p in places for name, member in inspect.getmembers(p) if tl.core.is_builtin(member)]


def test_a_kernel_sees_no_builtin_and_all_are_restored(interpreter: Any) -> None:
    from bagu.ops.kernels.rows import load_row

    before = builtins()
    scope = interpreter._patch_lang(load_row.fn)
    try:
        left = builtins()
        interpreter._patch_lang(load_row.fn)  # a device function of the kernel
        nested = builtins()
    finally:
        scope.restore()
    assert "load" in before and left == [] and nested == [] and builtins() == before


def test_the_next_kernel_is_replaced_again(interpreter: Any) -> None:
    from bagu.ops.kernels.rows import load_row

    for _ in range(2):
        scope = interpreter._patch_lang(load_row.fn)
        left = builtins()
        scope.restore()
        assert left == []


@pytest.mark.parametrize("sizes", [[1], [16], [4, 8], [1, 2, 4]])
def test_shapes_are_those_that_triton_builds(interpreter: Any, sizes: list[int]) -> None:
    from triton.language import core

    for shape in (sizes, [core.constexpr(s) for s in sizes], core.tuple(sizes)):
        ours, own = core.block_type(core.float16, shape), core.block_type.__new__(core.block_type)
        core.block_type.__init__.__wrapped__(own, core.float16, shape)
        assert vars(ours).keys() == vars(own).keys()
        assert (ours, ours.name, ours.numel, ours.shape.values) == (own, own.name, own.numel, own.shape.values)
        assert [type(s) for s in ours.shape] == [type(s) for s in own.shape]
        for dtype in (ours, core.int64):
            tensor, expected = core.tensor("handle", dtype), core.tensor.__new__(core.tensor)
            core.tensor.__init__.__wrapped__(expected, "handle", dtype)
            assert vars(tensor).keys() == vars(expected).keys()
            assert (tensor.handle, tensor.type, tensor.dtype) == (expected.handle, expected.type, expected.dtype)
            assert repr(tensor.shape.values) == repr(expected.shape.values)
            assert repr(tensor.numel) == repr(expected.numel)


@pytest.mark.parametrize("sizes", [[], [3], [4, 2.0], [2**21]])
def test_a_shape_that_triton_refuses_is_refused(interpreter: Any, sizes: list[Any]) -> None:
    from triton.language import core

    core.block_type(core.int32, [4, 2])  # 2 is not 2.0
    with pytest.raises((TypeError, ValueError)):
        core.block_type(core.int32, sizes)


def test_numpy_dtypes_are_those_of_triton(interpreter: Any) -> None:
    from triton.language import core

    ours, own = interpreter._get_np_dtype, interpreter._get_np_dtype.__wrapped__
    scalars = [core.int1, core.uint8, core.int32, core.int64, core.float16, core.bfloat16, core.float32, core.float64]
    for scalar in (*scalars, core.pointer_type(core.float16)):
        for dtype in (scalar, core.block_type(scalar, [2, 4])):
            assert ours(dtype) == own(dtype)


def test_equality_is_that_of_triton(interpreter: Any) -> None:
    from triton.language import core

    one, two = core.constexpr(1), core.constexpr(2)
    values = [[1, 2], [1, 3], [1], [], [one, two], [1, 2.0], (1, 2), core.tuple([1, 2]), core.tuple([one, two])]
    for left in (v for v in values if isinstance(v, core.tuple)):
        for right in values:
            assert repr(left == right) == repr(core.tuple.__eq__.__wrapped__(left, right))
    dtypes = [core.int32, core.dtype("int32"), core.float32, core.constexpr(core.int32), "int32", None]
    for left in (d for d in dtypes if isinstance(d, core.dtype)):
        for right in dtypes:
            assert (left == right) == core.dtype.__eq__.__wrapped__(left, right)
