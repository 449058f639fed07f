"""A linear layer with an epilogue: every output feature is a weighted sum of the input features.

    y[m, n] = act(row_scale[m] * column_scale[n] * sum_k x[m, k] * w[n, k] + bias[n]) + residual[m, n]

Every part of the epilogue is optional. The sum is accumulated in fp32 (fp64 for fp64). The Triton backend rounds once,
after the epilogue; cuBLAS rounds a 16-bit sum after its bias, and the rest of the epilogue rounds again. The weight is
[out, in], as in checkpoints. `activation` is None, "gelu" (exact), "gelu_tanh", "silu" or "relu".
Dims: M = rows (tokens), K = input features, N = output features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.ops.activations import ACTIVATIONS, activate
from bagu.ops.contract.core import Case, Cost, OpSpec, Rule, Streams
from bagu.ops.contract.signature import Dims

FEW = 32  # rows of a decode step


class Args(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    row_scale: torch.Tensor | None
    column_scale: torch.Tensor | None
    activation: str | None


def reference(a: Args) -> torch.Tensor:
    """The definition. The harness runs it in fp64, and its autograd gives the true gradients.

    It is a matrix product so its fp32 error is that of a GEMM: `sum` adds pairwise and is more exact than any GEMM.
    """
    z = a.x @ a.w.mT
    z = z if a.row_scale is None else z * a.row_scale.unsqueeze(-1)
    z = z if a.column_scale is None else z * a.column_scale
    y = activate(z if a.bias is None else z + a.bias, a.activation)
    return y if a.residual is None else y + a.residual


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if args["activation"] not in (None, *ACTIVATIONS):
        raise UnknownName.among("activation of matmul", args["activation"], ACTIVATIONS)


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    """Scales are finite and not 0: a scale of 0 would hide its whole row or column."""
    for name in ("row_scale", "column_scale"):
        scale = args[name]
        if scale is not None and not bool((scale.isfinite() & (scale != 0)).all()):
            raise ArgumentError(
                f"matmul: {name} has values that are NaN, infinite or 0",
                hint="a row of zeros that was quantized can have any other scale, such as 1",
            )


def has_epilogue(args: Mapping[str, Any]) -> bool:
    """Whether a kernel saves passes over y: cuBLAS adds a bias itself."""
    return any(args[name] is not None for name in ("activation", "row_scale", "column_scale"))


def needs_gradient(args: Mapping[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(v.requires_grad for v in args.values() if isinstance(v, torch.Tensor))


def is_decode(args: Mapping[str, Any]) -> bool:
    """Whether few_rows.py can compute the product, and is faster than cuBLAS."""
    K, M = args["w"].shape[1], args["x"].shape[:-1].numel()
    if args["x"].element_size() != 2 or args["residual"] is not None or has_epilogue(args):
        return False
    return K % 512 == 0 < M <= FEW


def by_tma(args: Mapping[str, Any]) -> bool:
    (N, K), size = args["w"].shape, args["x"].element_size()
    return bool(size == 2 and K % 16 == 0 and N % 16 == 0)


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N, K = case.get("lead", (case.get("M", 1),)), case["N"], case["K"]
    x = case.get("offset", 0.0) + case.get("scale", 1.0) * streams.normal("x", *lead, K)
    if "plant" in case.params:
        x[0, K // 2] = case["plant"]
    bias = case.get("shift", 1.0) * streams.normal("bias", N) if case.get("bias", False) else None
    scales = case.get("scales", "")
    return {
        "x": x,
        "w": K**-0.5 * streams.normal("w", N, K),
        "bias": bias,
        "residual": streams.normal("residual", *lead, N) if case.get("residual", False) else None,
        "row_scale": 0.5 + streams.uniform("row_scale", *lead) if "row" in scales else None,
        "column_scale": 0.5 + streams.uniform("column_scale", N) if "column" in scales else None,
        "activation": case.get("activation", None),
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """A product and a sum for each of M N K; x and w are read once and y is written once."""
    M, N, K = dims["M"], dims["N"], dims["K"]
    return Cost(flops=2 * M * N * K, bytes=(M * K + N * K + M * N) * itemsize)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Two GEMMs, dy @ w and dy.T @ x; dy, x and w are read once, dx and dw are written once."""
    M, N, K = dims["M"], dims["N"], dims["K"]
    return Cost(flops=4 * M * N * K, bytes=(2 * M * K + 2 * N * K + M * N) * itemsize)


