"""What a recording follows: the offsets of views and temporaries side by side; what it cannot repeat, it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest
import torch

from bagu.ops.call.custom import _fake_backward, _fake_forward, listed
from bagu.ops.call.link import Link, selective
from bagu.ops.call.node import Node, backward_host, forward_host
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import OpSpec
from bagu.ops.replay.launcher import Direct
from bagu.ops.replay.plan import Plan, Pointer, Results, Step
from bagu.ops.replay.replay import Replayed
from tests.ops.points import DEVICE
from tests.ops.replaying import Interpreted, drawn, launcher, plans, ran

relu = SPECS["relu_squared"].module("triton").forward
swiglu = SPECS["swiglu"].module("triton").forward


def of_views(values: Sequence[Any]) -> Results:
    """Two temporaries at once, both from rows inside of the input; a result that begins inside of its memory."""
    (x,) = values
    above, below = relu(x[1:])[0], relu(x[:-1])[0]
    made = swiglu(above, below)[0]
    return made[1:], made


def test_views_begin_where_they_began_and_temporaries_do_not_overlap() -> None:
    run = Replayed(of_views, launcher)
    for i in range(4):
        x = torch.randn(5, 16, device=DEVICE)
        for got, want in zip(run(x), of_views([x]), strict=True):
            assert got is not None and want is not None and torch.equal(got, want), i
    assert plans(run)


def test_temporaries_with_gaps_have_room_for_them() -> None:
    given: list[int] = []
    step = Step(Direct(lambda stream, *at: given.extend(at), (), ()), (Pointer(0, 0), Pointer(1, 0), Pointer(2, 0)))
    sizes = (((3, 3), (1000, 1), torch.float64), ((4,), (1,), torch.float32), ((0, 9), (9, 1), torch.float32))
    Plan(device=-1, inputs=0, allocations=sizes, steps=(step,), results=()).replay(Interpreted().empty, 0)
    first, second, third = given
    assert second - first >= 2003 * 8 and third - second >= 16 and not (second - first) % 16


def into_zeros(values: Sequence[Any]) -> Results:
    made = torch.zeros(4, 16, device=DEVICE)
    return made, relu(values[0])[0]


def filled(values: Sequence[Any]) -> Results:
    return (relu(values[0])[0].fill_(7),)


def as_integers(values: Sequence[Any]) -> Results:
    return (relu(values[0])[0].view(torch.int32),)


def the_input(values: Sequence[Any]) -> Results:
    return relu(values[0])[0], values[0]


def copied(values: Sequence[Any]) -> Results:
    return (relu(values[0].t().reshape(-1))[0],)


@pytest.mark.parametrize("host", [into_zeros, filled, as_integers, the_input, copied])
def test_what_is_more_than_memory_and_launches_is_not_replayed(host: Callable[[Sequence[Any]], Results]) -> None:
    run = Replayed(host, launcher)
    for _ in range(4):
        x = torch.randn(4, 16, device=DEVICE)
        torch.empty(4, 16, device=DEVICE).fill_(float("nan"))  # what an allocation may find
        for got, want in zip(run(x), host([x]), strict=True):
            assert got is not None and want is not None and torch.equal(got, want)
    assert not plans(run)


TRITON = [pytest.param(s, id=s.name) for s in SPECS.values() if "triton" in s.backends]


def kinds(made: Sequence[torch.Tensor | None]) -> list[Any]:
    return [None if y is None or y.numel() == 0 else (y.dtype, y.shape) for y in made]


@pytest.mark.parametrize("spec", TRITON)
def test_the_fake_functions_have_the_dtypes_and_shapes_of_the_kernels(spec: OpSpec) -> None:
    """Of results, residuals and gradients, in fp16: in fp32 a residual that must be fp32 looks right in any case."""
    args, module, link = drawn(spec, spec.cases[0], torch.float16, "packed", 0), spec.module("triton"), Link.of(spec)
    values = [args[n].detach() if isinstance(args[n], torch.Tensor) else args[n] for n in spec.names]
    results = forward_host(spec, module.forward)(values)
    assert kinds(listed(_fake_forward(spec)(*values))) == kinds(results)
    if spec.grads:
        known = (*values, *results)
        douts = [torch.ones_like(results[i]) for i in link.flows]  # type: ignore[arg-type]
        given = [*douts, *(known[i] for i in link.saves), *(values[i] for i in link.scalars)]
        each = [[i == j for i in range(len(spec.made))] for j in range(len(spec.made))]
        for needs in ([True] * len(spec.made), *(each if selective(module.backward) else [])):
            made = backward_host(spec, module.backward)((needs, *given))
            assert kinds(listed(_fake_backward(spec, selective(module.backward))(needs, *given))) == kinds(made)


def test_a_gradient_of_two_inputs_is_needed_if_one_of_them_needs_it() -> None:
    link = Link.of(SPECS["add_rms_norm"])  # x, residual, w, eps
    assert [link.needs(wanted) for wanted in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0))] == [(1, 0), (1, 0), (0, 1)]


# encoder_layer is made of self_attention and mlp, and takes as long as all the others
@pytest.mark.parametrize("spec", [p for p in TRITON if len(p.values[0].grads) > 1 and p.id != "encoder_layer"])
def test_each_gradient_alone_is_the_one_that_is_asked_for(spec: OpSpec) -> None:
    """With one input that needs a gradient the result is that of all, and the others have none."""
    module, case, asked = spec.module("triton"), spec.cases[0], []

    @wraps(module.backward)
    def backward(*record: Any, **given: Any) -> Any:
        asked.append([name for name, needed in given.get("needs", {}).items() if needed])
        return module.backward(*record, **given)

    node = Node(spec, "one", module.forward, backward)
    args = drawn(spec, case, torch.float32, "packed", 0)
    leaves = [g for g in spec.grads if args[g] is not None and args[g].requires_grad]
    grads = dict(zip(leaves, ran(spec, node, args, 0)[-len(leaves) :], strict=True))
    for name in leaves:
        alone = {k: v.detach().requires_grad_(k == name) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        results = node(*(alone[n] for n in spec.names))
        flows = [r for r, o in zip(results, spec.sig.results, strict=False) if o.name in spec.differentiable]
        torch.manual_seed(0)
        torch.autograd.backward(flows, [torch.randn_like(f, memory_format=torch.contiguous_format) for f in flows])
        torch.testing.assert_close(alone[name].grad, grads[name], rtol=1e-5, atol=1e-6)
        assert all(alone[g].grad is None for g in leaves if g != name)
        assert asked[-1] == ([spec.twins.get(name, name)] if selective(module.backward) else [])
