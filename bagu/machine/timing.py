"""Measure the time of a call with cold caches and warm code; report medians.

`measure` times one call, `measure_in_turn` several that are compared, `measure_rate` calls in a row, `measure_host` the
time for which the host is busy with a call.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bagu.errors import BaguError
from bagu.machine.device import gpu, this_machine

MIB = 1 << 20
WARM_S = 0.03  # the clocks of an idle GPU rise within milliseconds; caches and allocators settle in a few calls
MAX_FLUSHES = 128  # 8 ms on an H200, whose host takes up to 4 ms for a training step of a transformer's layer


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call: median, 20th and 80th percentile, over `samples` samples."""

    median_s: float
    low_s: float
    high_s: float
    samples: int


def reset_device(device: torch.device) -> None:
    """Free cached memory, reset the compiler, and reset the peak memory statistics."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()  # the statistics cannot be reset before this
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure(
    fn: Callable[[], object],
    device: torch.device | str,
    *,
    warmup: int = 3,
    min_samples: int = 5,
    max_samples: int = 1000,
    seconds: float = 0.3,
    flush_l2: bool = True,
    buffer: torch.Tensor | None = None,
) -> Timing:
    """Measure the time of `fn()` on `device`.

    Runs `fn` at least `warmup` times first, so that compilation and autotuning are not timed. Then it takes samples for
    `seconds` (flushes included), but at least `min_samples` and at most `max_samples`. With `flush_l2` the caches are
    overwritten before each sample, so that inputs come from main memory. `buffer` is a `flush_buffer(device)` to reuse:
    allocating one costs 0.2 s on a CPU with a 300 MiB cache.
    """
    return measure_in_turn(
        [fn],
        device,
        warmup=warmup,
        min_samples=min_samples,
        max_samples=max_samples,
        seconds=seconds,
        flush_l2=flush_l2,
        buffer=buffer,
    )[0]


def measure_in_turn(
    fns: Sequence[Callable[[], object]],
    device: torch.device | str,
    *,
    warmup: int = 3,
    min_samples: int = 5,
    max_samples: int = 1000,
    seconds: float = 0.3,
    flush_l2: bool = True,
    buffer: torch.Tensor | None = None,
) -> list[Timing]:
    """Measure functions that are compared: each round takes one sample of every one, so that a drift of the clocks or
    of the load changes all of them equally. `seconds` is for each function; the other options are those of `measure`.
    """
    device = torch.device(device)
    if not 1 <= min_samples <= max_samples:
        raise BaguError(f"min_samples={min_samples}, max_samples={max_samples}: need 1 <= min_samples <= max_samples")
    plan = _Plan(warmup=warmup, min_samples=min_samples, max_samples=max_samples, seconds=seconds)
    scrub = (flush_buffer(device) if buffer is None else buffer) if flush_l2 else None
    if device.type == "cuda":
        with torch.cuda.device(device):
            samples = _cuda_samples(fns, scrub, plan)
    elif device.type == "cpu":
        samples = _cpu_samples(fns, scrub, plan)
    else:
        raise BaguError(f"cannot time calls on device {str(device)!r}", hint="use 'cpu' or 'cuda'")
    return [_timing(own) for own in samples]


def measure_host(fn: Callable[[], object], device: torch.device, *, calls: int = 32, rounds: int = 9) -> float:
    """Seconds that the host is busy with one `fn()`: the median over rounds of calls in a row.

    Nothing waits for a GPU inside a round. Its work must be short, or its queue fills and the host waits. On a CPU this
    is the time of the call.
    """
    samples = [_in_a_row(fn, device, calls)[0] for _ in range(1 + rounds)]
    return float(np.median(samples[1:]))  # the first round warms up


def measure_rate(
    fns: Sequence[Callable[[], object]], device: torch.device, *, seconds: float = 0.3, rounds: int = 7
) -> list[Timing]:
    """Measure functions that are compared by the time of a call among calls in a row, with all that the host does.

    A round runs every function, for `seconds` / `rounds` each and at least 4 calls, and waits once at its end: if the
    host is faster than the GPU, this is the GPU's time with warm caches, else the host's.
    """
    counts = []
    for fn in fns:
        _in_a_row(fn, device, 2)
        counts.append(max(4, int(seconds / rounds / _in_a_row(fn, device, 3)[1])))
    samples: list[list[float]] = [[] for _ in fns]
    for _ in range(rounds):
        for fn, calls, own in zip(fns, counts, samples, strict=True):
            own.append(_in_a_row(fn, device, calls)[1])
    return [_timing(own) for own in samples]


def _in_a_row(fn: Callable[[], object], device: torch.device, calls: int) -> tuple[float, float]:
    """Seconds per call until the host has submitted all calls, and until the device has finished them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    submitted = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return submitted / calls, (time.perf_counter() - start) / calls


