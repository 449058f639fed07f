"""One node per op in eager mode on a CPU: what stays as it was when the formula is not run as it stands."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bagu.ops import (
    attention,
    geglu,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy_loss,
    relu_squared,
    rms_norm,
    rope,
    rope_tables,
    swiglu,
)
from bagu.ops.call import eager
from bagu.ops.linear_cross_entropy import cpu_gemm

TABLES = rope_tables(5, 4)
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, torch.linspace(0.5, 1.5, 16, dtype=x.dtype)),
    "layer_norm": lambda x: layer_norm(x, torch.linspace(0.5, 1.5, 16, dtype=x.dtype)),
    "swiglu": swiglu,
    "geglu": geglu,
    "relu_squared": relu_squared,
    "rope": lambda x: rope(x.reshape(5, 2, 8), *TABLES),
}
EACH = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def test_the_module_imports_on_a_torch_without_the_private_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    copy: dict[str, Any] = runpy.run_path(eager.__file__)
    assert copy["saved_tensor_hooks"](True) == (None, None)  # neither None nor empty: there may be hooks


def draw(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


@EACH
def test_it_is_one_node(op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    y = op(draw().requires_grad_())
    assert y.grad_fn is not None and "Node" in y.grad_fn.name()


@EACH
def test_second_derivatives_are_true(op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A residual is a constant to the node and a function of x in truth: a Hessian that forgets it is wrong."""
    assert torch.autograd.gradgradcheck(op, (draw().requires_grad_(),))


@EACH
def test_torch_func_sees_the_formula(op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = draw().requires_grad_()
    (want,) = torch.autograd.grad(op(x).square().sum(), x)
    torch.testing.assert_close(torch.func.grad(lambda v: op(v).square().sum())(x.detach()), want)


def test_what_needs_no_gradient_gets_none() -> None:
    x, w = draw(), torch.ones(16, dtype=torch.float64, requires_grad=True)
    rms_norm(x, w).sum().backward()
    assert x.grad is None and w.grad is not None
    with torch.no_grad():
        assert rms_norm(x, w).grad_fn is None


def test_a_compiler_and_a_subclass_are_told_apart_from_a_plain_tensor() -> None:
    class Other(torch.Tensor):
        pass

    assert eager.plain(draw()) and eager.plain(torch.nn.Parameter(draw()))
    assert not eager.plain(draw().as_subclass(Other)) and not eager.plain(torch.empty(1, device="meta"))


def test_bf16_products_are_summed_in_fp32_and_the_setting_comes_back() -> None:
    """oneDNN multiplies bf16 values as they are and sums in fp32; an fp32 product afterwards is an fp32 product."""
    a, b = draw(torch.bfloat16), draw(torch.bfloat16).T
    before = torch.backends.mkldnn.matmul.fp32_precision, torch.get_float32_matmul_precision()
    torch.testing.assert_close(cpu_gemm.mm(a, b).double(), a.double() @ b.double(), rtol=1e-6, atol=1e-6)
    total = torch.ones(5, 5)
    cpu_gemm.addmm_(total, a, b)
    torch.testing.assert_close(total.double(), 1 + a.double() @ b.double(), rtol=1e-6, atol=1e-6)
    assert (torch.backends.mkldnn.matmul.fp32_precision, torch.get_float32_matmul_precision()) == before
    x = draw(torch.float32)
    torch.testing.assert_close((x @ x.T).double(), x.double() @ x.double().T, rtol=1e-6, atol=1e-6)


def test_a_failed_product_leaves_the_setting_as_it_was() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        cpu_gemm.mm(draw(torch.bfloat16), draw(torch.bfloat16))
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_a_bf16_head_compiles_as_one_graph_and_sums_in_fp32() -> None:
    hidden, weight = draw(torch.bfloat16).requires_grad_(), draw(torch.bfloat16)[:4].clone().requires_grad_()
    targets, each = torch.tensor([0, 3, 1, 2, 0]), torch.full((5,), 0.2)
    run = lambda: linear_cross_entropy_loss(hidden, weight, targets, each, memory=32)[0]  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")()
    torch.testing.assert_close(compiled, run())
    true = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, targets)
    torch.testing.assert_close(compiled.double(), true, rtol=1e-6, atol=1e-6)
    for g, w in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (compiled, true)), strict=True):
        torch.testing.assert_close(g, w, rtol=2**-7, atol=2**-9)


def test_only_an_intercepted_call_is_a_custom_op() -> None:
    """The first call of a custom op imports the compiler: 1.6 s of CPU in each process that trains."""
    x, offsets = draw().view(5, 2, 8).requires_grad_(), torch.tensor([0, 4, 5], dtype=torch.int32)
    w = draw().view(2, 5, 8).requires_grad_()
    for run in (
        lambda: attention(x, x, x, offsets, 4)[0],
        lambda: grouped_matmul(x[:, 0], w, offsets[1:]),
    ):
        plain = run()
        with FlopCounterMode(display=False):
            counted = run()
        for result, custom in ((plain, False), (counted, True)):
            assert result.grad_fn is not None and ("bagu" in result.grad_fn.name()) == custom
        assert torch.equal(plain, counted)
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (plain, counted)), strict=True):
            assert torch.equal(a, b)
