"""One linear layer per expert, on the rows that are routed to it.

    y[t, n] = sum_k x[t, k] * w[e, n, k]        offsets[e - 1] <= t < offsets[e]; the first expert starts at 0

The rows are sorted by expert, and an expert's rows end at offsets[e]; it may have none. Rows past the last end are
zeros, in y and in dx. Sums are accumulated in fp32 (fp64 for fp64) and rounded once.
Dims: T = rows (a token has one for each of its experts), E = experts, K = input features, N = output features.
Paper: https://arxiv.org/abs/2211.15841 (MegaBlocks)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.contract.core import Case, Cost, OpSpec, Streams


def reference(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The definition: each row times the weight of its expert; rows past the last end use an extra weight of zeros."""
    expert = torch.searchsorted(offsets, torch.arange(x.shape[0], dtype=torch.int32, device=x.device), right=True)
    each = torch.cat((w, w.new_zeros(1, *w.shape[1:])))[expert]
    return torch.where((expert < w.shape[0]).unsqueeze(-1), (each * x.unsqueeze(-2)).sum(-1), 0.0)


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    """`rows` gives the number of rows per expert; without it the ends are random, so that the numbers are unequal."""
    E, N, K = case["E"], case["N"], case["K"]
    rows = case.get("rows", None)
    T = case.get("T", sum(rows or ()))
    if rows is None:
        cuts = streams.integers("cuts", 0, T + 1, E - 1).sort().values
        offsets = torch.cat((cuts, cuts.new_full((1,), T)))
    else:
        offsets = torch.tensor(rows).cumsum(0)
    x = streams.normal("x", T, K)
    if "plant" in case.params:
        x[case["plant"], K // 2] = case.get("value", float("nan"))
    return {"x": x, "w": K**-0.5 * streams.normal("w", E, N, K), "offsets": offsets.to(torch.int32)}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """A product and a sum for each of T N K; x and every expert's weight are read once, y is written once."""
    T, E, N, K = dims["T"], dims["E"], dims["N"], dims["K"]
    return Cost(flops=2 * T * N * K, bytes=(T * K + E * N * K + T * N) * itemsize + 4 * E)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Two grouped GEMMs; dy, x and w are read once, dx and dw are written once."""
    T, E, N, K = dims["T"], dims["E"], dims["N"], dims["K"]
    return Cost(flops=4 * T * N * K, bytes=(2 * T * K + 2 * E * N * K + T * N) * itemsize + 4 * E)


SPEC = OpSpec(
    name="grouped_matmul",
    signature="x[T, K], w[E, N, K], offsets[E]: i32 -> y[T, N]",
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x", "w"),
    saves=("x", "w", "offsets"),
    ulps=1,
    nonempty=("E",),
    independent=("T", "N"),
    peers=True,
    cases=[
        Case("even", "equal shares and powers of two, so a failure here is the math", E=2, N=16, K=32, rows=(8, 8)),
        Case("ragged", "unequal shares, and no side is a multiple of a block", E=3, N=23, K=37, rows=(5, 1, 7)),
        Case("empty", "experts without rows, first, between and last: their dw is zero", E=5, N=8, K=16,
             rows=(0, 3, 0, 4, 0)),
        Case("all_to_one", "every row went to one expert: routing has collapsed", E=4, N=8, K=16, rows=(0, 0, 9, 0)),
        Case("spare", "rows past the last end are zeros, whatever they hold", E=2, N=16, K=8, rows=(3, 4), T=11,
             plant=9),
        Case("no_rows", "no row was sent to any expert", E=2, N=8, K=8, rows=(0, 0), T=3),
        Case("one", "a single expert is a plain matmul", E=1, N=24, K=40, rows=(6,)),
        Case("many", "more experts than rows", E=12, N=8, K=8, rows=(1, 0, 0, 2) * 3),
        Case("thin", "one feature in and one out", E=2, N=1, K=1, rows=(4, 2)),
        Case("aligned", "aligned rows, and experts of more rows than a tile of 64", E=2, N=128, K=64, rows=(70, 66)),
        Case("frozen", "the weights are not trained: dw is not computed", E=2, N=8, K=16, rows=(3, 4), frozen=["w"]),
        Case("unaligned", "a weight whose rows are not aligned", E=2, N=40, K=20, rows=(70, 66)),
        Case("first", "the first layer: dx is not computed", E=2, N=8, K=16, rows=(3, 4), frozen=["x"]),
        Case("tall", "experts of more rows than the largest tile has", E=2, N=24, K=16, rows=(140, 133)),
        Case("nan", "a NaN spoils its own row, and its own expert's dw", E=3, N=8, K=16, rows=(2, 3, 2), plant=3),
        Case("inf", "an infinity early in a sum of several tiles stays one", E=2, N=5, K=80, rows=(2, 1), plant=1,
             value=float("inf")),
        Case("no_tokens", "there is no row at all: dw is zero", E=2, N=8, K=8, rows=(0, 0)),
        Case("deep", "a long sum, which 16 bits would lose", E=2, N=5, K=1000, rows=(2, 3),
             frozen=["x", "w"]),
        Case("qwen3_30b", "the gate and up of 128 experts at 16k tokens, 8 each", bench=True, T=131072, E=128, N=1536,
             K=2048),
        Case("mixtral", "8 large experts at 16k tokens, 2 each", bench=True, T=32768, E=8, N=28672, K=4096),
        Case("mixtral_4k", "the same at 4,096 tokens", bench=True, T=8192, E=8, N=28672, K=4096),
        Case("gpt_oss", "64 experts at 4,096 tokens, 2 each", bench=True, T=8192, E=64, N=5760, K=2880),
        Case("decode", "one token of 64 requests, 8 experts each", bench=True, T=512, E=128, N=1536, K=2048),
    ],
)  # fmt: skip
