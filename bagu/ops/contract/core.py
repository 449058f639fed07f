"""The op contract. A spec defines an op and its cost; a backend implements it.

Everything else reads specs: `check` (conformance, drills), dispatch, the compile gate, `bench`, labs, FLOP counts.
Inputs are drawn in fp64 and rounded once to the dtype under test. Both the backend and the fp64 reference receive these
rounded values, so a check measures only the error of the backend's arithmetic.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError, ConformanceError, UnknownName
from bagu.ops.contract.layouts import lay_out, raw_bytes
from bagu.ops.contract.signature import Dims, Signature, accumulator
from bagu.ops.kernels.launch import empty_like, interpreted_sms

Outputs = torch.Tensor | tuple[torch.Tensor, ...]


class Cost(NamedTuple):
    """FLOPs and bytes of one call at one size, as a roofline needs them. `bytes` is the compulsory traffic."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes


class Case:
    """One named test case. `why` is printed when the case fails; `bench` marks a size that the benchmark times.

    `mixed` names `float` arguments that stay fp32 for every dtype under test. `sms` is the number of multiprocessors
    that Triton's interpreter reports; set it if a launcher needs many to take the branch that this case tests. `frozen`
    names inputs that do not require a gradient. The other keywords are parameters of the case; the spec's `inputs`
    reads them as `case["N"]`.
    """

    def __init__(
        self,
        name: str,
        why: str,
        *,
        bench: bool = False,
        mixed: Sequence[str] = (),
        frozen: Sequence[str] = (),
        sms: int | None = None,
        **params: Any,
    ) -> None:
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
    """Random tensors. Each name has an independent stream, so no two arguments are equal."""

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
        """A scalar argument. `usual` is what callers pass and the benchmark times; a check draws any of the values."""
        return (usual, *others)[zlib.crc32(repr((*self.key, name)).encode()) % (1 + len(others))]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """CUDA calls that the automatic choice gives to the torch backend. All fields except `holds` are documentation."""

    when: str
    runs: str
    why: str
    holds: Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """The definition of one op (signature, reference), its test cases and inputs, and its cost.

    A backend is the module `bagu.ops.<name>.<backend>_backend` with two functions that take keyword arguments:
    `forward(inputs) -> (outputs, residuals)` and, if the op has gradients,
    `backward(d<output> of each differentiable output, the `saves`, the scalars) -> a gradient (or None) per `made``.
    In an op with `args`, the inputs are one argument, a record of that class: `forward(args)`, `reference(args)`,
    `backward(args, d<output>…, <saved result>…)`. A backward finds the saved inputs and the scalars in it; the other
    inputs are None there.
    """

    name: str
    signature: str
    reference: Callable[..., Outputs]
    inputs: Callable[[Case, Streams], dict[str, Any]]
    cost: Callable[[Mapping[str, int], int], Cost]  # takes the sizes of the dims and the itemsize of the first tensor
    cases: Sequence[Case]
    ulps: float  # allowed error, in spacings of the output dtype
    independent: Sequence[str]  # dims along which results are independent, so they can be sharded over devices
    ulps_of: Mapping[str, float] = field(default_factory=dict)  # results with a different `ulps`
    torch_cpu_ulps_of: Mapping[str, float] = field(default_factory=dict)  # results less exact in PyTorch's CPU kernels
    args: Callable[..., tuple[Any, ...]] | None = None  # the inputs as a NamedTuple, in the signature's order
    backends: Sequence[str] = ("torch", "triton")
    unsupported: Callable[[Mapping[str, Any]], str | None] | None = None  # the reason Triton cannot run a call
    prefer_torch: Sequence[Rule] = ()  # supported CUDA calls that default to torch
    cost_backward: Callable[[Mapping[str, int], int], Cost] | None = None
    grads: Sequence[str] = ()  # inputs that have a gradient
    twins: Mapping[str, str] = field(default_factory=dict)  # input -> the input with the same gradient
    saves: Sequence[str] = ()  # inputs, outputs and residuals that the backward reads
    mutates: Sequence[str] = ()  # inputs modified in place; they have no gradient, and checks compare them as results
    constant: Sequence[str] = ()  # outputs without a gradient
    like_first: Sequence[str] = ()  # results and gradients with channels last in memory if the first tensor has them so
    derive: Callable[[Mapping[str, Any], Dims], Dims] | None = None  # computes dims that no input has, or raises
    refuse: Callable[[Mapping[str, Any], Dims], None] | None = None  # raises for what the signature cannot express
    nonempty: Sequence[str] = ()  # dims that must be at least 1
    check_values: Callable[[Mapping[str, Any], Dims], None] | None = None  # raises for invalid values (debug mode only)
    composed: bool = False  # the torch backend's `invariant_forward` calls other ops, so it runs on a GPU too
    matmul_rate: float = 1.0  # peak rate of its products as a multiple of 16-bit ones (int8: 2)
    peers: bool = False  # the folder has peers.py: implementations of other libraries for the benchmark
    wide_loads: bool = True  # the compile gate requires 128-bit loads in every kernel at the bench cases
    spills: Mapping[str, int] = field(default_factory=dict)  # local loads and stores the gate allows, by kernel

    def __post_init__(self) -> None:
        assert not set(self.mutates) & set(self.grads), f"{self.name}: an input that is changed has no gradient"
        assert self.args is None or getattr(self.args, "_fields", ()) == self.names, f"{self.name}: Args and signature"
        # parse now: a first call under torch.compile could not
        _ = (self.sig, self.differentiable, self.made, self.names, self.first, self.routes)

    @cached_property
    def sig(self) -> Signature:
        return Signature.parse(self.signature)

    @cached_property
    def torch_backend(self) -> ModuleType:
        """Loaded before the compiler traces a call (`dispatch.load`)."""
        return importlib.import_module(f"bagu.ops.{self.name}.torch_backend")

    def apply(self, fn: Callable[..., Any], given: Mapping[str, Any], /, **options: Any) -> Any:
        """Call one of the op's functions (its reference, a forward or backward, a peer) with arguments by name."""
        if self.args is None:
            return fn(**given, **options)
        rest = {name: value for name, value in given.items() if name not in self.names}
        return fn(self.args(*[given.get(name) for name in self.names]), **rest, **options)

    def by_name(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """One of the op's functions as a function of keyword arguments, as the public function is."""
        return fn if self.args is None else lambda **given: self.apply(fn, given)

    @cached_property
    def differentiable(self) -> tuple[str, ...]:
        """The outputs that have a gradient."""
        return tuple(o.name for o in self.sig.outputs if o.name not in self.constant) if self.grads else ()

    @cached_property
    def made(self) -> tuple[str, ...]:
        """The inputs whose gradients a backward returns: `grads` without the twins."""
        return tuple(g for g in self.grads if g not in self.twins)

    def bind(self, args: Mapping[str, Any]) -> Dims:
        """Check every argument of a call and return its dims."""
        dims = self.sig.bind(self.name, args)
        for name in self.nonempty:
            if dims[name] == 0:
                raise ArgumentError(f"{self.name}: {name} is 0, expected 1 or more", hint=self.sig.hint)
        if self.refuse is not None:
            self.refuse(args, dims)
        return dims | self.derive(args, dims) if self.derive is not None else dims

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments, in the signature's order."""
        return tuple(a.name for a in self.sig.inputs)

    @cached_property
    def first(self) -> int:
        """The index of the first tensor, which sets the dtype and device of the call."""
        return self.sig.inputs.index(self.sig.tensors[0])

    @cached_property
    def routes(self) -> dict[tuple[Any, ...], Any]:
        """Cache of dispatch: the route for each kind of call."""
        return {}

    def allowed_ulps(self, result: str, backend: str, device: torch.device) -> float:
        most = self.ulps_of.get(result, self.ulps)
        torch_on_cpu = backend == "torch" and device.type == "cpu"
        return self.torch_cpu_ulps_of.get(result, most) if torch_on_cpu else most

    def empty_results(self, args: Mapping[str, Any]) -> list[torch.Tensor]:
        """Uninitialized outputs and residuals of a call, with the right shapes and dtypes."""
        dims = self.sig.measure(args, {s.name: args[s.name] for s in self.sig.scalars})
        dims |= self.derive(args, dims) if self.derive is not None else {}
        x, given = args[self.sig.tensors[0].name], args.get("dtype")
        return [
            empty_like(x)
            if r.name in self.like_first
            else x.new_empty(r.shape(dims), dtype=r.result_dtype(x.dtype, given))
            for r in self.sig.results
        ]

    def module(self, backend: str) -> ModuleType:
        if backend not in self.backends:
            raise UnknownName.among(f"backend of {self.name}", backend, self.backends)
        if backend == "torch":
            return self.torch_backend
        return importlib.import_module(f"bagu.ops.{self.name}.{backend}_backend")

    def cast(self, case: Case, args: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """Round the fp64 inputs of a case to the dtypes that a call in `dtype` receives."""
        out = dict(args)
        for arg in self.sig.tensors:
            value = args[arg.name]
            if value is not None and value.is_floating_point() and value.itemsize > 1:  # fp8 is drawn as such
                to = torch.float32 if arg.name in case.mixed else dtype
                out[arg.name] = value.to(accumulator(dtype) if arg.dtype == "acc" else to)
        return out


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Make torch.empty return NaN inside, so that an output which a kernel does not write fails the comparison."""
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
    backend: str,
    device: torch.device | str = "cpu",
    layout: str = "packed",
) -> dict[str, float]:
    """Return the largest error, in ulps, of each output and gradient of `fn(**inputs)`; raise if one is too large.

    `backend` is the one that `fn` runs. The tolerance is `spec.allowed_ulps` spacings of the result's dtype plus twice
    the fp32 error of the reference at this case, so that a sum with cancellation is held only to what fp32 can reach.
    The fp32 error is the largest of eight runs of the reference in fp32: one on these inputs and incoming gradients,
    and seven on copies perturbed by half an fp32 rounding (a single run can be lucky). They run only if a result
    differs by more than these spacings alone; its error is then what remains beyond twice the fp32 error. An integer
    result is compared with the reference's unrounded value and may differ by 0.5. Inputs must stay unchanged, except
    those in `spec.mutates`, which are compared as results. `layout` is the memory layout of inputs and incoming
    gradients; each tensor has its own strides (layouts.py).
    """
    streams = Streams(spec.name, case.name)
    rounded = spec.cast(case, spec.inputs(case, streams), dtype)
    spec.bind(rounded)
    reference = partial(_run, spec, case, spec.by_name(spec.reference), streams=streams, layout=layout)
    want = reference(rounded, torch.float64)

    @cache
    def in_fp32() -> list[dict[str, Result]]:
        return [reference(rounded, torch.float32, perturbation=i) for i in (None, *range(7))]

    place = lambda v, i: lay_out(v.to(device), layout, i)  # noqa: E731
    given = _placed(rounded, place)
    with nan_filled_memory(), interpreted_sms(case.sms):
        got = _run(spec, case, fn, given, None, streams=streams, layout=layout, place=place)
    for name, fresh in _placed(rounded, place).items():
        if isinstance(fresh, torch.Tensor) and not torch.equal(raw_bytes(given[name]), raw_bytes(fresh)):
            raise ConformanceError(f"{spec.name}[{case.name}]: the call changed its input {name}")
    where = f"{spec.name}[{case.name} {case.params} {str(dtype)[6:]} {layout}]"
    allowed = partial(spec.allowed_ulps, backend=backend, device=torch.device(device))
    return {name: _ulps(where, case, name, got[name], w, in_fp32, allowed(name)) for name, w in want.items()}


Result = tuple[torch.Tensor, torch.dtype]  # a result of a run, and its dtype by the signature
Place = Callable[[torch.Tensor, int], torch.Tensor]  # (tensor, position in the call) -> copy in another layout


def _as_it_is(x: torch.Tensor, position: int) -> torch.Tensor:
    return x


def _placed(args: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The arguments of a call, with `place` applied to each tensor."""
    return {k: place(v, i) if isinstance(v, torch.Tensor) else v for i, (k, v) in enumerate(args.items())}


def _perturbed(value: torch.Tensor, streams: Streams, name: str, perturbation: int) -> torch.Tensor:
    """The tensor in fp64, each value perturbed by about half an fp32 rounding, as any fp32 algorithm may do."""
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
) -> dict[str, Result]:
    """Run one call with floats cast to `dtype`; return every output and gradient with its dtype by the signature.

    `place` lays out the tensors that this function creates: mutated inputs and incoming gradients. If `perturbation` is
    set, it seeds the noise that `_perturbed` adds to inputs and incoming gradients.
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
    mutated = [k for k in spec.mutates if args[k] is not None]
    called |= {k: place(called[k].clone(), list(args).index(k)) for k in mutated}
    out = fn(**called)
    outputs = dict(zip((o.name for o in spec.sig.outputs), out if isinstance(out, tuple) else (out,), strict=True))
    given = args.get("dtype")
    results = {o.name: (outputs[o.name].detach(), o.result_dtype(first.dtype, given)) for o in spec.sig.outputs}
    for k in mutated:
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
    """The incoming gradient of the output y, rounded to `dtype`."""
    repeated = layout == "repeated" and y.ndim > 0
    shape = (1, *y.shape[1:]) if repeated else y.shape
    return streams.normal(f"d{name}", *shape).to(dtype).to(y).expand(y.shape)


def _ulps(
    where: str,
    case: Case,
    name: str,
    got_as: Result,
    want_as: Result,
    in_fp32: Callable[[], Sequence[Mapping[str, Result]]],
    allowed: float,
) -> float:
    """The error of one result, in spacings of its dtype; beyond `allowed`, less twice the reference's error in fp32."""
    (got, _), (want, dtype) = got_as, want_as
    if got.shape != want.shape or got.dtype != dtype:
        raise ConformanceError(
            f"{where}: {name} came back as {got.dtype} {list(got.shape)}, expected {dtype} {list(want.shape)}"
        )
    if not want.numel():
        return 0.0
    got, want = got.double().cpu(), want.double()
    if dtype.is_floating_point:
        held = want.to(dtype).double()  # rounded to the dtype: beyond its largest value, infinity is correct
        special = ~held.isfinite()
        right = torch.where(held.isnan(), got.isnan(), got == held)
        finite = torch.where(special, 0.0, want)
        spacing = torch.finfo(dtype).eps * (finite.abs() + finite.square().mean().sqrt()) + torch.finfo(dtype).tiny
    else:  # an integer dtype: the reference gives the unrounded value
        special, right = torch.zeros_like(want, dtype=torch.bool), torch.ones_like(want, dtype=torch.bool)
        spacing, allowed = torch.ones_like(want), 0.5

    def errors(slack: torch.Tensor | float) -> torch.Tensor:
        finite = ((got - want).abs() - slack).clamp(min=0) / spacing
        off = torch.where(special, torch.where(right, 0.0, torch.inf), finite)
        return off.nan_to_num(nan=torch.inf, posinf=torch.inf)  # NaN counts as infinitely wrong

    off = errors(0.0)
    if off.max() > allowed:
        loss = [(run[name][0].double().cpu() - want).abs().nan_to_num(0.0, posinf=0.0) for run in in_fp32()]
        off = errors(2 * torch.where(special, 0.0, torch.stack(loss).amax(0)).max())
    worst = int(off.argmax())
    if not off.flatten()[worst] <= allowed:
        at = [int(i) for i in torch.unravel_index(torch.tensor(worst), off.shape)]
        raise ConformanceError(
            f"{where}: {name}{at} is {off.flatten()[worst]:.3g} ulps off (allowed {allowed:g}): "
            f"got {got.flatten()[worst]:.8g}, want {want.flatten()[worst]:.8g}",
            hint=f"this case exists because {case.why}",
        )
    return float(off.flatten()[worst])