def flush_buffer(device: torch.device | str) -> torch.Tensor:
    """A buffer that flushes the caches of `device` when it is overwritten.

    CUDA: twice the L2, at least 256 MiB. CPU: 1.1 times the last-level cache, at least 32 MiB, and at most 512 MiB to
    bound the cost of a sample.
    """
    device = torch.device(device)
    if device.type == "cuda":
        size = max(2 * gpu(device).l2_bytes, 256 * MIB)
    else:
        cache = this_machine().cache_bytes or 32 * MIB
        size = min(max(cache + cache // 10, 32 * MIB), 512 * MIB)
    # Flushing writes zeros instead of reading: the dirty lines are written back during the sample, which makes up for
    # the dirty lines that the sample leaves in the cache. 64-bit elements keep the fill at full width.
    return torch.zeros(size // 8, dtype=torch.int64, device=device)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How long to sample; `measure` documents each field."""

    warmup: int
    min_samples: int
    max_samples: int
    seconds: float

    def warm(self, fn: Callable[[], object]) -> None:
        """Call `fn` at least once, until `warmup` calls and WARM_S seconds are done, or `seconds` have passed."""
        start, calls, spent = time.perf_counter(), 0, 0.0
        while calls == 0 or (spent < self.seconds and (calls < self.warmup or spent < WARM_S)):
            fn()
            calls += 1
            spent = time.perf_counter() - start


def _cpu_samples(fns: Sequence[Callable[[], object]], scrub: torch.Tensor | None, plan: _Plan) -> list[list[float]]:
    for fn in fns:
        plan.warm(fn)
    samples: list[list[float]] = [[] for _ in fns]
    end, rounds = time.perf_counter() + plan.seconds * len(fns), 0
    while rounds < plan.min_samples or (rounds < plan.max_samples and time.perf_counter() < end):
        for fn, own in zip(fns, samples, strict=True):
            if scrub is not None:
                scrub.zero_()
            start = time.perf_counter_ns()
            fn()
            own.append((time.perf_counter_ns() - start) / 1e9)
        rounds += 1
    return samples


def _cuda_samples(fns: Sequence[Callable[[], object]], scrub: torch.Tensor | None, plan: _Plan) -> list[list[float]]:
    def synced(fn: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            fn()
            torch.cuda.synchronize()

        return run

    for fn in fns:
        plan.warm(synced(fn))
    calls = [_CudaCall(fn, scrub) for fn in fns]
    for call in calls:  # all wait as long as the one that needs it most: a pause changes the clocks
        call.flushes = max(c.flushes for c in calls)
    fitting = int(len(calls) * plan.seconds / sum(c.sample_s for c in calls))
    count = min(max(fitting, plan.min_samples), plan.max_samples)
    rounds = [[call.submit() for call in calls] for _ in range(count)]
    torch.cuda.synchronize()
    return [[start.elapsed_time(stop) / 1e3 for start, stop in own] for own in zip(*rounds, strict=True)]


class _CudaCall:
    """A call on a GPU with the number of flushes that it needs; `sample_s` is the time of one sample."""

    def __init__(self, fn: Callable[[], object], scrub: torch.Tensor | None) -> None:
        self.fn, self.scrub = fn, scrub
        host_s, call_s = _host_and_wall(fn)
        flush_s, self.flushes = 0.0, 0
        if scrub is not None:
            scrub.zero_()
            flush_s = _host_and_wall(scrub.zero_)[1]
            # The GPU must still be flushing while the host submits fn. Otherwise the gaps between its kernels would be
            # timed too. Flush often enough to cover the host's time.
            # Factor 3: with autograd's own thread the host's time varies, and a factor of 1.5 still left gaps.
            self.flushes = min(max(1, math.ceil(3 * host_s / flush_s)), MAX_FLUSHES)
        self.call_s, self.flush_s = call_s, flush_s

    @property
    def sample_s(self) -> float:
        return self.call_s + self.flushes * self.flush_s

    def submit(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Submit one sample; the events are around the call."""
        for _ in range(self.flushes):
            assert self.scrub is not None
            self.scrub.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.fn()
        stop.record()
        return start, stop

    def samples(self, count: int) -> list[float]:
        pairs = [self.submit() for _ in range(count)]
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairs]


def repeated_measure(
    fn: Callable[[], object], device: torch.device, *, seconds: float, buffer: torch.Tensor
) -> Callable[[], Timing]:
    """A function that measures `fn()` on a GPU for `seconds` each time it is called, with 3 to 9 samples.

    Warm-up and the number of flushes are settled here, once: `measure` would spend more time on them than on samples.
    """
    with torch.cuda.device(device):
        for _ in range(3):
            fn()
        timed = _CudaCall(fn, buffer)
    count = min(max(int(seconds / timed.sample_s), 3), 9)

    def again() -> Timing:
        with torch.cuda.device(device):
            return _timing(timed.samples(count))

    return again


def _timing(samples: list[float]) -> Timing:
    low, median, high = (float(q) for q in np.quantile(samples, [0.2, 0.5, 0.8]))
    return Timing(median_s=median, low_s=low, high_s=high, samples=len(samples))


def _host_and_wall(fn: Callable[[], object]) -> tuple[float, float]:
    """Host seconds of a call of `fn`, and seconds until the GPU has finished it; the best of three."""
    host, wall = [], []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        wall.append(time.perf_counter() - start)
    return min(host), min(wall)


class Stopwatch:
    """Seconds of work of this process since it was made; on a GPU those between two marks in its stream."""

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Until now. Waits for a GPU."""
        if self._events is None:
            return time.perf_counter() - self._start
        start, stop = self._events
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3
