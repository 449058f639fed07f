"""What a call does besides the math: errors before any launch, dispatch, empty tensors, DTensor, huge tensors."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import bagu.ops
from bagu.errors import ArgumentError, BackendError, BaguError, UnknownName
from bagu.ops.call import dispatch
from bagu.ops.call.dispatch import call
from bagu.ops.call.eager import constant
from bagu.ops.catalogue import SPECS, spec
from bagu.ops.contract.core import OpSpec, Streams, nan_filled_memory

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ALL = [pytest.param(s, id=s.name) for s in SPECS.values()]
BACKENDS = [pytest.param(s, b, id=f"{s.name}-{b}") for s in SPECS.values() for b in s.backends]


def arguments(spec: OpSpec, device: str = DEVICE) -> dict[str, Any]:
    args = spec.cast(spec.cases[0], spec.inputs(spec.cases[0], Streams(spec.name)), torch.float32)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def refuse(spec: OpSpec, args: dict[str, Any], name: str, *said: str) -> None:
    """The call must fail before any launch, naming the argument, what came and the signature."""
    with pytest.raises(ArgumentError) as error:
        call(spec, "torch", **args)
    text = str(error.value)
    assert f"{spec.name}: {name} " in text and all(s in text for s in said), text
    assert error.value.hint


@pytest.mark.parametrize("spec", ALL)
def test_a_wrong_rank_shape_dtype_or_kind_is_named(spec: OpSpec) -> None:
    args = arguments(spec)
    for arg in (a for a in spec.sig.tensors if args[a.name] is not None):
        value = args[arg.name]
        refuse(spec, args | {arg.name: 3.0}, arg.name, "float", str(arg))
        if not any(factor == 0 for factor, _ in arg.dims):
            refuse(spec, args | {arg.name: value[None]}, arg.name, str([1, *value.shape]), str(arg))
        if arg.dtype != "any":
            wrong = torch.complex64 if arg.dtype in ("", "float") else torch.float64
            if value.dtype != wrong:
                refuse(spec, args | {arg.name: value.to(wrong)}, arg.name, str(wrong), "expected")
    for scalar in spec.sig.scalars:
        refuse(spec, args | {scalar.name: [1, 2]}, scalar.name, "[1, 2]", scalar.kind)


@pytest.mark.parametrize("spec", ALL)
def test_a_function_given_another_kind_of_thing_names_the_argument(spec: OpSpec) -> None:
    """The functions that users call check ranges of their own before the signature is checked."""
    fn, args = getattr(bagu.ops, spec.name), arguments(spec)
    taken = inspect.signature(fn).parameters
    known = {k: v for k, v in args.items() if k in taken}
    names = taken.keys() & {a.name for a in (*spec.sig.tensors, *spec.sig.scalars)}
    assert spec.sig.tensors[0].name in names
    for name in names:
        with pytest.raises(BaguError, match=name):
            fn(**known | {name: [1.0, 2.0]})


@pytest.mark.parametrize("spec", ALL)
def test_tensors_on_two_devices_are_refused(spec: OpSpec) -> None:
    """Of an op with one tensor there is nothing to refuse."""
    args = arguments(spec)
    first, *others = [a.name for a in spec.sig.tensors if args[a.name] is not None]
    if not others:
        call(spec, "torch", **args | {first: args[first].to("meta")})  # the op is where its tensor is
    for name in others:
        refuse(spec, args | {name: args[name].to("meta")}, name, "meta", DEVICE)


def test_a_shape_error_says_what_was_bound() -> None:
    with pytest.raises(ArgumentError, match=r"w has shape \[9\], expected w\[N\]: float with N = 8"):
        bagu.ops.rms_norm(torch.ones(4, 8), torch.ones(9))
    with pytest.raises(ArgumentError, match=r"g has shape \[2\], expected g\[1\]: float"):
        bagu.ops.scale_norm(torch.zeros(2, 3), torch.zeros(2))


@pytest.mark.parametrize("spec, backend", BACKENDS)
def test_empty_tensors_give_empty_results(spec: OpSpec, backend: str) -> None:
    """Leading dims become (0,), or the tokens T or rows become none; gradients exist and are empty or zero."""
    args = arguments(spec)
    if not any(factor == 0 for arg in spec.sig.tensors for factor, _ in arg.dims):  # packed tokens and where they end
        names = {name for arg in spec.sig.tensors for _, name in arg.dims}
        tokens = "T" if "T" in names else spec.sig.tensors[0].dims[0][1]
        for arg in spec.sig.tensors:
            if (given := args[arg.name]) is not None:
                shape = [0 if name == tokens else n for n, (_, name) in zip(given.shape, arg.dims, strict=True)]
                args[arg.name] = given.new_full(shape, 1 if given.is_floating_point() else 0)
    for arg in spec.sig.tensors:
        groups = [i for i, (factor, _) in enumerate(arg.dims) if factor == 0]
        if args[arg.name] is not None and groups:
            singles = len(arg.dims) - 1
            spread = args[arg.name].ndim - singles
            shape = list(args[arg.name].shape)
            shape[groups[0] : groups[0] + spread] = [0] * max(spread, 1)
            args[arg.name] = args[arg.name].new_empty(shape)
    leaves = [args[g].requires_grad_() for g in spec.grads if args[g] is not None]
    out = call(spec, backend, **args)
    outputs = out if isinstance(out, tuple) else (out,)
    assert all(y.float().isfinite().all() for y in outputs if y.is_floating_point())
    flows = [y for y, o in zip(outputs, spec.sig.outputs, strict=True) if o.name in spec.differentiable]
    if leaves:
        for g in torch.autograd.grad(sum(y.sum() for y in flows), leaves):
            assert not g.any()


@pytest.mark.parametrize("spec, backend", BACKENDS)
def test_any_empty_dim_gives_a_result_or_a_sentence(spec: OpSpec, backend: str) -> None:
    """Each dim in turn is 0 in every tensor that has it."""
    for dim in {name for arg in spec.sig.tensors for factor, name in arg.dims if factor and name}:
        args = arguments(spec)
        for arg in spec.sig.tensors:
            if args[arg.name] is not None:
                known = spec.sig.measure({arg.name: args[arg.name]}, args) | {dim: 0}
                shape = arg.shape(known)
                args[arg.name] = args[arg.name] if shape == args[arg.name].shape else args[arg.name].new_zeros(shape)
        wanted = [args[g].requires_grad_() for g in spec.grads if args[g] is not None]
        with nan_filled_memory():
            try:
                out = call(spec, backend, **args)
            except ArgumentError:
                continue
            outputs = zip(pytree.tree_leaves(out), spec.sig.outputs, strict=True)
            flows = [y for y, o in outputs if o.name in spec.differentiable]
            total = sum((y.sum() for y in flows), torch.zeros((), device=DEVICE))
            grads = torch.autograd.grad(total, wanted, allow_unused=True) if wanted else ()
        assert all(g is None or not g.isnan().any() for g in grads)


@pytest.mark.parametrize("spec", [p for p in ALL if p.id != "fp8_matmul"])  # torch has no such tensors of fp8
def test_sparse_and_nested_tensors_are_refused(spec: OpSpec) -> None:
    args, name = arguments(spec), spec.sig.tensors[0].name
    call(spec, "torch", **{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in args.items()})  # and cached
    refuse(spec, args | {name: args[name].to_sparse()}, name, "is a sparse tensor")
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([args[name], args[name]], layout=layout)
        refuse(spec, args | {name: nested}, name, "is a nested tensor")


FIXED = [s for s in SPECS.values() if any(all(f for f, _ in a.dims) for a in s.sig.tensors)]


@pytest.mark.parametrize(  # the same code runs for all: `make test` has some of the ops, `make test-full` all
    "spec, dynamic",
    [
        pytest.param(s, d, id=f"{s.name}-{d}", marks=pytest.mark.slow if i % (4 if d else 8) else ())
        for d in (True, False) for i, s in enumerate(FIXED)
    ],
)  # fmt: skip
def test_a_wrong_shape_under_compile_says_its_sentence(spec: OpSpec, dynamic: bool) -> None:
    args = arguments(spec)
    arg = next(a for a in reversed(spec.sig.tensors) if args[a.name] is not None and all(f for f, _ in a.dims))
    torch._dynamo.reset()
    fn = torch.compile(lambda a: call(spec, "torch", **a), fullgraph=True, backend="eager", dynamic=dynamic)
    with pytest.raises(Exception, match=rf"{spec.name}: {arg.name} has shape \["):
        fn(args | {arg.name: args[arg.name][None]})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_transpose_moves_fp8(dtype: torch.dtype, backend: str) -> None:
    x = torch.randn(5, 7, device=DEVICE).to(dtype)
    y = bagu.ops.transpose(x, 0, 1, backend=backend)
    assert y.dtype == dtype and torch.equal(y.view(torch.uint8), x.view(torch.uint8).T)


def test_kv_write_does_not_make_its_cache_require_grad() -> None:
    cache, x = torch.zeros(2, 4, 1, 3, device=DEVICE), torch.ones(2, 1, 3, device=DEVICE, requires_grad=True)
    for pool in (cache, cache.transpose(1, 2).contiguous().transpose(1, 2)):
        bagu.ops.kv_write(pool, x, torch.tensor([1, 6], device=DEVICE))
        assert not pool.requires_grad and pool.sum() == 6


def test_unknown_names_suggest_the_nearest() -> None:
    x, w = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(UnknownName) as error:
        bagu.ops.rms_norm(x, w, backend="trition")
    assert "triton" in error.value.hint
    with pytest.raises(UnknownName) as error:
        bagu.ops.use("tourch")
    assert "torch" in error.value.hint
    with pytest.raises(UnknownName) as error:
        spec("rmsnorm")
    assert "rms_norm" in error.value.hint


def test_compiled_code_follows_use() -> None:
    """torch.compile guards on what `use` asks for, so the same compiled function runs either backend."""
    x, w = torch.randn(4, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    seen: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append("triton" if "rms_norm_triton" in graph.code else "torch")
        return graph

    torch._dynamo.reset()
    fn = torch.compile(lambda: bagu.ops.rms_norm(x, w), fullgraph=True, backend=record)
    for backend in ("torch", "triton", "torch"):
        with bagu.ops.use(backend):
            fn()
    assert seen == ["torch", "triton"]


def test_deterministic_mode_is_chosen_for_anew() -> None:
    """Attention leaves cuDNN in deterministic mode: a route that was found outside of it does not hold inside."""
    spec, x, w = SPECS["rms_norm"], torch.randn(4, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    args = {"x": x, "w": w, "eps": 1e-6}
    find = lambda: dispatch._route(spec, None, args, list(args.values()))[0]  # noqa: E731
    usual, mode = find(), torch.get_deterministic_debug_mode()
    try:
        torch.use_deterministic_algorithms(True)
        assert find() is not usual and find() is find()
    finally:
        torch.set_deterministic_debug_mode(mode)
    assert find() is usual


def test_a_backward_outside_the_scope_runs_on_its_forwards_backend() -> None:
    x = torch.randn(4, 16, device=DEVICE, requires_grad=True)
    with bagu.ops.use("triton"):
        y = bagu.ops.rms_norm(x, torch.ones(16, device=DEVICE))
    with bagu.ops.use("torch"):
        assert "rms_norm_triton" in str(y.grad_fn) or "rms_norm_triton" in type(y.grad_fn).__name__.lower()
        y.sum().backward()
    assert x.grad is not None


def test_a_call_is_a_custom_op_only_when_traced_or_intercepted() -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **kwargs or {})

    x, w = torch.randn(4, 16, device=DEVICE, requires_grad=True), torch.ones(16, device=DEVICE)
    bare = bagu.ops.rms_norm(x, w, backend="triton")
    with Watch():
        intercepted = bagu.ops.rms_norm(x, w, backend="triton")
        (grad,) = torch.autograd.grad(intercepted.sum(), x)
    assert {"bagu.rms_norm_triton.default", "bagu.rms_norm_triton_backward.default"} <= set(seen)
    assert type(bare.grad_fn).__name__ == "rms_norm_tritonBackward"
    assert torch.equal(bare, intercepted) and torch.equal(grad, torch.autograd.grad(bare.sum(), x)[0])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_backward_makes_no_zeros_for_residuals(backend: str) -> None:
    """Nobody reads their gradients, and each would be a launch; of linear_cross_entropy_loss as large as the weight."""
    x, w = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((4, 16), (16,)))
    head, targets = torch.randn(32, 16, device=DEVICE, requires_grad=True), torch.arange(4, device=DEVICE)
    weights = torch.ones(4, device=DEVICE)
    outputs = [
        bagu.ops.layer_norm(x, w, w, backend=backend).sum(),
        bagu.ops.linear_cross_entropy_loss(x, head, targets, weights, backend=backend)[0],
    ]
    for y in outputs:
        with torch.profiler.profile() as seen:
            torch.autograd.grad(y, x)
        names = [e.key for e in seen.key_averages()]
        assert names and not [name for name in names if "zero" in name]


@pytest.mark.parametrize("used", [0, 1])
def test_of_several_outputs_one_may_go_unused(used: int) -> None:
    x, r = (torch.randn(4, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    w = torch.randn(16, device=DEVICE)
    dout = torch.randn(4, 16, device=DEVICE)
    grads = [
        torch.autograd.grad(bagu.ops.add_rms_norm(x, r, w, backend=backend)[used], [x, r], dout)
        for backend in ("torch", "triton")
    ]
    torch.testing.assert_close(grads[0], grads[1])


class _Lost(torch.autograd.Function):
    """What gives its input no gradient, though it was asked for one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_gradient_in_gives_none_out(backend: str) -> None:
    x, w = torch.randn(4, 16, device=DEVICE, requires_grad=True), torch.ones(16, device=DEVICE)
    head, targets = torch.randn(32, 16, device=DEVICE), torch.arange(4, device=DEVICE)
    y = _Lost.apply(bagu.ops.rms_norm(x, w, backend=backend))
    loss = _Lost.apply(
        bagu.ops.linear_cross_entropy_loss(x, head, targets, torch.ones(4, device=DEVICE), backend=backend)[0]
    )
    (y.sum() + loss).backward()
    assert x.grad is None


