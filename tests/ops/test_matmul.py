"""What conformance cannot say of matmul, grouped_matmul, gelu and relu_squared: FLOPs, graphs, any shares, one node."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from bagu.ops import gelu, grouped_matmul, matmul, relu_squared
from bagu.ops.catalogue import SPECS
from bagu.ops.grouped_matmul import torch_backend as grouped

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def ends(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, device=DEVICE).cumsum(0).to(torch.int32)


def test_flop_counters_see_what_the_spec_counts() -> None:
    x, w, experts = randn(24, 16).requires_grad_(), randn(8, 16).requires_grad_(), randn(3, 8, 16).requires_grad_()
    calls = (
        ("matmul", lambda: matmul(x, w, backend="torch")),
        ("grouped_matmul", lambda: grouped_matmul(x, experts, ends(9, 0, 15), backend="torch")),
    )
    for name, call in calls:
        dims = {"M": 24, "T": 24, "E": 3, "N": 8, "K": 16}
        forward, backward = SPECS[name].cost(dims, 4).flops, SPECS[name].cost_backward(dims, 4).flops  # type: ignore[misc]
        with FlopCounterMode(display=False) as counter:
            y = call()
            assert counter.get_total_flops() == forward
            y.sum().backward()
        assert counter.get_total_flops() == forward + backward


def test_a_frozen_weight_costs_no_gradient() -> None:
    """LoRA trains beside frozen weights: their gradient, half of the backward, is not computed."""
    x, w = randn(24, 16).requires_grad_(), randn(3, 8, 16)
    with FlopCounterMode(display=False) as counter:
        grouped_matmul(x, w, ends(9, 0, 15), backend="torch").sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 24 * 8 * 16


@settings(max_examples=40)
@given(rows=st.lists(st.integers(0, 9), min_size=1, max_size=6), spare=st.integers(0, 3))
def test_any_shares_equal_one_matmul_per_expert(rows: list[int], spare: int) -> None:
    T, offsets = sum(rows) + spare, ends(*rows)
    x, w = randn(T, 5).double().requires_grad_(), randn(len(rows), 7, 5).double().requires_grad_()
    parts = [matmul(part, w[e]) for e, part in enumerate(x[: sum(rows)].split(rows))]
    want = torch.cat((*parts, x.new_zeros(spare, 7)))
    got = grouped_matmul(x, w, offsets)
    torch.testing.assert_close(got, want)
    dy = randn(T, 7).double()
    for g, v in zip(torch.autograd.grad(got, (x, w), dy), torch.autograd.grad(want, (x, w), dy), strict=True):
        torch.testing.assert_close(g, v)


def test_the_grouped_products_are_sound_custom_ops() -> None:
    x, w, offsets = randn(7, 4).requires_grad_(), randn(3, 6, 4).requires_grad_(), ends(2, 0, 5)
    torch.library.opcheck(torch.ops.bagu.grouped_rows, (x, w, offsets))
    torch.library.opcheck(torch.ops.bagu.grouped_weights, (randn(7, 6), randn(7, 4), offsets))


def test_another_routing_is_not_another_graph() -> None:
    """Shares are data: a compiled layer meets new ones at every step and must not compile again."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(grouped_matmul, fullgraph=True, backend=count)
    x, w = randn(16, 8), randn(4, 8, 8)
    for offsets in (ends(4, 4, 4, 4), ends(0, 16, 0, 0), ends(1, 2, 3, 10)):
        torch.testing.assert_close(compiled(x, w, offsets), grouped_matmul(x, w, offsets))
    assert len(graphs) == 1


def test_rows_past_the_last_end_are_zeros_not_old_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, w = randn(64, 32, dtype=dtype).requires_grad_(), randn(2, 16, 32, dtype=dtype)
        y = grouped_matmul(x, w, ends(3, 7))
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert y[:10].all() and not y[10:].any() and dx[:10].any() and not dx[10:].any()


def test_the_grouped_gemm_of_cuda_takes_only_aligned_bf16() -> None:
    assert not grouped.one_launch(randn(8, 16))
    if torch.cuda.is_available():
        assert grouped.one_launch(randn(8, 16, dtype=torch.bfloat16))
        assert not grouped.one_launch(randn(8, 12, dtype=torch.bfloat16))


def test_a_bias_is_added_before_the_only_rounding() -> None:
    """1 + 2^-9 has no bf16, and a sum rounded to it before the bias -1 comes would leave 0."""
    x, w = torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bfloat16)
    y = matmul(x.to(DEVICE), w.to(DEVICE), torch.tensor([-1.0], dtype=torch.bfloat16, device=DEVICE))
    assert y.item() == 2.0**-9


def test_the_two_gelus_differ_where_they_should() -> None:
    x = torch.linspace(-6, 6, 4001, dtype=torch.float64, device=DEVICE)
    gap = (gelu(x) - gelu(x, approximate=True)).abs()
    assert 4e-4 < gap.max() < 6e-4 and 1.9 < x[gap.argmax()].abs() < 2.7


def test_relu_squared_is_zero_below_and_smooth_at_zero() -> None:
    x = torch.tensor([-3.0, -0.0, 0.0, 1e-3, 3.0], device=DEVICE, requires_grad=True)
    y = relu_squared(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y.cpu(), torch.tensor([0, 0, 0, 1e-6, 9.0]))
    torch.testing.assert_close(dx.cpu(), torch.tensor([0, 0, 0, 2e-3, 6.0]))
