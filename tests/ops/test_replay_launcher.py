"""What a replay launches with: Triton's private launcher, scratch memory, the current stream and device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagu.ops.replay.launcher import (
    Direct,
    Launch,
    Scratch,
    noted_launches,
    takes_kernel_arguments,
    with_scratch_memory,
)
from bagu.ops.replay.plan import Plan, Step
from tests.ops.points import DEVICE
from tests.ops.replaying import GPU, Interpreted, forward_of, plans


def test_a_plan_allocates_the_scratch_memory_of_a_launch() -> None:
    given: list[Any] = []
    step = Step(Direct(lambda *args: given.append(args), (1,), (Scratch(384), None)), (7,))
    plan = Plan(device=-1, inputs=0, allocations=(), steps=(step, step), results=())
    plan.replay(Interpreted().empty, 0)
    for one, stream, scratch, none, seven in given:
        assert (one, stream, none, seven) == (1, 0, None, 7) and scratch.nbytes == 384
    assert given[0][2].data_ptr() != given[1][2].data_ptr()


def test_a_kernel_with_scratch_memory_is_launched_with_an_allocator() -> None:
    """TMA descriptors that a kernel makes need memory, which Triton asks the context's allocator for."""
    allocation = pytest.importorskip("triton.runtime._allocation")
    asked: list[Any] = []

    def run(*args: Any) -> None:
        asked.append((args, allocation._allocator.get()))

    outside = allocation._allocator.get()
    with_scratch_memory(run)(64, 1, 1, 0, "function")
    (args, allocator), after = asked[0], allocation._allocator.get()
    assert args == (64, 1, 1, 0, "function") and after is outside and allocator is not outside
    if GPU:
        assert allocator(1152, 128, 0).numel() == 1152


class _Launcher36:
    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any) -> None: ...


class _Launcher39:
    def __call__(
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, kernel_metadata: Any,
        launch_metadata: Any, launch_enter_hook: Any, launch_exit_hook: Any, *args: Any,
    ) -> None: ...  # fmt: skip


class _Tomorrow:
    def __call__(self, grid: tuple[int, int, int], stream: int, function: int, *args: Any) -> None: ...


def test_a_launcher_that_takes_other_arguments_is_not_called() -> None:
    assert takes_kernel_arguments(_Launcher36) and takes_kernel_arguments(_Launcher39)
    assert not takes_kernel_arguments(_Tomorrow)


def test_the_launcher_of_this_triton_is_as_expected() -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    assert takes_kernel_arguments(driver.CudaLauncher)


class Unexpected(Interpreted):
    def direct(self, launch: Launch) -> Direct | None:
        return None


def test_without_the_private_launcher_the_ordinary_entry_is_used() -> None:
    run = forward_of("rms_norm", Unexpected())
    x, w = torch.randn(4, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    for _ in range(4):
        assert torch.equal(run(x, w, 1e-6)[0], forward_of("rms_norm", None)(x, w, 1e-6)[0])
    assert not plans(run)


class Hooked(Interpreted):
    def ready(self) -> bool:
        return False


def test_a_hook_on_triton_sees_every_launch() -> None:
    run, seen = forward_of("rms_norm", Hooked()), []
    x, w = torch.randn(4, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    with noted_launches(seen.append):
        for _ in range(4):
            run(x, w, 1e-6)
    assert len(seen) == 4 and not plans(run)  # the interpreter's own launcher goes through the ordinary entry


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_each_hook_of_triton_sees_replayed_launches(hook: str) -> None:
    from triton import knobs

    import bagu.ops

    x, w = torch.randn(64, 512, device="cuda"), torch.randn(512, device="cuda")
    for _ in range(3):
        bagu.ops.rms_norm(x, w)
    seen: list[Any] = []
    chain = getattr(knobs.runtime, hook)
    chain.add(seen.append)
    try:
        for _ in range(3):
            bagu.ops.rms_norm(x, w)
    finally:
        chain.remove(seen.append)
    assert len(seen) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_replay_is_on_torchs_current_stream_and_in_a_cuda_graph() -> None:
    import bagu.ops

    x, w = torch.randn(64, 512, device="cuda"), torch.randn(512, device="cuda")
    want = bagu.ops.rms_norm(x, w, backend="torch")
    for _ in range(3):
        bagu.ops.rms_norm(x, w)
    side = torch.cuda.Stream()
    slow = torch.randn(4096, 4096, device="cuda")
    with torch.cuda.stream(side):
        late = torch.zeros_like(x)
        for _ in range(20):
            slow = slow @ slow * 1e-4
        late.copy_(x)
        y = bagu.ops.rms_norm(late, w)  # on any other stream it would read zeros
    side.synchronize()
    torch.testing.assert_close(y, want)
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        y = bagu.ops.rms_norm(static, w)
    static.copy_(2 * x)
    graph.replay()
    torch.testing.assert_close(y, bagu.ops.rms_norm(2 * x, w))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_replay_is_on_the_device_of_its_tensors() -> None:
    import bagu.ops

    x, w = torch.randn(64, 512, device="cuda:1"), torch.randn(512, device="cuda:1")
    for _ in range(4):
        y = bagu.ops.rms_norm(x, w)
        assert y.device == x.device and torch.cuda.current_device() == 0
    torch.testing.assert_close(y, bagu.ops.rms_norm(x, w, backend="torch"))
