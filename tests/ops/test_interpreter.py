"""The interpreter that tests/ops/interpreter.py makes faster does what Triton's own does."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from bagu.machine.device import triton_interprets
from tests.ops.interpreter import interpreted, patch_builtin
from tests.ops.operators import BINARY

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not triton_interprets(), reason="kernels are compiled here")


@pytest.fixture
def interpreter() -> Any:
    from triton.runtime import interpreter

    if interpreter._patch_builtin is not patch_builtin:
        pytest.skip("tests/ops/interpreter.py patches the interpreters of Triton 3.6 and 3.7 only")
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


def operands(core: Any, interpreter: Any) -> list[Any]:
    """Scalars, rows, columns and blocks of each dtype, pointers, and Python's numbers."""
    rng, found = np.random.default_rng(0), []
    kinds = [core.int1, core.int8, core.int32, core.int64, core.uint32, core.float16, core.bfloat16, core.float32]
    for kind in (*kinds, core.float64, core.pointer_type(core.float16)):
        for shape in ((), (2, 4), *(((4,), (2, 1)) if kind is core.float32 else ())):
            values = rng.integers(1, 100, shape or (1,)).astype(interpreter._get_np_dtype(kind))
            type = core.block_type(kind, list(shape)) if shape else kind
            found.append(core.tensor(interpreter.TensorHandle(values, kind), type))
    found += [core.tensor(interpreter.TensorHandle(np.ones(1, bool), k), core.int1) for k in (core.int32, core.float32)]
    found += [interpreter._implicit_cvt(n) for n in (3, 3_000_000_000, -(2**40))]  # arguments of a kernel
    return [*found, 3, 300, -1, 2**40, 2.5, -0.0, 1e-300, float("inf"), True, core.constexpr(2), core.constexpr(0.5)]


def outcome(call: Any, *args: Any) -> Any:
    """All that a later operation can see of a result, or the class of the error."""
    try:
        with np.errstate(all="ignore"):
            found = call(*args)
    except Exception as error:
        return type(error)
    data = found.handle.data
    sizes = repr(found.shape.values), repr(found.numel)
    return str(found.type), str(found.dtype), *sizes, found.handle.dtype, data.dtype, data.shape, data.tobytes()


@pytest.mark.filterwarnings("ignore:Value .* exceeds the maximum bitwidth")
@pytest.mark.parametrize("name", sorted(BINARY))
def test_an_operator_gives_what_triton_gives_also_the_second_time(interpreter: Any, name: str) -> None:
    from triton.language import core

    builder, method = interpreter.interpreter_builder, f"__{name}__"
    own, ours = (interpreted(getattr(core.tensor, method), builder, m) for m in ("", method))
    scope, compared = interpreter._patch_lang(interpreted_kernel()), 0
    try:
        values = operands(core, interpreter)
        for left in (v for v in values if isinstance(v, core.tensor)):
            for right in values:
                want = outcome(own, left, right)
                assert outcome(ours, left, right) == want == outcome(ours, left, right), (left.type, right)
                compared += isinstance(want, tuple)
    finally:
        scope.restore()
    assert compared > 50


def interpreted_kernel() -> Any:
    from bagu.ops.kernels.rows import load_row

    return load_row.fn


def test_an_index_gives_what_triton_gives_also_the_second_time(interpreter: Any) -> None:
    from triton.language import core

    builder, every = interpreter.interpreter_builder, slice(None)
    own, ours = (interpreted(core.tensor.__getitem__, builder, m) for m in ("", "__getitem__"))
    scope = interpreter._patch_lang(interpreted_kernel())
    try:
        for x in (v for v in operands(core, interpreter) if isinstance(v, core.tensor)):
            for index in (None, every, (None,), (every, None), (None, every), (None, None), (every, None, every), (0,)):
                want = outcome(own, x, index)
                assert outcome(ours, x, index) == want == outcome(ours, x, index), (x.type, index)
    finally:
        scope.restore()


@pytest.mark.parametrize("kind", ["int1", "int8", "int32", "float16", "bfloat16", "float32", "float64"])
def test_memory_is_read_and_written_as_triton_does(interpreter: Any, kind: str) -> None:
    """Through one pointer and through blocks of them, with masks and values of any dtype that broadcast, or not."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    semantic, element = TritonSemantic(interpreter.interpreter_builder), getattr(core, kind)
    memory = np.random.default_rng(1).integers(0, 2, 64).astype(interpreter._get_np_dtype(element))
    before, scope, compared = memory.copy(), interpreter._patch_lang(interpreted_kernel()), 0
    tensor = lambda data, kind, shape: core.tensor(  # noqa: E731
        interpreter.TensorHandle(data, kind), core.block_type(kind, list(shape)) if shape else kind
    )
    try:
        others = [None, *(v for v in operands(core, interpreter) if isinstance(v, core.tensor))]
        for shape in ((), (4,), (2, 4)):
            places = 3 * np.arange(np.prod(shape, dtype=int), dtype=np.uint64).reshape(shape or (1,))
            ptr = tensor(memory.ctypes.data + memory.itemsize * places, core.pointer_type(element), shape)
            full = tensor(places % 2 == 0, core.int1, shape)
            masks = [None, full, *(tensor(np.ones(s or (1,), bool), core.int1, s) for s in ((), (4,), (2, 1), (4, 4)))]
            for mask in masks:
                for other in others:
                    args = ptr, mask, other, (), "", "", "", False
                    want = outcome(TritonSemantic.load.__wrapped__, semantic, *args)
                    assert outcome(semantic.load, *args) == want, (shape, mask, other)
                    if other is None:
                        continue
                    found = []
                    for store in (TritonSemantic.store.__wrapped__, TritonSemantic.store):
                        memory[:] = before
                        error = None
                        try:
                            store(semantic, ptr, other, mask, (), "", "")
                        except Exception as e:
                            error = type(e)
                        found.append((error, memory.tobytes()))
                    assert found[0] == found[1], (shape, mask, other)
                    compared += found[0][1] != before.tobytes()
                    memory[:] = before
    finally:
        scope.restore()
    assert compared > 20
