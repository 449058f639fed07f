"""Every backend of every op against its fp64 reference: all cases at the default tuning, all tunings at one case. `make
test` has one dtype of each case of Triton and of every second one of torch, `make test-full` and a GPU have them all.

On a CPU the Triton backends run through the interpreter, where bf16 is garbage (triton-lang/triton#4972), in fp32 and
fp16; on a GPU they are compiled and run in every dtype.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from bagu.errors import ConformanceError
from bagu.ops.call.dispatch import call, load_op
from bagu.ops.call.node import paired
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import OpSpec, Streams, _run, check
from bagu.ops.contract.layouts import lay_out
from tests.ops.points import DEVICE, GPU, Point, first_points, looked_through, other_points, points, tunings
from tests.ops.reaching import launched

POINTS = [
    pytest.param(s, b, p, id=f"{s.name}-{b}-{p}", marks=() if GPU or p in first else pytest.mark.slow)
    for s in SPECS.values() for b in s.backends for first in [first_points(s, b)[:: 1 if b == "triton" else 2]]
    for p in points(s, b)
]  # fmt: skip
TUNED = [
    pytest.param(s, b, f, id=f"{s.name}-{b}-{f}")
    for s in SPECS.values() for b in s.backends for f in getattr(s.module(b), "TUNABLE", {})
]  # fmt: skip
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # of opcheck
BACKENDS = [pytest.param(s, b, id=f"{s.name}-{b}") for s in SPECS.values() for b in s.backends]
PAIRS = [
    pytest.param(s, f, b, id=f"{s.name}-{f}-{b}")
    for s in SPECS.values() if s.grads for f in s.backends for b in s.backends
]  # fmt: skip


@pytest.mark.parametrize("spec, backend, point", POINTS)
def test_conformance(spec: OpSpec, backend: str, point: Point) -> None:
    if (backend, point.dtype) == ("torch", torch.float16):
        run = looked_through(spec, spec.torch_backend)
    else:
        run = lambda **args: call(spec, backend, **args)  # noqa: E731
    check(spec, point.case, point.dtype, run, backend=backend, device=DEVICE, layout=point.layout)


@pytest.mark.parametrize("spec, backend, function", TUNED)
def test_every_tuning(spec: OpSpec, backend: str, function: str) -> None:
    """In the interpreter, tunings with the same launches compute the same: warps and stages change nothing there."""
    module, seen = spec.module(backend), []
    for tuning in (t for f, t in tunings(spec, backend) if f == function):
        tuned = partial(getattr(module, function), **tuning)
        forward = tuned if function == "forward" else module.forward
        backward = tuned if function == "backward" else getattr(module, "backward", None)
        for case in (spec.cases[1], *(c for c in spec.cases if c.name == "unaligned")):
            launches = None if GPU else launched(spec, Point(case, torch.float16, "packed"), forward, backward)
            if GPU or launches not in seen:
                seen.append(launches)
                try:
                    run = paired(spec, forward, backward)
                    check(spec, case, torch.float16, run, backend=backend, device=DEVICE)
                except ConformanceError as error:
                    error.add_note(f"{function} with {tuning}")
                    raise


@pytest.mark.parametrize("spec, forward, backward", PAIRS)
def test_a_forward_goes_with_any_backward(spec: OpSpec, forward: str, backward: str) -> None:
    fn = paired(spec, spec.module(forward).forward, spec.module(backward).backward)
    check(spec, spec.cases[1], torch.float32, fn, backend=forward, device=DEVICE)


def arguments(spec: OpSpec, dtype: torch.dtype, device: str = DEVICE) -> dict[str, Any]:
    """The first case's inputs, ready for a call; those with gradients ask for them."""
    args = spec.cast(spec.cases[0], spec.inputs(spec.cases[0], Streams(spec.name)), dtype)
    return {
        k: v.to(device).requires_grad_(k in spec.grads) if isinstance(v, torch.Tensor) else v for k, v in args.items()
    }


