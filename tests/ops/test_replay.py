"""A call that is replayed gives the bits that its host code gives, and what cannot be replayed is not.

On a CPU the launches go through Triton's interpreter, which is given nothing but addresses; on a GPU through the
compiled kernels' own launcher.
"""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from bagu.ops.call import eager
from bagu.ops.call.node import Node
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import OpSpec
from bagu.ops.replay.launcher import noted_launches
from bagu.ops.replay.plan import source
from tests.ops.points import DEVICE, Point, points
from tests.ops.replaying import GPU, drawn, forward_of, launcher, plans, ran

TRITON = [s for s in SPECS.values() if "triton" in s.backends]
# ops whose host code does more than views, allocations and launches
NEVER = {"block_attention", "linear_cross_entropy", "linear_cross_entropy_loss"}


def scalars(spec: OpSpec, args: dict[str, Any]) -> dict[str, Any]:
    return {s.name: args[s.name] for s in spec.sig.scalars}


def copies(args: dict[str, Any]) -> bool:
    """Whether an input is copied first: TMA reads rows on 16 bytes, a strided 1x1 convolution some of its pixels."""
    if "stride_h" in args and args["w"].shape[1:3] == (1, 1) and (args["stride_h"], args["stride_w"]) != (1, 1):
        return True
    rows = [args[name] for name in ("q", "k", "v") if name in args]
    return any(x.element_size() == 2 and x.shape[-1] * 2 % 16 for x in rows)


POINTS = [
    pytest.param(s, p, id=f"{s.name}-{p}", marks=() if GPU or i == 0 else pytest.mark.slow)
    for s in TRITON for i, p in enumerate(points(s, "triton")[: None if GPU else 2])
]  # fmt: skip


@pytest.mark.parametrize("spec, point", POINTS)
def test_a_replayed_call_has_the_bits_of_its_host_code(spec: OpSpec, point: Point) -> None:
    module = spec.module("triton")
    backward = module.backward if spec.grads else None
    plain, run = Node(spec, "plain", module.forward, backward), Node(spec, "r", module.forward, backward, launcher())
    first = drawn(spec, point.case, point.dtype, point.layout, 0)
    for seed in range(4 if GPU or point.layout == "packed" else 3):  # seen, recorded, replayed, replayed
        args = drawn(spec, point.case, point.dtype, point.layout, seed) | scalars(spec, first)
        for got, want in zip(ran(spec, run, args, seed), ran(spec, plain, args, seed), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, check_stride=True)
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


@pytest.mark.parametrize("known", [True, False], ids=["known", "torch_without_the_function"])
def test_a_backward_reads_what_a_hook_made_of_a_saved_tensor(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """The kind of a backward follows from its forward's, unless a hook may lay out a saved tensor anew."""
    if not known:
        monkeypatch.setattr("bagu.ops.call.node.saved_tensor_hooks", eager._unknown_hooks)
    spec = SPECS["rms_norm"]
    module = spec.module("triton")
    plain, run = (Node(spec, "r", module.forward, module.backward, by) for by in (None, launcher()))
    w = torch.ones(16, device=DEVICE)
    for hooked in (False, False, False, True, True, True):
        x = torch.randn(4, 32, device=DEVICE)[:, :16].requires_grad_()
        made = []
        for node, hook in ((plain, False), (run, hooked)):
            layout = saved_tensors_hooks(lambda t: t, lambda t: t.contiguous()) if hook else nullcontext()
            with layout:
                y = node(x, w, 1e-6)[0]
            made.append(torch.autograd.grad(y, x, torch.ones_like(y))[0])
        torch.testing.assert_close(*made, rtol=0, atol=0)


def test_alignment_strides_and_scalars_are_kinds_of_their_own() -> None:
    run = forward_of("softmax", launcher())
    whole = torch.randn(4 * 32 + 8, device=DEVICE)
    aligned, odd, strided = whole[:128].view(4, 32), whole[1:129].view(4, 32), whole.as_strided((4, 32), (34, 1))
    for x in (aligned, odd, strided):
        for scale in (1.0, 0.0, -0.0, 2):
            for _ in range(3):
                assert torch.equal(run(x, scale, None, None)[0], forward_of("softmax", None)(x, scale, None, None)[0])
    assert len(plans(run)) == 12


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
    (plan,), (calls,) = plans(run), run.kinds.values()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.equal(run(x)[0], x.relu().square())
        calls.plan = replace(plan, steps=())
        assert run(x)[0].isnan().all()
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
