"""The op contract. A spec says what an op means and costs; a backend says how it runs.

Everything else reads specs: `check` (conformance, drills), dispatch, the compile gate, `bench`, labs, FLOP counts.
Inputs are drawn in fp64, rounded once to the dtype under test, and that same rounded value feeds both the backend
and the fp64 reference; what is measured is the backend's arithmetic alone.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError, ConformanceError, UnknownName
from bagu.ops.launch import interpreted_sms
from bagu.ops.layouts import lay_out, raw_bytes
from bagu.ops.signature import Dims, Signature, accumulator

__all__ = ["Case", "Cost", "OpSpec", "Rule", "Streams", "check"]

Outputs = torch.Tensor | tuple[torch.Tensor, ...]


class Cost(NamedTuple):
    """Work of one call at one size: the two numbers a roofline needs. Bytes are the compulsory ones."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes


class Case:
    """One named input. `why` is the sentence printed when this case fails; `bench` marks a size worth timing.

    `mixed` names `float` arguments that stay fp32 whatever the dtype under test. `sms` is how many multiprocessors
    Triton's interpreter claims to have, where a launcher needs many to take the branch this case is for. `frozen` names
    inputs that do not require a gradient. The other keywords are the case's own parameters, read by the spec's `inputs`
    as `case["N"]`.
    """

    def __init__(
        self, name: str, why: str, *, bench: bool = False, mixed: Sequence[str] = (), frozen: Sequence[str] = (),
        sms: int | None = None, **params: Any,
    ) -> None:  # fmt: skip
        self.name, self.why, self.bench, self.params = name, why, bench, params
        self.mixed, self.frozen, self.sms = tuple(mixed), tuple(frozen), sms

    def __getitem__(self, key: str) -> Any:
        return self.params[key]

    def get(self, key: str, default: Any) -> Any:
        return self.params.get(key, default)

    def replace(self, **params: Any) -> Case:
        kept: dict[str, Any] = {"bench": self.bench, "mixed": self.mixed, "frozen": self.frozen, "sms": self.sms}
        return Case(self.name, self.why, **kept, **self.params | params)

    def __repr__(self) -> str:
        return self.name


