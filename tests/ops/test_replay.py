"""A call that is replayed gives the bits that its host code gives, and what cannot be replayed is not.

On a CPU the launches go through Triton's interpreter, which is given nothing but addresses; on a GPU through the
compiled kernels' own launcher.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bagu.ops.catalogue import SPECS
from bagu.ops.core import Case, OpSpec, Streams
from bagu.ops.launcher import (
    Direct,
    Launch,
    Launcher,
    Scratch,
    cuda_launcher,
    noted_launches,
    takes_kernel_arguments,
    with_scratch_memory,
)  # fmt: skip
from bagu.ops.layouts import lay_out
from bagu.ops.node import Node
from bagu.ops.plan import Plan, Results, Step, source
from bagu.ops.replay import Replayed
from tests.ops.points import DEVICE, Point, points

GPU = torch.cuda.is_available()
TRITON = [s for s in SPECS.values() if "triton" in s.backends]
# ops whose host code does more than views, allocations and launches
NEVER = {"linear_cross_entropy", "linear_cross_entropy_loss"}


class Interpreted:
    """A launcher for Triton's interpreter: it makes a tensor of one element at each address."""

    def ready(self) -> bool:
        return True

    def current_device(self) -> int:
        return -1

    def stream(self, device: int) -> int:
        return 0

    def empty(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    filled = empty

    def direct(self, launch: Launch) -> Direct | None:
        dtypes = [a.dtype if isinstance(a, torch.Tensor) else None for a in launch.args.values()]
        fn, grid, options = launch.fn, launch.grid, launch.options

        def run(stream: int, *args: Any) -> None:
            given = [a if d is None else _at(a, d) for a, d in zip(args, dtypes, strict=True)]
            fn.run(*given, grid=grid, warmup=False, **options)

        return Direct(run, (), ())


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    if address == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


def launcher() -> Launcher:
    found = cuda_launcher() if GPU else Interpreted()
    assert found is not None, "torch or Triton lacks a private function that launches are repeated with"
    return found


def drawn(spec: OpSpec, case: Case, dtype: torch.dtype, layout: str, seed: int) -> dict[str, Any]:
    """A call's inputs; another seed is other values of the same kind, elsewhere in memory."""
    args = spec.cast(case, spec.inputs(case, Streams(spec.name, case.name, seed)), dtype)
    return {
        k: lay_out(v.to(DEVICE), layout, i).requires_grad_(
            k in spec.grads and k not in case.frozen and v.is_floating_point()
        )
        if isinstance(v, torch.Tensor)
        else v
        for i, (k, v) in enumerate(args.items())
    }


def ran(spec: OpSpec, run: Callable[..., Any], args: dict[str, Any], seed: int) -> list[torch.Tensor]:
    """Every result and every gradient of a call."""
    results = run(*(args[n] for n in spec.names))
    flows = [r for r, o in zip(results, spec.sig.results, strict=False) if o.name in spec.differentiable]
    leaves = [args[g] for g in spec.grads if args[g] is not None and args[g].requires_grad]
    if not leaves:
        return list(results)
    torch.manual_seed(seed)
    douts = [torch.randn_like(f, memory_format=torch.contiguous_format) for f in flows]
    return [*results, *torch.autograd.grad(flows, leaves, douts)]


def plans(run: Any) -> list[Plan]:
    """What a node, or the backward of one, replays."""
    return [calls.plan for calls in run.kinds.values() if calls.plan is not None]


def scalars(spec: OpSpec, args: dict[str, Any]) -> dict[str, Any]:
    return {s.name: args[s.name] for s in spec.sig.scalars}


def copies(args: dict[str, Any]) -> bool:
    """Whether an input is copied first: TMA reads rows on 16 bytes, a strided 1x1 convolution some of its pixels."""
    if "stride_h" in args and args["w"].shape[1:3] == (1, 1) and (args["stride_h"], args["stride_w"]) != (1, 1):
        return True
    rows = [args[name] for name in ("q", "k", "v") if name in args]
    return any(x.element_size() == 2 and x.shape[-1] * 2 % 16 for x in rows)


POINTS = [pytest.param(s, p, id=f"{s.name}-{p}") for s in TRITON for p in points(s, "triton")[: None if GPU else 4]]


@pytest.mark.parametrize(
    "spec, point",
    [pytest.param(s, p, id=f"{s.name}-{p}") for s in TRITON for p in points(s, "triton")[: None if GPU else 4]],
)
def test_a_replayed_call_has_the_bits_of_its_host_code(spec: OpSpec, point: Point) -> None:
    module = spec.module("triton")
    backward = module.backward if spec.grads else None
    plain, run = Node(spec, "plain", module.forward, backward), Node(spec, "r", module.forward, backward, launcher())
    first = drawn(spec, point.case, point.dtype, point.layout, 0)
    for seed in range(4):  # seen, recorded, replayed, replayed
        args = drawn(spec, point.case, point.dtype, point.layout, seed) | scalars(spec, first)
        for got, want in zip(ran(spec, run, args, seed), ran(spec, plain, args, seed), strict=True):
            assert torch.equal(got, want) or (got.isnan() == want.isnan()).all()
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    if (
        point.layout == "packed"
        and spec.name not in NEVER
        and args[spec.names[spec.first]].numel()
        and not copies(args)
    ):
        differentiable = any(isinstance(v, torch.Tensor) and v.requires_grad for v in args.values())
        # PyTorch computes gradients: nothing to replay
        hosted = args.get("sinks") is not None or spec.name in ("matmul", "conv2d", "grouped_matmul")
        assert plans(run) and (hosted or not differentiable or plans(run.backward))


def test_a_plan_allocates_the_scratch_memory_of_a_launch() -> None:
    given: list[Any] = []
    step = Step(Direct(lambda *args: given.append(args), (1,), (Scratch(384), None)), (7,))
    plan = Plan(launcher=Interpreted(), device=-1, inputs=0, allocations=(), steps=(step, step), results=())
    plan.run([], [])
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


def forward_of(op: str, replaying: Launcher | None) -> Node:
    """An op's Triton forward."""
    return Node(SPECS[op], "forward", SPECS[op].module("triton").forward, None, replaying)


def test_a_kind_of_call_is_recorded_when_it_comes_again() -> None:
    run = forward_of("relu_squared", launcher())
    x = torch.randn(3, 16, device=DEVICE)
    run(x)
    assert not plans(run)
    run(x)
    (plan,), (calls,) = plans(run), run.kinds.values()
    calls.host = None  # type: ignore[assignment]
    assert torch.equal(run(x + 1)[0], (x + 1).relu().square())
    run(x[:2])
    assert plans(run) == [plan] and len(run.kinds) == 2


def test_a_plan_reads_as_what_it_does() -> None:
    run = forward_of("rms_norm", launcher())
    for _ in range(2):
        run(torch.randn(4, 16, device=DEVICE), torch.ones(16, device=DEVICE), 1e-6)
    text = source(plans(run)[0])[0].splitlines()
    assert text[0] == "def replay(empty, stream, p0, p1):" and text[-1] == "    return (t0, t1, )"
    assert [line.split(" = ")[0] for line in text[1:-2]] == ["    t0", "    p2", "    t1", "    p3"]
    assert "stream, " in text[-2] and " p0, None, p1, None, p2, None, None, p3, 4, 16, 16, " in text[-2]


def test_a_tensor_given_twice_is_two_arguments() -> None:
    """Recorded with one tensor for x and residual, the plan must serve a call with two."""
    run = forward_of("add_rms_norm", launcher())
    x, r = torch.randn(2, 4, 16, device=DEVICE)
    w = torch.ones(16, device=DEVICE)
    for _ in range(2):
        run(x, x, w, 1e-6)
    assert plans(run)
    for got, want in zip(run(x, r, w, 1e-6), forward_of("add_rms_norm", None)(x, r, w, 1e-6), strict=True):
        assert torch.equal(got, want)


def test_halves_of_one_tensor_are_two_arguments() -> None:
    run = forward_of("swiglu", launcher())
    whole, padded = torch.randn(4, 64, device=DEVICE), torch.randn(4, 128, device=DEVICE)
    for _ in range(2):
        run(whole[:, :32], whole[:, 32:])
    assert plans(run)
    gate, up = whole[:, :32], padded[:, 64:128].as_strided((4, 32), (64, 1))
    assert torch.equal(run(gate, up)[0], forward_of("swiglu", None)(gate, up)[0])


def test_alignment_strides_and_scalars_are_kinds_of_their_own() -> None:
    run = forward_of("softmax", launcher())
    whole = torch.randn(4 * 32 + 8, device=DEVICE)
    aligned, odd, strided = whole[:128].view(4, 32), whole[1:129].view(4, 32), whole.as_strided((4, 32), (34, 1))
    for x in (aligned, odd, strided):
        for scale in (1.0, 0.0, -0.0, 2):
            for _ in range(3):
                assert torch.equal(run(x, scale, None, None)[0], forward_of("softmax", None)(x, scale, None, None)[0])
    assert len(plans(run)) == 12


def squared_product(values: Sequence[Any]) -> Results:
    """Host code with a product: relu(x[:, :8] w)² of a transposed w, and the product itself."""
    x, w = values
    y = torch.mm(x[:, :8], w.T)
    return y, SPECS["relu_squared"].module("triton").forward(y)[0]


def test_a_product_is_repeated_by_torch() -> None:
    run = Replayed(squared_product, launcher)
    draw = lambda: [torch.randn(*shape, device=DEVICE) for shape in ((4, 16), (6, 8))]  # noqa: E731
    for i in range(4):
        x, w = draw()
        if i == 3:
            (calls,) = run.kinds.values()
            calls.host = None  # type: ignore[assignment]
        y, z = run(x, w)
        assert y is not None and z is not None
        assert torch.equal(y, torch.mm(x[:, :8], w.T)) and torch.equal(z, y.relu().square())
    (plan,) = plans(run)
    text = source(plan)[0]
    assert "(empty, stream, p0, p1, x0, x1)" in text and "(x0.as_strided((4, 8), (16, 1)), x1.as_strided(" in text
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(run(x, w)[0], y)  # type: ignore[arg-type]


def test_a_product_from_the_middle_of_a_tensor_is_not_replayed() -> None:
    run = Replayed(lambda values: (torch.mm(values[0][:, 8:], values[1]),), launcher)
    for _ in range(4):
        x, w = torch.randn(4, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE)
        assert torch.equal(run(x, w)[0], torch.mm(x[:, 8:], w))  # type: ignore[arg-type]
    assert not plans(run)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="a CPU widens the operands of the products, which is a copy")
