"""Time one implementation at one case: its passes, and their rows in the results.

Each implementation runs on its own inputs in three passes: `fwd` as in training (the graph is kept, so saving more
costs more), `bwd` alone, and `fwd+bwd`. An op without gradients has only the first. Caches are flushed before every
sample (`timing.measure`).

On a GPU the host time of a call is measured as well, at an op's first bench case with tiny sizes; there `fwd` keeps no
graph, as in inference.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bagu.bench.implementations import Implementation, is_absent
from bagu.bench.roofline import costs, floor, is_fault
from bagu.bench.sizing import DTYPES, BenchStreams, bench_inputs, first_tensor, shape_label
from bagu.machine.ceilings import Ceilings
from bagu.machine.device import gpu, this_machine
from bagu.machine.timing import Timing, measure, measure_host
from bagu.ops.contract.core import Case, Cost, OpSpec

MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of a run."""

    device: torch.device
    dtype: torch.dtype
    quick: bool
    compiled: bool

    @property
    def budget(self) -> int:
        """Bytes that a forward may move. A GPU runs the cases unchanged, unless one moves an eighth of its memory."""
        if self.device.type != "cuda":
            return (8 if self.quick else 64) * MB
        return 256 * MB if self.quick else gpu(self.device).memory_bytes // 8

    @property
    def seconds(self) -> float:
        """Sampling time of one point. A GPU takes hundreds of samples in 0.1 s; a CPU needs 0.05 s per flush."""
        return 0.05 if self.quick else 0.1 if self.device.type == "cuda" else 0.3

    @property
    def cache_bytes(self) -> int:
        return gpu(self.device).l2_bytes if self.device.type == "cuda" else this_machine().cache_bytes or 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One implementation at one case; `tiny` is the case at which its host time is measured, if it is."""

    spec: OpSpec
    case: Case
    implementation: Implementation
    tiny: Case | None = None


@dataclass(frozen=True, kw_only=True)
class Point:
    """One pass of a job. A yardstick has no cost; a failed point has an error and no timing.

    `host_s` is the time for which the host is busy with a call. `peak_bytes` is the peak memory of a call above the
    memory in use before it; GPU only.
    """

    job: Job
    shape: str
    dims: Mapping[str, Any]
    step: str
    cost: Cost | None
    written: int
    timing: Timing | None
    host_s: float | None
    peak_bytes: int | None
    error: str | None


def time_job(job: Job, setting: Setting, scrub: torch.Tensor) -> Iterator[Point]:
    """Time every pass of a job. An exception becomes a point with an error, and the other implementations still run."""
    spec, device = job.spec, setting.device
    args = bench_inputs(spec, job.case, setting.dtype, device)
    dims, first = spec.bind(args), first_tensor(spec, args).dtype
    cost, shape = costs(spec, dims, first), shape_label(spec, args)
    numbers = {k: v for k, v in dims.items() if type(v) in (int, tuple)}

    def point(step: str, cost: Cost | None, *, error: str | None = None, **measured: Any) -> Point:
        nothing = {"written": 0, "timing": None, "host_s": None, "peak_bytes": None}
        return Point(job=job, shape=shape, dims=numbers, step=step, cost=cost, error=error, **nothing | measured)

    step = "fwd"
    try:
        with _fresh_compiler() if job.implementation.name == "compile" else nullcontext():
            host = _host_times(job, setting)
            for step, fn, written in _passes(job, args, setting):
                least = 3 if setting.quick else 5
                timing = measure(fn, device, seconds=setting.seconds, min_samples=least, buffer=scrub)
                known = None if written is None else cost[step]
                more: dict[str, Any] = {"host_s": host.get(step), "peak_bytes": peak_bytes(fn, device)}
                yield point(step, known, written=written or 0, timing=timing, **more)
    except Exception as error:
        if job.implementation.backend or not is_absent(error):
            words = str(error).strip().splitlines() or [""]
            yield point(step, cost[step], error=f"{type(error).__name__}: {words[0]}"[:300])


def _host_times(job: Job, setting: Setting) -> dict[str, float]:
    """Seconds of the host by pass; none of a yardstick."""
    if job.tiny is None:
        return {}
    args, found = bench_inputs(job.spec, job.tiny, setting.dtype, setting.device), {}
    for step, fn, written in _passes(job, args, setting):
        with torch.no_grad() if step == "fwd" else nullcontext():
            if written is not None:
                found[step] = measure_host(fn, setting.device)
    return found


def _written_out(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A gradient that is a view (of a transpose, in torch) has moved no bytes yet; make it contiguous."""
    return [g.contiguous() for g in grads]


