"""`measure`: warmup, flushing, sample counts; and the ceilings."""

from __future__ import annotations

import importlib.util
import time

import pytest
import torch

from bagu.errors import BaguError
from bagu.machine.ceilings import measure_ceilings
from bagu.machine.device import default_device, this_machine
from bagu.machine.timing import Timing, flush_buffer, measure, measure_in_turn, measure_rate

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_measure_returns_the_time_of_the_call() -> None:
    timing = measure(lambda: spin(0.002), "cpu", seconds=0.05, flush_l2=False)
    assert 0.002 <= timing.low_s <= timing.median_s <= timing.high_s
    assert timing.samples >= 5


def test_the_first_call_is_warmup() -> None:
    calls = 0

    def slow_at_first() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            spin(0.2)

    timing = measure(slow_at_first, "cpu", min_samples=9, max_samples=9, flush_l2=False)
    assert timing.median_s < 0.2  # a busy machine may interrupt some of nine calls for so long, not most of them
    assert calls >= 3 + 9


def test_sampling_stops_after_the_given_seconds() -> None:
    def tenth() -> None:
        spin(0.1)

    assert measure(tenth, "cpu", seconds=0.05, min_samples=2, flush_l2=False).samples == 2
    assert measure(tenth, "cpu", seconds=0.25, min_samples=1, flush_l2=False).samples <= 3


def test_sample_count_is_bounded() -> None:
    assert measure(lambda: None, "cpu", seconds=1.0, max_samples=7, flush_l2=False).samples == 7
    one = measure(lambda: None, "cpu", min_samples=1, max_samples=1, flush_l2=False)
    assert one.low_s == one.median_s == one.high_s


def test_functions_that_are_compared_are_sampled_in_turn() -> None:
    calls: list[str] = []
    fns = [lambda name=name: calls.append(name) for name in "abc"]
    found = measure_in_turn(fns, "cpu", min_samples=4, max_samples=4, seconds=0, flush_l2=False)
    assert [t.samples for t in found] == [4, 4, 4]
    assert "".join(calls[-12:]) == 4 * "abc"


def test_calls_in_a_row_are_timed_in_turn() -> None:
    calls: list[str] = []
    fns = [lambda name=name: calls.append(name) for name in "ab"]
    found = measure_rate(fns, torch.device("cpu"), seconds=0, rounds=3)
    assert [t.samples for t in found] == [3, 3] and all(0 < t.low_s <= t.median_s <= t.high_s for t in found)
    assert "".join(calls[-24:]) == 3 * "aaaabbbb"


def test_cache_is_flushed_before_every_sample() -> None:
    buffer = torch.ones(8)
    dirty = []

    def read_and_overwrite() -> None:
        dirty.append(bool(buffer.any()))
        buffer.fill_(1)

    timing = measure(read_and_overwrite, "cpu", max_samples=5, buffer=buffer)
    assert dirty[-timing.samples :] == [False] * timing.samples
    dirty.clear()
    timing = measure(read_and_overwrite, "cpu", max_samples=5, buffer=buffer, flush_l2=False)
    assert all(dirty)


def test_flush_buffer_is_larger_than_the_cache() -> None:
    size = flush_buffer("cpu").nbytes
    assert size > min(this_machine().cache_bytes or 0, 512 << 20) - 1
    assert 32 << 20 <= size <= 512 << 20


@pytest.mark.parametrize("bad", [{"min_samples": 0}, {"min_samples": 5, "max_samples": 4}])
def test_bad_sample_counts_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(BaguError, match="min_samples"):
        measure(lambda: None, "cpu", flush_l2=False, **bad)  # type: ignore[arg-type]


def test_unknown_device_is_refused() -> None:
    with pytest.raises(BaguError, match="meta"):
        measure(lambda: None, "meta", flush_l2=False)


def test_cpu_ceilings() -> None:
    ceilings = measure_ceilings("cpu", quick=True)
    assert (ceilings.device, ceilings.dtype) == ("cpu", "float32")
    # Between a very busy small machine and twice the memory bandwidth of the largest server.
    for rate in (ceilings.read, ceilings.write, ceilings.copy):
        assert 1e8 < rate < 2e12
    assert 1e9 < ceilings.matmul < 5e13


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_ceiling_kernels_move_every_element() -> None:
    from bagu.machine import ceiling_kernels as kernels

    src = torch.randn(2 * kernels.BLOCK, device=default_device())
    dst, out = torch.full_like(src, float("nan")), torch.full((2,), float("nan"), device=src.device)
    kernels.copy(dst, src)
    assert torch.equal(dst, src)
    kernels.write(dst, 3.0)
    assert bool((dst == 3.0).all())
    kernels.read(out, src)
    torch.testing.assert_close(out, src.view(2, -1).sum(1), rtol=1e-4, atol=1e-3)
    with pytest.raises(AssertionError, match="multiple"):
        kernels.write(dst[1:], 0.0)


@gpu
@needs_gpu
def test_cuda_time_scales_with_the_bytes() -> None:
    def zero(mib: int) -> Timing:
        x = torch.empty(mib << 18, device="cuda")
        return measure(x.zero_, "cuda")

    small, large = zero(256), zero(1024)
    assert 3.0 < large.median_s / small.median_s < 5.0
    assert large.high_s < 1.2 * large.low_s


@gpu
@needs_gpu
def test_cuda_time_excludes_host_time() -> None:
    """A host delay of 1 ms between two launches must not be timed: the GPU flushes meanwhile."""
    x = torch.empty(64 << 18, device="cuda")

    def slow_host() -> None:
        spin(0.001)
        x.zero_()

    assert measure(slow_host, "cuda").median_s < 0.5e-3


@gpu
@needs_gpu
def test_cuda_ceilings_are_quick_and_in_order() -> None:
    measure_ceilings("cuda", quick=True)  # initializes CUDA and cuBLAS
    start = time.perf_counter()
    quick = measure_ceilings("cuda", quick=True)
    middle = time.perf_counter()
    full = measure_ceilings("cuda")
    assert middle - start < 2
    assert time.perf_counter() - middle < 15
    assert full.copy > 0.97 * quick.copy
    assert full.read > 0.97 * quick.read
    assert full.device == "cuda"