SPEC = OpSpec(
    name="matmul",
    signature=(
        "x[*M, K], w[N, K], bias[N]?, residual[*M, N]?, row_scale[*M]?: float, column_scale[N]?: float,"
        " activation: str? -> y[*M, N]"
    ),
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x", "w", "bias", "residual", "row_scale", "column_scale"),
    saves=("x", "w", "bias", "row_scale", "column_scale"),
    refuse=refuse,
    check_values=check_values,
    ulps=1,
    # On a GPU the slope of an activation is taken at a 16-bit sum, and its product with dy is rounded before the GEMMs.
    ulps_of={"dx": 1.5, "dw": 1.5},
    independent=("M", "N"),
    peers=True,
    prefer_torch=(
        Rule(
            when="without an activation and scales, outside invariant mode, for more rows than a decode step has",
            runs="cuBLAS",
            why="on an H200 the kernel has 0.90 to 0.98 of its speed at the sizes of an 8B model, 0.76 for 64 rows: "
            "cuBLAS may choose the order of a sum by the number of rows; a residual gains nothing (1.00)",
            holds=lambda args: not (has_epilogue(args) or is_decode(args)),
        ),
        Rule(
            when="a gradient is needed",
            runs="cuBLAS and torch's activation",
            why="autograd saves the sums before the activation, which the kernel's backward computes again",
            holds=needs_gradient,
        ),
        Rule(
            when="x is not 16-bit, or K or N is no multiple of 16",
            runs="cuBLAS and torch's activation",
            why="the persistent kernel does not read such rows, and the other one is slower",
            holds=lambda args: not by_tma(args),
        ),
    ),
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", M=8, N=16, K=32),
        Case("ragged", "no side is a multiple of a block, so every mask is used; TMA reads it", M=5, N=48, K=48),
        Case("bias", "the bias joins the sum before it is rounded", M=7, N=24, K=40, bias=True),
        Case("large_bias", "the bias is 100 times the sum, which survives in what is left", M=6, N=20, K=24, bias=True,
             shift=100.0),
        Case("batched", "the leading dims are several, and are folded into rows", lead=(2, 3), N=12, K=40, bias=True),
        Case("single", "there is no leading dim at all: one row, a matrix times a vector", lead=(), N=17, K=24),
        Case("point", "one feature in and one out", M=9, N=1, K=1, bias=True),
        Case("thin", "one input feature: an outer product, with nothing to sum", M=6, N=33, K=1),
        Case("head", "one output feature: the bias's gradient sums many rows", M=300, N=1, K=16, bias=True),
        Case("deep", "a long sum, which 16 bits would lose", M=3, N=5, K=9000),
        Case("offset", "the mean of x is 30 times its spread, so partial sums pass the result", M=4, N=8, K=256,
             offset=30.0),
        Case("loud", "products pass fp16's largest value and the sum comes back below it", M=4, N=9, K=64, scale=2e4),
        Case("nan", "a NaN spoils its own row and no other", M=4, N=9, K=16, plant=float("nan")),
        Case("inf", "an infinity spoils its own row and no other", M=4, N=9, K=16, plant=float("inf")),
        Case("empty", "there is no row, and nothing is launched", M=0, N=9, K=16, bias=True),
        Case("few", "one row: few_rows.py, with a tile that is not full", M=1, N=40, K=512, bias=True),
        Case("few_long", "the smallest tile of few_rows.py, with few stages", M=2, N=2064, K=512),
        Case("several", "17 to 32 rows, and a middle tile", M=21, N=2080, K=512),
        Case("few_wide", "the widest tile of few_rows.py, as of a head", M=2, N=8208, K=512),
        Case("tall", "more rows than the smallest tile has", M=130, N=40, K=32, bias=True),
        Case("tall_odd", "the same, with rows that are not aligned", M=70, N=20, K=20),
        Case("gelu", "the activation follows the bias", M=9, N=48, K=48, bias=True, activation="gelu", scale=2.0,
             sms=1),
        Case("gelu_tanh", "GPT-2's gelu, without a bias", M=9, N=32, K=48, activation="gelu_tanh", scale=2.0, sms=1),
        Case("silu", "an activation without a bias", M=6, N=17, K=16, activation="silu", scale=3.0),
        Case("relu", "negative sums are zeros, and so are their gradients", M=6, N=33, K=24, bias=True,
             activation="relu"),
        Case("residual", "the residual is added after the activation", M=7, N=32, K=48, bias=True, residual=True,
             activation="silu", sms=1),
        Case("row_scale", "a factor per row, of which the bias has none", M=6, N=20, K=24, bias=True, scales="row"),
        Case("column_scale", "a factor per column, and no bias", M=6, N=32, K=32, scales="column", sms=1),
        Case("whole", "every part of the epilogue at once, with fp32 scales, in several leading dims", lead=(2, 3),
             N=32, K=32, bias=True, residual=True, scales="row, column", activation="gelu",
             mixed=["row_scale", "column_scale"], sms=1),
        Case("whole_odd", "the same, with rows that are not aligned", M=5, N=23, K=37, bias=True, residual=True,
             scales="row, column", activation="gelu_tanh"),
        Case("inf_gelu", "gelu passes an infinity on", M=4, N=16, K=16, plant=float("inf"), activation="gelu", sms=1),
        Case("several_swapped", "the factors change places, and a tile is not full", M=18, N=4104, K=512, bias=True),
        Case("square_4k", "the size that kernels are compared at", bench=True, M=4096, N=4096, K=4096),
        Case("square_8k", "the same, eight times the work", bench=True, M=8192, N=8192, K=8192),
        Case("mlp_up", "the up projection of an MLP with its bias and gelu", bench=True, M=8192, N=16384, K=4096,
             bias=True, activation="gelu"),
        Case("mlp_down", "its down projection, which adds the residual", bench=True, M=8192, N=4096, K=16384,
             bias=True, residual=True),
        Case("llama_qkv", "the QKV projection of an 8B model at 16k tokens", bench=True, M=16384, N=6144, K=4096),
        Case("llama_up", "its fused gate and up projection", bench=True, M=16384, N=28672, K=4096),
        Case("llama_down", "its down projection: the longest sum", bench=True, M=16384, N=4096, K=14336),
        Case("decode", "one token of 64 requests: the weight's bytes are the time", bench=True, M=64, N=6144, K=4096),
    ],
)  # fmt: skip