def peak_bytes(fn: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of a call above the memory in use before it; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    fn()
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """torch.compile without the state of other cases: after 8 shapes of one function it falls back to eager.

    Its backward must not donate saved buffers, because timing it alone runs it many times over one graph.
    """
    from torch._functorch import config

    torch.compiler.reset()
    with config.patch(donated_buffer=False):
        yield


def _passes(job: Job, args: dict[str, Any], setting: Setting) -> Iterator[tuple[str, Callable[[], object], int | None]]:
    """(pass, call, bytes it writes) for each pass; the bytes are None for a yardstick."""
    spec, run = job.spec, job.implementation.run
    leaves = [args[g].requires_grad_() for g in spec.grads if args[g] is not None]
    out = run(**args)
    if out is None:
        yield "fwd+bwd" if leaves else "fwd", lambda: run(**args), None
        return
    names = [o.name for o in spec.sig.outputs]
    # a peer may leave out the last outputs, as SDPA does lse
    outputs = dict(zip(names, out if isinstance(out, (tuple, list)) else (out,), strict=False))
    written = sum(t.nbytes for t in outputs.values())
    yield "fwd", lambda: run(**args), written
    if not leaves:
        return
    flows = [outputs[n] for n in spec.differentiable]
    streams = BenchStreams(spec.name, job.case.name, dtype=setting.dtype, device=setting.device)
    douts = [  # the gradient of a scalar loss is 1, as in `loss.backward()`
        torch.ones_like(y) if y.ndim == 0 else streams.normal(f"d{n}", *y.shape).to(y.dtype)
        for n, y in zip(spec.differentiable, flows, strict=True)
    ]
    gradients = sum(leaf.nbytes for leaf in leaves)

    def backward() -> object:
        return _written_out(torch.autograd.grad(flows, leaves, douts, retain_graph=True))

    backward()  # torch.compile compiles it now, before the timing
    yield "bwd", backward, gradients
    flows, outputs, out = [], {}, None  # frees the graph: `fwd+bwd` may need its memory

    def both() -> object:
        out = run(**args)
        made = dict(zip(names, out if isinstance(out, (tuple, list)) else (out,), strict=False))
        return _written_out(torch.autograd.grad([made[n] for n in spec.differentiable], leaves, douts))

    yield "fwd+bwd", both, written + gradients


def rows_of(points: Sequence[Point], ceilings: Ceilings, setting: Setting) -> list[dict[str, Any]]:
    """The points as rows of the results, compared with the ceilings. All values are JSON; names have units."""
    return [_row(p, ceilings, setting) for p in points]


def _row(p: Point, ceilings: Ceilings, setting: Setting) -> dict[str, Any]:
    spec, case, who, t = p.job.spec, p.job.case, p.job.implementation, p.timing
    original = next(c for c in spec.cases if c.name == case.name)
    row: dict[str, Any] = {
        "op": spec.name,
        "case": case.name,
        "shape": p.shape,
        "dims": dict(p.dims),
        "shrunk": case.params != original.params,
        "dtype": next(k for k, v in DTYPES.items() if v == setting.dtype),
        "device": str(setting.device),
        "pass": p.step,
        "backend": who.name if who.backend else None,
        "peer": None if who.backend else who.name,
        "yardstick": p.cost is None,
        "median_s": t.median_s if t else None,
        "low_s": t.low_s if t else None,
        "high_s": t.high_s if t else None,
        "samples": t.samples if t else 0,
        "host_s": p.host_s,
        "peak_bytes": p.peak_bytes,
        "error": p.error,
        "bytes": p.cost.bytes if p.cost else None,
        "flops": p.cost.flops if p.cost else None,
    }
    return row | _judge(p, ceilings, setting) | {"quick": setting.quick, "ceilings": asdict(ceilings)}


def _judge(p: Point, ceilings: Ceilings, setting: Setting) -> dict[str, Any]:
    """Rate, fraction of the ceiling that bounds the pass, and whether the result is plausible.

    The bytes are compulsory for every implementation, the FLOPs are not: a peer may save what our backward recomputes,
    or compute in one pass what we compute in the other. FLOPs can therefore make only a bagu backend a fault, and a
    peer gets a FLOP rate only over both passes together.
    """
    judged: dict[str, Any] = dict.fromkeys(("bound", "gb_per_s", "tflop_per_s", "ceiling", "share")) | {"fault": False}
    if p.cost is None:
        return judged
    # in FLOPs of the ceiling's dtype: int8 products run at twice the rate of 16-bit ones
    scaled = p.cost._replace(flops=int(p.cost.flops / p.job.spec.matmul_rate))
    least, ours = floor(scaled, ceilings), p.job.implementation.backend
    all_passes = p.step == "fwd+bwd" or not p.job.spec.grads
    judged |= {"bound": least.bound, "ceiling": least.ceiling}
    if p.timing is None:
        return judged
    seconds = p.timing.median_s
    if least.bound == "memory":
        judged |= {"gb_per_s": p.cost.bytes / seconds / 1e9, "share": least.seconds / seconds}
    elif ours or all_passes:
        judged |= {"tflop_per_s": p.cost.flops / seconds / 1e12, "share": least.seconds / seconds}
    compulsory = scaled if ours else scaled._replace(flops=0)
    cached = setting.cache_bytes if p.step == "fwd+bwd" else 0
    fault = is_fault(compulsory, written=p.written, seconds=seconds, ceilings=ceilings, cached=cached)
    return judged | {"fault": fault}
