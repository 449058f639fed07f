"""Device functions at their edges: many ranges joined, rows past 2^32 in the noise, the polynomial of gelu."""

from __future__ import annotations

import pytest
import torch

from bagu.ops import matmul
from bagu.ops.gumbel_softmax.noise import LOW, gumbel, philox
from tests.ops.points import DEVICE

triton = pytest.importorskip("triton")
tl = triton.language

from bagu.ops.gumbel_softmax.wide_kernels import noisy  # noqa: E402
from bagu.ops.kernels.gemm import activated, gelu_and_slope_16  # noqa: E402
from bagu.ops.paged_attention.join import RANGES, join  # noqa: E402


@pytest.mark.parametrize("splits", [1, RANGES, RANGES + 1, 2 * RANGES + 3])
def test_ranges_are_joined_however_many_there_are(splits: int) -> None:
    """The last range has the largest scores, one of the first has no keys and NaN for values."""
    g = torch.Generator().manual_seed(splits)
    parts, lse = torch.randn(splits, 2, 3, 8, generator=g), torch.randn(splits, 2, 3, generator=g)
    lse[-1] += 3.0
    if splits > 1:
        lse[1], parts[1] = -torch.inf, torch.nan
    weights = (lse.double() * torch.tensor(2.0).log()).softmax(0)
    want = (weights[..., None] * parts.double().nan_to_num()).sum(0)
    out, total = torch.empty(2, 3, 8, device=DEVICE), torch.empty(2, 3, device=DEVICE)
    join(parts.to(DEVICE), lse.to(DEVICE), out, total)
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        total.cpu().double(), (lse.double() * torch.tensor(2.0).log()).logsumexp(0), rtol=1e-6, atol=1e-6
    )


@triton.jit
def _noise_of_rows(x_ptr, y_ptr, first, seed, N: tl.constexpr):
    m = tl.zeros([1, 1], tl.int64) + first + tl.program_id(0)
    n = tl.arange(0, N)[None, :]
    z = noisy(x_ptr, m, n, tl.arange(0, N // 4)[None, :], n < N, 0, 1.0, 0.0, seed, tl.float32)
    tl.store(y_ptr + tl.program_id(0) * N + n, z)


@pytest.mark.parametrize("first", [2**31 - 2, 2**32 - 2, 5 * 2**32 + 7])
def test_the_noise_of_rows_past_2_31(first: int) -> None:
    y, seed = torch.empty(4, 16, device=DEVICE), 2**35 + 11
    _noise_of_rows[(4,)](torch.zeros(16, device=DEVICE), y, first, seed, N=16)
    row, column, key = torch.arange(first, first + 4)[:, None], torch.arange(4), torch.tensor(seed)
    quad = philox((column, row & LOW, row >> 32, torch.zeros_like(column)), (key & LOW, key >> 32))
    want = gumbel(torch.stack(torch.broadcast_tensors(*quad), -1).flatten(-2), torch.float64)
    torch.testing.assert_close(y.cpu().double(), want, rtol=1e-5, atol=1e-6)


@triton.jit
def _gelu_of(x_ptr, y_ptr, slope_ptr, N: tl.constexpr):
    z = tl.load(x_ptr + tl.arange(0, N))
    y, slope = gelu_and_slope_16(z)
    tl.store(y_ptr + tl.arange(0, N), activated(z, "gelu", True))
    tl.store(y_ptr + N + tl.arange(0, N), y)
    tl.store(slope_ptr + tl.arange(0, N), slope)


def test_the_polynomial_of_gelu() -> None:
    """Phi to 3e-5 of itself from -6 to 6: a coefficient that is 1 % off shows."""
    x = torch.linspace(-6, 6, 1024, device=DEVICE)
    y, slope = torch.empty(2, 1024, device=DEVICE), torch.empty(1024, device=DEVICE)
    _gelu_of[(1,)](x, y, slope, N=1024)
    z = x.double().cpu()
    phi = torch.special.erfc(-z / 2**0.5) / 2
    for made in y.cpu().double():
        torch.testing.assert_close(made, z * phi, rtol=3e-5, atol=0)
    density = (-z * z / 2).exp() / (2 * torch.pi) ** 0.5
    torch.testing.assert_close(slope.cpu().double(), phi + z * density, rtol=0, atol=3e-5)


def test_long_sums_in_fp32_carry_their_rounding_errors() -> None:
    """256 tiles of positive terms: a plain sum of the tiles is several spacings off, a compensated one below one."""
    x, w = (torch.rand(n, 8192, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (7, 9))
    off = matmul(x, w, backend="triton").double() - x.double() @ w.double().T
    assert off.abs().max() < 2.0**-12  # the spacing of floats from 2048 on, where the sums are
