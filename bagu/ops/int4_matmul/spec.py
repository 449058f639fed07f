"""A linear layer with a 4-bit weight: two values per byte, a scale and an optional zero point per group of 128.

    y[m, n] = sum_k x[m, k] * (q[n, k] - zeros[n, g]) * scales[n, g] + bias[n]        g = k // 128

    packed[n, 64 g + j] = q[n, 128 g + j] + 16 * q[n, 128 g + h + j]        0 <= q <= 15,  0 <= j < h

h is half the number of columns of group g: 64, or less if the last group is shorter. Without `zeros` every zero point
is 8 (symmetric: values -8 … 7). Zero points are whole numbers from -128 to 128, as every 4-bit format has them, so that
q - zeros is exact in 16 bits. Only the weight is quantized: the scaled values are not rounded to the dtype of x, the
sum is accumulated in fp32 (fp64 for fp64) and rounded once, after the bias is added. K is even; the last group is
shorter if 128 does not divide K. There are no gradients.
Dims: M = rows (tokens), K = input features, N = output features, P = K / 2 bytes, G = ceil(K / 128) groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.int4_matmul.layout import num_groups, per_column, unpacked


class Args(NamedTuple):
    x: torch.Tensor
    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bias: torch.Tensor | None


def reference(a: Args) -> torch.Tensor:
    """The definition."""
    K = a.x.shape[-1]
    zero = 8 if a.zeros is None else per_column(a.zeros, K)
    y = a.x @ ((unpacked(a.packed).to(a.x.dtype) - zero) * per_column(a.scales, K)).mT
    return y if a.bias is None else y + a.bias


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    K, P, G = dims["K"], dims["P"], dims["G"]
    if K != 2 * P:
        raise ArgumentError(
            f"int4_matmul: packed has {P} bytes a row, which is {2 * P} values, and x has {K} columns",
            hint="pack a weight of as many columns with quantize_int4; an odd number of columns must be padded",
        )
    if num_groups(K) != G:
        raise ArgumentError(
            f"int4_matmul: scales has {G} groups a row, expected {num_groups(K)} for {K} columns in groups of 128",
            hint="quantize_int4 returns scales of that shape",
        )


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    """Scales are finite, and 0 only for a group whose values are all at the zero point, as `quantize_int4` returns it.
    A scale may be negative. Zero points are whole numbers."""
    scales, zeros = args["scales"], args["zeros"]
    if not bool(scales.isfinite().all()):
        raise ArgumentError(
            "int4_matmul: scales has values that are NaN or infinite",
            hint="check the weight that was quantized: quantize_int4 refuses one that is not finite",
        )
    if zeros is not None and not bool(((zeros == zeros.round()) & (zeros.abs() <= 128)).all()):
        raise ArgumentError(
            "int4_matmul: zeros has values that are not whole numbers from -128 to 128",
            hint="round the zero points, and the weight with them",
        )
    zero = 8 if zeros is None else per_column(zeros, dims["K"])
    if bool(((per_column(scales, dims["K"]) == 0) & (unpacked(args["packed"]) != zero)).any()):
        raise ArgumentError(
            "int4_matmul: scales is 0 for a group whose values are not all at the zero point",
            hint="quantize_int4 returns the scale of each group",
        )


def unsupported(args: Mapping[str, Any]) -> str | None:
    """The reason that the kernel cannot run a call."""
    if args["x"].is_cuda and args["x"].dtype == torch.float64:
        return "Triton compiles no product of fp64 whose second operand is in registers"
    return None


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N, K = case.get("lead", (case.get("M", 1),)), case["N"], case["K"]
    G = num_groups(K)
    x = case.get("scale", 1.0) * streams.normal("x", *lead, K)
    if "plant" in case.params:
        x[0, K // 2] = case["plant"]
    # by group in memory, as quantize_int4 returns them; of either sign, as those of symmetric groups are
    scales = (K**-0.5 / 8) * streams.normal("scales", G, N).t()
    if case.get("zero_group", False):
        scales[:, G // 2] = 0
    zeros = streams.integers("zeros", 0, 16, G, N).t().double() if case.get("zeros", False) else None
    bias = streams.normal("bias", N) if case.get("bias", False) else None
    packed = streams.integers("packed", 0, 256, N, -(-K // 2)).to(torch.uint8)
    return {"x": x, "packed": packed, "scales": scales, "zeros": zeros, "bias": bias}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """A product and a sum for each of M N K; x, the bytes and the scales are read once and y is written once."""
    M, N, K, P, G = (dims[d] for d in "MNKPG")
    return Cost(flops=2 * M * N * K, bytes=N * P + (M * K + N * G + M * N) * itemsize)


SPEC = OpSpec(
    name="int4_matmul",
    signature="x[*M, K], packed[N, P]: u8, scales[N, G]: float, zeros[N, G]?: float, bias[N]? -> y[*M, N]",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    check_values=check_values,
    unsupported=unsupported,
    ulps=1,
    independent=("M", "N"),
    peers=True,
    cases=[
        Case("even", "one full group and powers of two need no masks, so a failure is the math", M=8, N=16, K=128),
        Case("ragged", "no side is a multiple of a block, and the last group is short", M=5, N=23, K=294, zeros=True),
        Case("short", "a row is less than one group", M=3, N=7, K=30),
        Case("two", "a row is one byte, the smallest weight", M=4, N=5, K=2, zeros=True),
        Case("groups", "every group has its own scale and zero point", M=4, N=9, K=640, zeros=True),
        Case("zeros", "a zero point other than 8, up to 15", M=6, N=12, K=256, zeros=True, bias=True),
        Case("bias", "the bias joins the sum before it is rounded", M=7, N=24, K=128, bias=True),
        Case("batched", "the leading dims are several, and are folded into rows", lead=(2, 3), N=12, K=40, bias=True),
        Case("single", "there is no leading dim at all: a matrix times a vector", lead=(), N=17, K=132),
        Case("zero_group", "the scale of a group of zeros is 0", M=3, N=6, K=384, zero_group=True),
        Case("deep", "a long sum, which 16 bits would lose", M=3, N=5, K=9000),
        Case("mixed", "fp32 scales with activations of 16 bits, as a server has them", M=4, N=9, K=256, zeros=True,
             mixed=["scales", "zeros"]),
        Case("split", "K is divided among programs, and the parts are added", M=3, N=40, K=1100, bias=True, sms=8),
        Case("split_zeros", "the same with zero points, and more rows than 16", M=18, N=20, K=1024, zeros=True, sms=8),
        Case("inf_zeros", "an infinity and zero points: no inf - inf", M=4, N=9, K=160, plant=float("inf"), zeros=True),
        Case("nan", "a NaN spoils its own row and no other", M=4, N=9, K=160, plant=float("nan")),
        Case("inf", "an infinity spoils its own row and no other", M=4, N=9, K=160, plant=float("inf")),
        Case("empty", "there is no row, and nothing is launched", M=0, N=9, K=128, bias=True),
        Case("tall", "more rows than the smallest tile has", M=130, N=40, K=160, bias=True),
        Case("decode_up", "a token of 16 requests through the up projection of an 8B model", bench=True,
             M=16, N=14336, K=4096, mixed=["scales"]),
        Case("decode_one", "one request: the weight's bytes are the time", bench=True, M=1, N=14336, K=4096,
             mixed=["scales"]),
        Case("decode_down", "the down projection: the longest sum", bench=True, M=16, N=4096, K=14336,
             mixed=["scales"]),
        Case("decode_zeros", "with zero points, as AWQ has them", bench=True, M=16, N=14336, K=4096, zeros=True,
             mixed=["scales", "zeros"]),
        Case("prefill", "a prompt: the product is the time", bench=True, M=1024, N=14336, K=4096, mixed=["scales"]),
    ],
)  # fmt: skip
