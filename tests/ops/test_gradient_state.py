"""What an op tells autograd: gradients only where the spec has them, and a new version of what it changes in place."""

from __future__ import annotations

import pytest
import torch

from bagu import ops
from tests.ops.points import DEVICE


def lora(backend: str | None) -> None:
    """Change a tensor in place that an earlier operation saved for its backward."""
    x, y = torch.randn(3, 16, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    a, b = torch.randn(2, 4, 16, device=DEVICE), torch.randn(2, 8, 4, device=DEVICE)
    weight = torch.ones(3, 8, device=DEVICE, requires_grad=True)
    product = weight * y  # its backward reads y
    ops.lora_add(y, x, a, b, torch.zeros(3, dtype=torch.int64, device=DEVICE), backend=backend)
    product.sum().backward()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_tensor_changed_in_place_has_a_new_version(backend: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lora(backend)


def test_inference_tensors_are_changed_in_place() -> None:
    """They have no version to raise."""
    with torch.inference_mode():
        y, slots = torch.zeros(2, 8, device=DEVICE), torch.tensor([0, -1], device=DEVICE)
        ops.lora_add(
            y, *(torch.ones(s, device=DEVICE) for s in ((2, 4), (1, 1, 4), (1, 8, 1))), slots, backend="triton"
        )
    assert y[0].eq(4).all() and y[1].eq(0).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_op_without_gradients_returns_tensors_without_them(backend: str) -> None:
    x = torch.randn(3, 16, device=DEVICE, requires_grad=True)
    w, scale = ops.quantize_int8(torch.randn(8, 16, device=DEVICE))
    assert not ops.w8a16_matmul(x, w, scale, backend=backend).requires_grad
    assert not ops.quantize_int8(x, backend=backend)[1].requires_grad


def test_an_op_without_gradients_has_none_when_compiled() -> None:
    x = torch.randn(3, 16, requires_grad=True)
    w, scale = ops.quantize_int8(torch.randn(8, 16))
    compiled = torch.compile(lambda x: ops.w8a16_matmul(x, w, scale, backend="torch"), backend="eager", fullgraph=True)
    assert not compiled(x).requires_grad


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("equal", [1, 2, 7])
def test_cross_entropy_of_huge_logits_that_are_equal(equal: int, backend: str) -> None:
    """lse = 1e30 + log(7) is 1e30 in fp32: neither the loss nor the gradient may be a difference from lse."""
    logits = torch.full((4, 40), -1e30, device=DEVICE)
    logits[:, :equal] = 1e30
    logits.requires_grad_()
    losses = ops.cross_entropy(logits, torch.zeros(4, dtype=torch.int64, device=DEVICE), backend=backend)
    torch.testing.assert_close(losses, torch.full_like(losses, equal).log())
    losses.sum().backward()
    expected = torch.zeros(4, 40, device=DEVICE)
    expected[:, :equal] = 1 / equal
    expected[:, 0] -= 1
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected)