def test_a_head_and_its_gradients_are_replayed() -> None:
    for name in ("linear_cross_entropy", "linear_cross_entropy_loss"):
        spec = SPECS[name]
        module, case = spec.module("triton"), Case("even", "", M=256, D=64, V=512)
        run = Node(spec, "r", module.forward, module.backward, launcher())
        for seed in range(3):
            ran(spec, run, drawn(spec, case, torch.bfloat16, "packed", seed) | {"ignore_index": -100, "z_loss": 0.0}, 0)
        assert plans(run) and plans(run.backward)


def test_what_copies_is_not_replayed() -> None:
    run = forward_of("relu_squared", launcher())
    x = torch.randn(4, 32, device=DEVICE).T
    for i in range(4):
        assert torch.equal(run(x + i)[0], (x + i).relu().square())
        assert torch.equal(run((x + i).T.T[:, ::2])[0], (x + i)[:, ::2].relu().square())
    assert not plans(run) and len(run.kinds) == 2


def test_a_pending_conjugation_is_carried_out() -> None:
    """`x.conj()` has the memory and strides of x: only its kind tells a replay that the numbers differ."""
    run, x = forward_of("transpose", launcher()), torch.complex(*torch.randn(2, 3, 5, device=DEVICE))
    for _ in range(3):
        assert torch.equal(run(x, 0, 1)[0], x.T)
    assert plans(run)
    assert torch.equal(run(x.conj(), 0, 1)[0], torch.complex(x.real, -x.imag).T)


