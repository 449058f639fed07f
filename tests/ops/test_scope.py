"""`use` and `invariant`: they nest, they hold in one thread or task alone, and a recomputed block keeps them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bagu.ops
from bagu.errors import ArgumentError
from bagu.ops.call import scope

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def chosen() -> tuple[str | None, bool]:
    return tuple(scope.current())  # type: ignore[return-value]


def test_use_and_invariant_nest_and_restore() -> None:
    once, always = bagu.ops.use("torch"), bagu.ops.invariant()
    with once:
        with bagu.ops.use("triton"), always:
            assert chosen() == ("triton", True)
            with once, always:  # the same ones again
                assert chosen() == ("torch", True)
            assert chosen() == ("triton", True)
        assert chosen() == ("torch", False)
    assert chosen() == (None, False)
    with pytest.raises(ZeroDivisionError), once:
        raise ZeroDivisionError
    assert chosen() == (None, False)


def test_a_choice_stays_in_its_thread_and_does_not_outlive_it() -> None:
    """Two threads whose `with` blocks overlap and do not nest, as seen from a third."""
    entered, left = threading.Event(), threading.Event()

    def first() -> tuple[str | None, bool]:
        with bagu.ops.use("torch"):
            entered.wait(10)
            return chosen()

    def second() -> tuple[str | None, bool]:
        with bagu.ops.use("triton"), bagu.ops.invariant():
            entered.set()
            left.wait(10)
            return chosen()

    with ThreadPoolExecutor(2) as threads:
        a, b = threads.submit(first), threads.submit(second)
        assert a.result() == ("torch", False)
        assert chosen() == (None, False)
        left.set()
        assert b.result() == ("triton", True)
    assert chosen() == (None, False)
    assert scope._open == [] and (scope._backend, scope._invariant) == (None, False)


def test_a_choice_stays_in_its_task() -> None:
    async def ask(backend: str) -> str | None:
        with bagu.ops.use(backend):
            await asyncio.sleep(0.01)
            return scope.current().backend

    async def both() -> list[str | None]:
        return list(await asyncio.gather(ask("torch"), ask("triton")))

    assert asyncio.run(both()) == ["torch", "triton"]


def test_compiling_beside_a_thread_with_another_choice_is_refused() -> None:
    x, w = torch.randn(4, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    torch._dynamo.reset()
    fn = torch.compile(lambda: bagu.ops.rms_norm(x, w), fullgraph=True, backend="eager")
    with bagu.ops.use("torch"), ThreadPoolExecutor(1) as other:
        with pytest.raises(Exception, match="another thread is inside"):
            other.submit(fn).result()
        fn()
    fn()


def test_use_inside_compiled_code() -> None:
    x, w = torch.randn(4, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    seen: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph.code)
        return graph

    def both() -> torch.Tensor:
        with bagu.ops.use("triton"):
            y = bagu.ops.rms_norm(x, w)
        return bagu.ops.relu_squared(y)

    torch._dynamo.reset()
    with bagu.ops.use("torch"):
        torch.compile(both, fullgraph=True, backend=record)()
        assert chosen() == ("torch", False)
    assert "rms_norm_triton" in seen[0] and "relu_squared_triton" not in seen[0]


def test_what_is_no_name_is_refused() -> None:
    x, w = torch.ones(2, 4), torch.ones(4)
    for wrong in (None, 3, ["torch"]):
        with pytest.raises(ArgumentError, match="a name is wanted"):
            bagu.ops.use(wrong)  # type: ignore[arg-type]
        if wrong is not None:
            with pytest.raises(ArgumentError, match="a name is wanted"):
                bagu.ops.rms_norm(x, w, backend=wrong)  # type: ignore[arg-type]


def recomputed(block: Callable[[torch.Tensor], torch.Tensor], within: Any, later: Any) -> list[bool]:
    """What a block under `checkpoint` saw at its first and second run: whether its op ran on Triton."""
    seen: list[bool] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        y = block(x)
        seen.append("triton" in type(y.grad_fn).__name__)
        return y.square()

    x = torch.randn(4, 16, device=DEVICE, requires_grad=True)
    with within:
        y: Any = checkpoint(run, x, use_reentrant=False)
    with later:
        y.sum().backward()
    return seen


def norm(x: torch.Tensor) -> torch.Tensor:
    return bagu.ops.rms_norm(x, torch.ones(16, device=DEVICE))


def other_inside(x: torch.Tensor) -> torch.Tensor:
    with bagu.ops.use("torch"):
        y = bagu.ops.relu_squared(x)
    return norm(y)


@pytest.mark.parametrize("block", [norm, other_inside])
def test_a_recomputed_block_runs_what_its_forward_ran(block: Callable[[torch.Tensor], torch.Tensor]) -> None:
    use = bagu.ops.use
    assert recomputed(block, use("triton"), use("torch")) == [True, True]
    assert recomputed(block, use("torch"), use("triton")) == [False, False]
    assert recomputed(block, torch.enable_grad(), use("torch" if GPU else "triton")) == [GPU, GPU]
    assert chosen() == (None, False) and scope._open == []


@pytest.mark.skipif(GPU, reason="invariant mode is for a CPU")
def test_a_recomputed_block_keeps_invariant_mode() -> None:
    seen: list[bool] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(scope.current().invariant)
        return norm(x).square()

    x = torch.randn(4, 16, requires_grad=True)
    with bagu.ops.invariant():
        y: Any = checkpoint(run, x, use_reentrant=False)
    y.sum().backward()
    assert seen == [True, True]
