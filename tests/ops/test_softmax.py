"""What the conformance cases of softmax cannot say: broadcasting, what is never copied, bad and empty input."""

from __future__ import annotations

import pytest
import torch

from bagu.errors import ArgumentError
from bagu.ops.softmax import softmax
from bagu.ops.softmax.spec import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")
B, H, T, S = 2, 3, 4, 5


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape", [(T, S), (1, S), (S,), (T, 1), (B, 1, 1, S), (B, 1, T, S), (1, H, 1, S), (B, H, T, 1), (B, H, T, S), ()]
)
def test_a_mask_broadcasts(backend: str, shape: tuple[int, ...]) -> None:
    x, mask = draw(B, H, T, S), draw(*shape) > -0.3
    y = softmax(x.to(DEVICE), 0.5, mask.to(DEVICE), backend=backend)
    torch.testing.assert_close(y.cpu(), reference(x, 0.5, mask.expand(x.shape), None))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(B, 1, 1), (T,), (H, 1), ()])
def test_lengths_broadcast(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = draw(B, H, T, S)
    lengths = (draw(*shape) * 3 + 2).to(dtype)  # below 0 and past S too
    y = softmax(x.to(DEVICE), lengths=lengths.to(DEVICE), backend=backend)
    torch.testing.assert_close(y.cpu(), reference(x, 1.0, None, lengths.expand(B, H, T)))


def test_the_triton_backend_reads_a_broadcast_mask_where_it_lies() -> None:
    from bagu.ops.softmax.triton_backend import _fold

    for shape in ((T, S), (B, 1, 1, S), (B, 1, T, S), (1, H, 1, S), (B, H, T, S)):
        mask = torch.zeros(shape, dtype=torch.bool)
        assert _fold(mask.expand(B, H, T, S))[0].data_ptr() == mask.data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_of_any_layout(backend: str) -> None:
    """Five leading dims that no three strides cover, and columns that are not neighbours."""
    x, mask = draw(2, 2, 2, 2, 2, 3), draw(2, 2, 2, 2, 2, 3) > 0
    for laid in (mask.permute(4, 1, 2, 3, 0, 5), mask.permute(5, 0, 1, 2, 3, 4).contiguous().permute(1, 2, 3, 4, 5, 0)):
        y = softmax(x.to(DEVICE), mask=laid.to(DEVICE), backend=backend)
        torch.testing.assert_close(y.cpu(), reference(x, 1.0, laid, None))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_lie_apart(backend: str) -> None:
    for n, close in ((15, 0), (20000, 0), (1031, 1e-6), (20001, 1e-6)):  # odd rows that lie together are cut elsewhere
        wide = draw(3, n + 25).float().to(DEVICE).requires_grad_()
        y, want = softmax(wide[:, :n], backend=backend), softmax(wide[:, :n].contiguous(), backend=backend)
        torch.testing.assert_close(y, want, rtol=close, atol=0)
        a, b = (torch.autograd.grad(out.square().sum(), wide)[0] for out in (y, want))
        torch.testing.assert_close(a, b, rtol=close, atol=close * a.abs().max().item())


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp64_is_fp64_all_through(backend: str) -> None:
    """A scale that fp32 cannot hold, on every path of the kernels."""
    for n in (33, 523, 640, 12289, 16384, 20000, 20001):
        x = draw(2, n).to(DEVICE).requires_grad_()
        dy = draw(2, n, 1).squeeze(-1).to(DEVICE)
        y = softmax(x, 1 / 3, backend=backend)
        want = reference(x, 1 / 3, None, None)
        torch.testing.assert_close(y, want, rtol=1e-12, atol=0)
        torch.testing.assert_close(*(torch.autograd.grad(out, x, dy)[0] for out in (y, want)), rtol=1e-10, atol=1e-17)


@pytest.mark.parametrize(
    "n", [6, 523, 640, 20000, 20001]
)  # a block, a block and a tail, both not aligned and aligned, rows read twice
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_hidden_column_counts_for_nothing(backend: str, n: int) -> None:
    x = draw(2, n).float().to(DEVICE).requires_grad_()
    mask = torch.arange(n, device=DEVICE) % 3 != 1
    dy = draw(2, n).float().to(DEVICE)
    (want,) = torch.autograd.grad(softmax(x, mask=mask, backend=backend), x, dy)
    poisoned = torch.where(mask, dy, torch.nan)
    (got,) = torch.autograd.grad(softmax(x, mask=mask, backend=backend), x, poisoned)
    assert torch.equal(got, want) and not want[:, ~mask].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_input_gives_empty_output(backend: str) -> None:
    for shape in ((0, 5), (3, 0), (0,)):
        x = torch.empty(shape, device=DEVICE, requires_grad=True)
        y = softmax(x, mask=torch.ones(shape, dtype=torch.bool, device=DEVICE), backend=backend)
        assert y.shape == shape
        y.sum().backward()


def test_what_does_not_fit_is_named() -> None:
    x = torch.zeros(B, T, S)
    for bad, word in (
        ({"mask": torch.ones(T, S + 1, dtype=torch.bool)}, "mask"),
        ({"mask": torch.ones(T, S)}, "mask"),
        ({"mask": torch.ones(1, B, T, S, dtype=torch.bool)}, "mask"),
        ({"lengths": torch.ones(T + 1, dtype=torch.int64)}, "lengths"),
        ({"lengths": torch.ones(T)}, "lengths"),
        ({"scale": "big"}, "scale"),
    ):
        with pytest.raises(ArgumentError, match=word):
            softmax(x, **bad)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="x"):
        softmax(torch.zeros(()))