def tensors(out: Any) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("spec, backend", [p for p in BACKENDS if p.values[0].grads])
def test_gradcheck_in_fp64(spec: OpSpec, backend: str) -> None:
    args = arguments(spec, torch.float64)
    leaves = {k: v for k, v in args.items() if k in spec.grads and v is not None}
    names = [o.name for o in spec.sig.outputs]

    def fn(*values: torch.Tensor) -> list[torch.Tensor]:
        out = tensors(call(spec, backend, **args | dict(zip(leaves, values, strict=True))))
        return [y for n, y in zip(names, out, strict=True) if n in spec.differentiable]

    assert torch.autograd.gradcheck(fn, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("spec, backend", BACKENDS)
def test_fp64_results_are_computed_in_fp64(spec: OpSpec, backend: str) -> None:
    """gradcheck allows a backward in fp32. Triton passes scalars in fp32: those of a test have few bits, so that 1 less
    a scalar is exact too."""
    case, streams = spec.cases[0], Streams(spec.name, spec.cases[0].name)
    args = spec.cast(case, spec.inputs(case, streams), torch.float64)
    args = {k: torch.tensor(v).bfloat16().item() if isinstance(v, float) else v for k, v in args.items()}
    given = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    if backend == "triton" and spec.unsupported is not None and (lack := spec.unsupported(given)):
        pytest.skip(lack)
    run = partial(_run, spec, case, streams=streams, layout="packed")
    want = run(lambda **a: spec.apply(spec.reference, a), args, torch.float64)
    got = run(lambda **a: call(spec, backend, **a), given, None)
    for name, (value, dtype) in want.items():
        if dtype == torch.float64:
            size = value.abs() + value.square().mean().sqrt()
            off = ((got[name][0].cpu() - value).abs() / size).nan_to_num()
            assert off.max() < 1e-8, f"{name} is {off.max():.1e} off"


# For the compiler a Triton backend is one custom op, by the same code for each, and a torch backend is torch's own.
# Here are some that differ in their kinds of arguments and results; `make test-full` has all.
GRAPHED = {"attention", "linear_cross_entropy_loss", "lora_add", "paged_attention", "rms_norm", "sample", "swiglu"}
COMPILED = [
    p if GPU or p.values[0].name in GRAPHED
    else pytest.param(*p.values, id=p.id, marks=pytest.mark.slow)
    for p in BACKENDS
]  # fmt: skip


COMPILED_OR_LAID_OUT = [p if q.values[0].like_first else q for p, q in zip(BACKENDS, COMPILED, strict=True)]


@pytest.mark.parametrize("spec, backend", COMPILED)
def test_compiles_as_one_graph_with_the_same_result(spec: OpSpec, backend: str) -> None:
    args = arguments(spec, torch.float32)
    eager = tensors(call(spec, backend, **args))
    torch._dynamo.reset()
    fn = torch.compile(lambda a: call(spec, backend, **a), fullgraph=True, backend="aot_eager")
    for y, z in zip(eager, tensors(fn(args)), strict=True):
        torch.testing.assert_close(y, z, equal_nan=True)
    if spec.grads:
        leaves = [args[g] for g in spec.grads if args[g] is not None]
        flows = [n in spec.differentiable for n in (o.name for o in spec.sig.outputs)]
        total = lambda out: sum(y.sum() for y, f in zip(tensors(out), flows, strict=True) if f)  # noqa: E731
        want = torch.autograd.grad(total(call(spec, backend, **args)), leaves)
        got = torch.autograd.grad(total(fn(args)), leaves)
        for w, g in zip(want, got, strict=True):
            torch.testing.assert_close(g, w)


@pytest.mark.parametrize("spec, backend", [p for p in COMPILED_OR_LAID_OUT if p.values[1] != "torch"])
def test_opcheck(spec: OpSpec, backend: str) -> None:
    load_op(spec.name, backend)
    args = arguments(spec, torch.float32)
    op = getattr(torch.ops.bagu, f"{spec.name}_{backend}")
    eight_bits = any(isinstance(v, torch.Tensor) and v.dtype == torch.float8_e4m3fn for v in args.values())
    checks = CHECKS[1:] if eight_bits else CHECKS  # the check of the schema multiplies its inputs: fp8 has no product
    torch.library.opcheck(op, tuple(args[a.name] for a in spec.sig.inputs), test_utils=checks)
    if spec.like_first:  # results are laid out as the first tensor is, and the fake ones too
        first = spec.names[spec.first]
        args[first] = lay_out(args[first].detach(), "channels_last", 0).requires_grad_(first in spec.grads)
        torch.library.opcheck(op, tuple(args[a.name] for a in spec.sig.inputs), test_utils=checks)
        assert op(*(args[a.name] for a in spec.sig.inputs))[0].stride() == args[first].stride()


@pytest.mark.parametrize("spec, backend", BACKENDS)
def test_inputs_and_gradients_may_have_any_layout(spec: OpSpec, backend: str) -> None:
    """Layouts without unit stride, with heads before tokens, with a negation pending, with a gradient of stride 0."""
    for case, dtype, layout in other_points(spec):
        run = lambda **args: call(spec, backend, **args)  # noqa: E731
        check(spec, case, dtype, run, backend=backend, device=DEVICE, layout=layout)