def test_a_pending_negation_is_carried_out() -> None:
    run = forward_of("relu_squared", launcher())
    for _ in range(4):
        z = torch.randn(4, 16, device=DEVICE, dtype=torch.complex64)
        x = z.conj().imag
        assert x.is_neg() and torch.equal(run(x)[0], (-z.imag).relu().square())


def test_a_plan_keeps_no_tensor_alive() -> None:
    run = forward_of("layer_norm", launcher())
    x, w = torch.randn(4, 16, device=DEVICE), torch.randn(16, device=DEVICE)
    results = [run(x, w, w, 1e-5) for _ in range(3)]
    alive = [weakref.ref(t) for t in (x, w, *results[1], *results[2])]
    assert plans(run)
    del x, w, results
    gc.collect()
    assert not any(r() for r in alive)


def test_memory_is_filled_where_torch_fills_it() -> None:
    """Conformance sees a result that a kernel forgot to write because torch.empty gives NaN then."""
    run = forward_of("relu_squared", launcher())
    x = torch.randn(4, 16, device=DEVICE)
    for _ in range(2):
        run(x)
    (plan,) = plans(run)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.equal(run(x)[0], x.relu().square())
        assert replace(plan, steps=()).run([], [0])[0].isnan().all()  # type: ignore[union-attr]
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_launch_of_another_thread_is_not_noted() -> None:
    run, x, seen = forward_of("relu_squared", None), torch.randn(4, 16, device=DEVICE), []
    with noted_launches(seen.append):
        other = threading.Thread(target=run, args=(x,))  # the interpreter bears one launch at a time
        other.start()
        other.join()
        assert not seen
        run(x)
    assert len(seen) == 1
    run(x)
    assert len(seen) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="Triton's interpreter bears one thread")
def test_threads_record_and_replay_side_by_side() -> None:
    run = forward_of("rms_norm", launcher())
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(40):
            x, w = torch.randn(3 + i % 4, 16, generator=generator).to(DEVICE), torch.ones(16, device=DEVICE)
            if not torch.equal(run(x, w, 1e-6)[0], forward_of("rms_norm", None)(x, w, 1e-6)[0]):
                wrong.append(f"{seed}: call {i}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and [len(p.steps) for p in plans(run)] == [1] * 4


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
    assert len(seen) == 4


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