def test_a_second_derivative_of_a_kernel_is_refused() -> None:
    x = torch.randn(4, 16, device=DEVICE, requires_grad=True)
    y = bagu.ops.rms_norm(x, torch.ones(16, device=DEVICE), backend="triton")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_what_the_compiler_takes_as_constant_is_marked_as_torch_marks_it() -> None:
    def ours() -> None: ...
    def theirs() -> None: ...

    assert vars(constant(ours)) == vars(torch.compiler.assume_constant_result(theirs))


@pytest.mark.skipif(GPU, reason="needs tensors that are not on a GPU")
def test_triton_on_a_cpu_without_the_interpreter_says_what_to_do() -> None:
    script = (
        "import torch, bagu.ops\n"
        "from bagu.errors import BackendError\n"
        "try:\n    bagu.ops.rms_norm(torch.ones(2, 4), torch.ones(4), backend='triton')\n"
        "except BackendError as e:\n    print(e, e.hint)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert "the tensors are on cpu" in run.stdout and "TRITON_INTERPRET=1" in run.stdout
    missing = "import sys; sys.modules['triton'] = None\n" + script
    run = subprocess.run([sys.executable, "-c", missing], capture_output=True, text=True, check=True)
    assert "Triton is not installed" in run.stdout
    assert BackendError.__doc__


@pytest.mark.parametrize("spec", [p for p in ALL if p.values[0].grads])
def test_dtensor_passes_through_the_torch_backend(spec: OpSpec, one_rank_mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    args = arguments(spec, "cpu")
    want = call(spec, "torch", **args)
    spread = {
        k: distribute_tensor(v, one_rank_mesh, [Replicate()]) if isinstance(v, torch.Tensor) else v
        for k, v in args.items()
    }
    got = call(spec, None, **spread)
    for g, w in zip(*(o if isinstance(o, tuple) else (o,) for o in (got, want)), strict=True):
        assert isinstance(g, DTensor)
        torch.testing.assert_close(g.full_tensor(), w)


@pytest.fixture(scope="module")
def one_rank_mesh() -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("n", [523, 1031, 1168])
@pytest.mark.parametrize("op", ["softmax", "rms_norm", "layer_norm", "scale_norm", "quantize_int8", "swiglu"])
def test_rows_at_an_address_that_is_no_multiple_of_16(op: str, n: int) -> None:
    """Kernels cut a row by its place in the tensor; one that begins three numbers into its storage is cut the same."""
    n = 2 * n if op == "swiglu" else n
    dtype = torch.bfloat16 if GPU else torch.float16
    whole = torch.randn(9 * n + 3, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x, w = whole[3:].view(9, n), whole[1 : n + 1]
    more = {"rms_norm": (w,), "layer_norm": (w, w), "scale_norm": (w[:1],)}.get(op, ())
    fn = getattr(bagu.ops, op)
    for got, want in zip(
        pytree.tree_leaves(fn(x, *more, backend="triton")),
        pytree.tree_leaves(fn(x.clone(), *(t.clone() for t in more), backend="triton")),
        strict=True,
    ):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU with 40 GB free")
def test_more_than_2_31_elements() -> None:
    """The last rows of a tensor past 2^31 elements are as they are alone, forward and backward.

    To a bit of bf16 where a kernel is another one for few rows: the gradients of the first four, and layer_norm.
    """
    torch.manual_seed(0)
    M, N = (1 << 31) // 4096 + 8, 4096
    x = torch.randn(M, N, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = torch.randn(N, device="cuda", dtype=torch.bfloat16)
    tail = x[-8:].detach().clone().requires_grad_()

    def normalise(x: torch.Tensor) -> torch.Tensor:
        return bagu.ops.layer_norm(x, w, w)

    for fn in (
        lambda x: bagu.ops.rms_norm(x, w),
        normalise,
        bagu.ops.softmax,
        bagu.ops.swiglu,
    ):
        y, last = fn(x), fn(tail)
        if fn is normalise:
            torch.testing.assert_close(y[-8:], last, rtol=2**-7, atol=1e-3)
        else:
            assert torch.equal(y[-8:], last)
        (dx,) = torch.autograd.grad(y, x, y.detach())
        (dlast,) = torch.autograd.grad(last, tail, last.detach())
        torch.testing.assert_close(dx[-8:], dlast, rtol=2**-7, atol=1e-3)
        del y, dx
    q, scale = bagu.ops.quantize_int8(x.detach(), granularity="row")
    assert torch.equal(q[-8:], bagu.ops.quantize_int8(tail.detach(), granularity="row")[0])
    del q, scale
    targets = torch.zeros(M, dtype=torch.int64, device="cuda")
    y, last = bagu.ops.cross_entropy(x, targets), bagu.ops.cross_entropy(tail, targets[-8:])
    assert torch.equal(y[-8:], last)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx[-8:], torch.autograd.grad(last.sum(), tail)[0])
    del y, dx
    flipped = bagu.ops.transpose(x.detach(), 0, 1)
    assert torch.equal(flipped[:, -8:], tail.detach().T)
