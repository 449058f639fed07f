"""grouped_matmul on Triton: gradients that are not needed, wrong offsets, and no waiting for the device."""

from __future__ import annotations

import pytest
import torch

from bagu.errors import BaguError
from bagu.ops import grouped_matmul
from bagu.ops.catalogue import spec
from tests.ops.points import DEVICE


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_a_frozen_weight_costs_no_gradient() -> None:
    backward = spec("grouped_matmul").module("triton").backward
    dy, x, w, offsets = randn(5, 6), randn(5, 4, seed=1), randn(2, 6, 4, seed=2), ends(2, 5)
    dx, dw = backward(dy, x, w, offsets)
    only_dx = backward(dy, x, w, offsets, needs={"x": True, "w": False})
    only_dw = backward(dy, x, w, offsets, needs={"x": False, "w": True})
    assert torch.equal(only_dx[0], dx) and only_dx[1] is None
    assert only_dw[0] is None and torch.equal(only_dw[1], dw)


def test_an_end_past_the_last_row_reads_no_other_memory() -> None:
    """Offsets are data, and nobody checks them: a kernel must stay inside its tensors."""
    x, w = randn(5, 4), randn(2, 6, 4, seed=1)
    whole = grouped_matmul(x, w, ends(2, 5), backend="triton")
    assert torch.equal(grouped_matmul(x, w, ends(2, 900), backend="triton"), whole)


@pytest.mark.parametrize(
    "offsets, said",
    [(torch.zeros(3, dtype=torch.int32), "offsets"), (torch.zeros(2, dtype=torch.int64), "int32")],
)
def test_wrong_offsets_are_named(offsets: torch.Tensor, said: str) -> None:
    with pytest.raises(BaguError, match=said):
        grouped_matmul(randn(5, 4), randn(2, 6, 4), offsets.to(DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T, E, N, K", [(64, 8, 48, 20), (512, 32, 768, 1024), (4096, 8, 1024, 512)])
def test_a_call_is_captured_in_a_cuda_graph(T: int, E: int, N: int, K: int, dtype: torch.dtype) -> None:
    """The offsets stay on the device, and another routing is another replay. Sums of small integers are exact."""
    whole = lambda *shape: randn(*shape).round().clamp(-2, 2).to(dtype)  # noqa: E731
    x, w, offsets = whole(T, K), whole(E, N, K), ends(*[T] * E)
    grouped_matmul(x, w, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped_matmul(x, w, offsets)
    for seed in range(3):
        cuts = torch.randint(0, T + 1, (E - 1,), generator=torch.Generator().manual_seed(seed)).sort().values.tolist()
        offsets.copy_(ends(*cuts, T))
        graph.replay()
        assert torch.equal(y, grouped_matmul(x.double(), w.double(), offsets, backend="torch").to(dtype))