class Streams:
    """Random tensors, one independent stream per name, so no two arguments are ever equal."""

    def __init__(self, *key: object, device: torch.device | str = "cpu") -> None:
        self.key, self.device = key, device

    def generator(self, name: str) -> torch.Generator:
        seed = zlib.crc32(repr((*self.key, name)).encode())
        return torch.Generator(device=self.device).manual_seed(seed)

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator(name), dtype=torch.float64, device=self.device)

    def uniform(self, name: str, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator(name), dtype=torch.float64, device=self.device)

    def integers(self, name: str, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator(name), device=self.device)

    def choice(self, name: str, usual: Any, *others: Any) -> Any:
        """A scalar argument. `usual` is what callers pass and what is timed; a check draws any of the values."""
        return (usual, *others)[zlib.crc32(repr((*self.key, name)).encode()) % (1 + len(others))]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Calls on a CUDA device that the automatic choice leaves to the torch backend. All but `holds` is for people."""

    when: str
    runs: str
    why: str
    holds: Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """What one op means (signature, reference), how it is exercised (cases, inputs) and what it costs.

    A backend is the module `bagu.ops.<name>.<backend>_backend` with two functions of keyword arguments:
    `forward(inputs) -> (outputs, residuals)` and, where there are gradients,
    `backward(d<output> of each differentiable output, the `saves`, the scalars) -> a gradient (or None) per `made``.
    """

    name: str
    signature: str
    reference: Callable[..., Outputs]
    torch_backend: ModuleType  # always there, and in the compiler's sight; the others are imported on first use
    inputs: Callable[[Case, Streams], dict[str, Any]]
    cost: Callable[[Mapping[str, int], int], Cost]  # of the sizes of the dims and the itemsize of the first tensor
    cases: Sequence[Case]
    ulps: float  # allowed error, in spacings of the output dtype
    independent: Sequence[str]  # dims along which results do not touch each other: what may be split over devices
    ulps_of: Mapping[str, float] = field(default_factory=dict)  # results that are allowed another number of them
    backends: Sequence[str] = ("torch", "triton")
    unsupported: Callable[[Mapping[str, Any]], str | None] | None = None  # why Triton's kernels cannot run a call
    prefer_torch: Sequence[Rule] = ()  # what the automatic choice on CUDA leaves to torch, though Triton could do it
    cost_backward: Callable[[Mapping[str, int], int], Cost] | None = None
    grads: Sequence[str] = ()  # inputs that have a gradient
    twins: Mapping[str, str] = field(default_factory=dict)  # input -> the input whose gradient is its own as well
    saves: Sequence[str] = ()  # inputs, outputs and residuals that the backward reads
    mutates: Sequence[str] = ()  # inputs that the call changes, which have no gradient; what they become is a result
    constant: Sequence[str] = ()  # outputs no gradient flows through
    derive: Callable[[Mapping[str, Any], Dims], Dims] | None = None  # dims no input has; raises where there are none
    refuse: Callable[[Mapping[str, Any], Dims], None] | None = None  # raises for what the signature cannot say
    nonempty: Sequence[str] = ()  # dims that must be 1 or more: with none of them there is nothing to compute from
    check_values: Callable[[Mapping[str, Any], Dims], None] | None = None  # raises for wrong values; in debug mode
    peers: bool = False  # the folder has peers.py: the same work by other libraries, for the benchmark
    wide_loads: bool = True  # the compile gate wants 128-bit loads in every kernel at the bench cases
    spills: Mapping[str, int] = field(default_factory=dict)  # local loads and stores that the gate allows a kernel

    def __post_init__(self) -> None:
        assert not set(self.mutates) & set(self.grads), f"{self.name}: an input that is changed has no gradient"
        _ = (
            self.sig,
            self.differentiable,
            self.made,
            self.names,
            self.first,
            self.routes,
        )  # now, since a first call under torch.compile could not parse

    @cached_property
    def sig(self) -> Signature:
        return Signature.parse(self.signature)

    @cached_property
    def differentiable(self) -> tuple[str, ...]:
        """The outputs that gradients flow through."""
        return tuple(o.name for o in self.sig.outputs if o.name not in self.constant) if self.grads else ()

    @cached_property
    def made(self) -> tuple[str, ...]:
        """The gradients a backward returns: `grads` without the twins."""
        return tuple(g for g in self.grads if g not in self.twins)

    def bind(self, args: Mapping[str, Any]) -> Dims:
        """The dims of a call, every argument checked."""
        dims = self.sig.bind(self.name, args)
        for name in self.nonempty:
            if dims[name] == 0:
                raise ArgumentError(f"{self.name}: {name} is 0, expected 1 or more", hint=self.sig.hint)
        if self.refuse is not None:
            self.refuse(args, dims)
        return dims | self.derive(args, dims) if self.derive is not None else dims

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The arguments, in the signature's order."""
        return tuple(a.name for a in self.sig.inputs)

    @cached_property
    def first(self) -> int:
        """The place of the first tensor, whose dtype and device are the call's."""
        return self.sig.inputs.index(self.sig.tensors[0])

    @cached_property
    def routes(self) -> dict[tuple[Any, ...], Any]:
        """How each kind of call runs, as dispatch found it."""
        return {}

    def empty_results(self, args: Mapping[str, Any]) -> list[torch.Tensor]:
        """Outputs and residuals of a call, of the right shapes and dtypes and with nothing in them."""
        dims = self.sig.measure(args, {s.name: args[s.name] for s in self.sig.scalars})
        dims |= self.derive(args, dims) if self.derive is not None else {}
        x, given = args[self.sig.tensors[0].name], args.get("dtype")
        return [x.new_empty(r.shape(dims), dtype=r.result_dtype(x.dtype, given)) for r in self.sig.results]

    def module(self, backend: str) -> ModuleType:
        if backend not in self.backends:
            raise UnknownName.among(f"backend of {self.name}", backend, self.backends)
        if backend == "torch":
            return self.torch_backend
        return importlib.import_module(f"bagu.ops.{self.name}.{backend}_backend")

    def cast(self, case: Case, args: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """The fp64 inputs of a case, rounded to what a call in `dtype` would receive."""
        out = dict(args)
        for arg in self.sig.tensors:
            if (value := args[arg.name]) is not None and value.is_floating_point():
                to = torch.float32 if arg.name in case.mixed else dtype
                out[arg.name] = value.to(accumulator(dtype) if arg.dtype == "acc" else to)
        return out


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """torch.empty comes back as NaN, so an output a kernel forgot to write cannot look right by luck."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def check(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    fn: Callable[..., Outputs],
    *,
    device: torch.device | str = "cpu",
    layout: str = "packed",
) -> dict[str, float]:
    """Worst error, in ulps, of each output and gradient of `fn(**inputs)`; raises where one is too large.

    Allowed: `spec.ulps` spacings of the result's dtype, plus twice what fp32 itself costs the definition at this
    case (so a cancelling sum is judged against what fp32 can do at all): the most the reference loses when run in
    fp32, on these inputs and incoming gradients, and seven times on ones that are off by half an fp32 rounding (one
    run can be lucky). An integer result is judged against the reference's unrounded value: it may be half a step away.
    Inputs must come back unchanged, but for those that `spec.mutates` names: these are compared as results are.
    `layout` is how `fn` finds its inputs and incoming gradients in memory, each with strides of its own (layouts.py).
    """
    streams = Streams(spec.name, case.name)
    rounded = spec.cast(case, spec.inputs(case, streams), dtype)
    spec.bind(rounded)
    reference = partial(_run, spec, case, spec.reference, streams=streams, layout=layout)
    want = reference(rounded, torch.float64)
    cost = [reference(rounded, torch.float32)]
    cost += [reference(rounded, torch.float32, perturbation=i) for i in range(7)]
    place = lambda v, i: lay_out(v.to(device), layout, i)  # noqa: E731
    given = _placed(rounded, place)
    with nan_filled_memory(), interpreted_sms(case.sms):
        got = _run(spec, case, fn, given, None, streams=streams, layout=layout, place=place)
    for name, fresh in _placed(rounded, place).items():
        if isinstance(fresh, torch.Tensor) and not torch.equal(raw_bytes(given[name]), raw_bytes(fresh)):
            raise ConformanceError(f"{spec.name}[{case.name}]: the call changed its input {name}")
    where = f"{spec.name}[{case.name} {case.params} {str(dtype)[6:]} {layout}]"
    return {
        name: _ulps(where, case, name, got[name], w, [c[name][0] for c in cost], spec.ulps_of.get(name, spec.ulps))
        for name, w in want.items()
    }


Place = Callable[[torch.Tensor, int], torch.Tensor]  # a tensor and its position in the call -> the same in memory


def _as_it_is(x: torch.Tensor, position: int) -> torch.Tensor:
    return x


def _placed(args: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The arguments of a call, each tensor by itself in memory."""
    return {k: place(v, i) if isinstance(v, torch.Tensor) else v for i, (k, v) in enumerate(args.items())}


def _perturbed(value: torch.Tensor, streams: Streams, name: str, perturbation: int) -> torch.Tensor:
    """The tensor in fp64, each number off by about half an fp32 rounding: what any fp32 algorithm may make of it."""
    half = torch.finfo(torch.float32).eps / 2
    return value.double() * (1 + half * streams.normal(f"{name}, perturbation {perturbation}", *value.shape))


def _run(
    spec: OpSpec,
    case: Case,
    fn: Callable[..., Outputs],
    args: Mapping[str, Any],
    dtype: torch.dtype | None,
    *,
    streams: Streams,
    layout: str,
    place: Place = _as_it_is,
    perturbation: int | None = None,
) -> dict[str, tuple[torch.Tensor, torch.dtype]]:
    """Every output and gradient of one call, each with the dtype the signature gives it; floats cast to `dtype`.

    `place` puts what is made here, mutated inputs and incoming gradients, where the call finds it. With
    a `perturbation`, a number that seeds it, inputs and incoming gradients are `_perturbed` first.
    """

    def cast(name: str, v: torch.Tensor) -> torch.Tensor:
        if not v.is_floating_point():
            return v
        v = v if perturbation is None else _perturbed(v, streams, name, perturbation)
        return v if dtype is None else v.to(dtype)

    first = args[spec.sig.tensors[0].name]
    called = {
        k: cast(k, v).detach().requires_grad_(k in spec.grads and k not in case.frozen and v.is_floating_point())
        if isinstance(v, torch.Tensor)
        else v
        for k, v in args.items()
    }
    called |= {k: place(called[k].clone(), list(args).index(k)) for k in spec.mutates}
    out = fn(**called)
    outputs = dict(zip((o.name for o in spec.sig.outputs), out if isinstance(out, tuple) else (out,), strict=True))
    given = args.get("dtype")
    results = {o.name: (outputs[o.name].detach(), o.result_dtype(first.dtype, given)) for o in spec.sig.outputs}
    for k in spec.mutates:
        if not torch.equal(raw_bytes(called[k]), raw_bytes(place(called[k].contiguous(), list(args).index(k)))):
            raise ConformanceError(f"{spec.name}: the call wrote between the elements of {k}")
        results[f"{k} afterwards"] = called[k], args[k].dtype
    leaves = [g for g in spec.grads if called[g] is not None and called[g].requires_grad]
    if leaves:
        flows = [outputs[name] for name in spec.differentiable]
        douts = [
            place(cast(f"d{n}", _gradient(streams, n, y, results[n][1], layout)).to(y), len(args) + i)
            for i, (n, y) in enumerate(zip(spec.differentiable, flows, strict=True))
        ]
        grads = torch.autograd.grad(flows, [called[g] for g in leaves], douts)
        results |= {f"d{g}": (v, args[g].dtype) for g, v in zip(leaves, grads, strict=True)}
    return results


def _gradient(streams: Streams, name: str, y: torch.Tensor, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """The gradient that comes in for the output y, rounded to `dtype`."""
    repeated = layout == "repeated" and y.ndim > 0
    shape = (1, *y.shape[1:]) if repeated else y.shape
    return streams.normal(f"d{name}", *shape).to(dtype).to(y).expand(y.shape)


def _ulps(
    where: str,
    case: Case,
    name: str,
    got_as: tuple[torch.Tensor, torch.dtype],
    want_as: tuple[torch.Tensor, torch.dtype],
    cost: Sequence[torch.Tensor],
    allowed: float,
) -> float:
    """How far one result is off, in spacings of its dtype, beyond what fp32 costs; raises if more than `allowed`."""
    (got, _), (want, dtype) = got_as, want_as
    if got.shape != want.shape or got.dtype != dtype:
        raise ConformanceError(
            f"{where}: {name} came back as {got.dtype} {list(got.shape)}, expected {dtype} {list(want.shape)}"
        )
    if not want.numel():
        return 0.0
    got, want = got.double().cpu(), want.double()
    loss = torch.stack([(c.double() - want).abs().nan_to_num(0.0, posinf=0.0) for c in cost]).amax(0)
    if dtype.is_floating_point:
        held = want.to(dtype).double()  # what the dtype can hold: past its largest value, infinity is right
        special = ~held.isfinite()
        right = torch.where(held.isnan(), got.isnan(), got == held)
        finite = torch.where(special, 0.0, want)
        spacing = torch.finfo(dtype).eps * (finite.abs() + finite.square().mean().sqrt()) + torch.finfo(dtype).tiny
        slack = 2 * torch.where(special, 0.0, loss).max()
    else:  # an integer dtype: the reference gives the unrounded value
        special, right = torch.zeros_like(want, dtype=torch.bool), torch.ones_like(want, dtype=torch.bool)
        spacing, slack, allowed = torch.ones_like(want), 2 * loss.max(), 0.5
    off = torch.where(
        special, torch.where(right, 0.0, torch.inf), (((got - want).abs() - slack).clamp(min=0) / spacing)
    )
    off = off.nan_to_num(nan=torch.inf, posinf=torch.inf)  # NaN counts as infinitely wrong
    worst = int(off.argmax())
    if not off.flatten()[worst] <= allowed:
        at = [int(i) for i in torch.unravel_index(torch.tensor(worst), off.shape)]
        raise ConformanceError(
            f"{where}: {name}{at} is {off.flatten()[worst]:.3g} ulps off (allowed {allowed:g}): "
            f"got {got.flatten()[worst]:.8g}, want {want.flatten()[worst]:.8g}",
            hint=f"this case exists because {case.why}",
        )
    return float(off.flatten()[worst])
