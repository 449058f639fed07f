"""A linear layer whose activations and weight are int8 (W8A8): a scale per row of x and per row of w.

    y[m, n] = act(x_scale[m] * w_scale[n] * sum_k x[m, k] * w[n, k] + bias[n])

The sum is an exact int32 (K is below 2^17, so it cannot overflow); scales, bias and activation are computed in fp32
and rounded once to `dtype`. `activation` is None, "gelu" (exact), "silu" or "relu". The op has no gradients, because
integers have none: `int8_linear` quantizes floats, multiplies by this op and passes gradients straight through.
Dims: M = rows (tokens), K = input features, N = output features.
Paper: https://arxiv.org/abs/2208.07339 (LLM.int8(), without its outlier columns)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.ops.activations import ACTIVATIONS, activate
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims

DTYPES = ("float16", "bfloat16", "float32", "float64")
LONGEST = (1 << 17) - 1  # products are at most 2^14, and their sum must be below 2^31


class Args(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None
    dtype: str


def reference(a: Args) -> torch.Tensor:
    """The definition."""
    z = (a.x.double() @ a.w.double().mT).to(a.x_scale.dtype) * a.x_scale.unsqueeze(-1) * a.w_scale
    return activate(z if a.bias is None else z + a.bias, a.activation)


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if args["activation"] not in (None, *ACTIVATIONS):
        raise UnknownName.among("activation of int8_matmul", args["activation"], ACTIVATIONS)
    if args["dtype"] not in DTYPES:
        raise UnknownName.among("dtype of int8_matmul", args["dtype"], DTYPES)
    if dims["K"] > LONGEST:
        raise ArgumentError(
            f"int8_matmul: K is {dims['K']}, expected at most {LONGEST}: a longer sum can overflow int32",
            hint="multiply parts of K and add the results",
        )


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    """Scales are finite and not negative; 0 is the scale of a row of zeros only, as `quantize_int8` returns it."""
    check_scales("int8_matmul", "quantize_int8", args)


def check_scales(op: str, maker: str, args: Mapping[str, Any]) -> None:
    """Raise for scales that the op `maker` does not return."""
    for name in ("x", "w"):
        q, scale = args[name], args[f"{name}_scale"]
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise ArgumentError(
                f"{op}: {name}_scale has values that are NaN, infinite or negative",
                hint=f"check the tensor that {name} was quantized from",
            )
        if bool(((scale == 0) & (q.to(scale.dtype) != 0).any(-1)).any()):
            raise ArgumentError(
                f"{op}: {name}_scale is 0 for a row of {name} that is not all zeros",
                hint=f"{maker} returns the scale of each row",
            )


def past_24_bits(x: torch.Tensor, w: torch.Tensor) -> None:
    """Change integers so that their sum over half of the last dim is past 2^24, and the other half takes it back."""
    half = x.shape[-1] // 2
    x[..., :half], w[..., :half] = (96 + v[..., :half].abs() // 4 for v in (x, w))
    x[..., half : 2 * half], w[..., half : 2 * half] = x[..., :half], -w[..., :half]


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N, K = case.get("lead", (case.get("M", 1),)), case["N"], case["K"]
    least = -128 if case.get("full", False) else -127
    x_scale = case.get("scale", 0.02) * (0.5 + streams.uniform("x_scale", *lead))
    if "plant" in case.params:
        x_scale[-1] = case["plant"]
    x, w = streams.integers("x", least, 128, *lead, K), streams.integers("w", least, 128, N, K)
    if case.get("deep", False):
        past_24_bits(x, w)
    return {
        "x": x.to(torch.int8),
        "w": w.to(torch.int8),
        "x_scale": x_scale,
        "w_scale": (127 * K**0.5) ** -1 * (0.5 + streams.uniform("w_scale", N)),
        "bias": case.get("shift", 1.0) * streams.normal("bias", N) if case.get("bias", False) else None,
        "activation": case.get("activation", None),
        "dtype": case.get("to", streams.choice("dtype", "float32", "float16")),
    }


def cost(dims: Mapping[str, Any], itemsize: int) -> Cost:
    """A product and a sum for each of M N K; x, w and the scales are read once and y is written once."""
    M, N, K = dims["M"], dims["N"], dims["K"]
    out = getattr(torch, dims["dtype"]).itemsize
    return Cost(flops=2 * M * N * K, bytes=(M * K + N * K) * itemsize + M * N * out + 4 * (M + N))


BIG: dict[str, Any] = {"to": "bfloat16", "bench": True, "mixed": ["x_scale", "w_scale"]}

SPEC = OpSpec(
    name="int8_matmul",
    signature=(
        "x[*M, K]: i8, w[N, K]: i8, x_scale[*M]: float, w_scale[N]: float, bias[N]?: float, activation: str?, "
        "dtype: str -> y[*M, N]: given"
    ),
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    check_values=check_values,
    ulps=1,
    independent=("M", "N"),
    peers=True,
    matmul_rate=2.0,
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", M=8, N=16, K=32),
        Case("ragged", "no side is a multiple of a block, so every mask is used", M=5, N=23, K=37),
        Case("bias", "the bias joins the sum before it is rounded", M=7, N=24, K=40, bias=True),
        Case("large_bias", "the bias is 100 times the sum, which survives in what is left", M=6, N=20, K=24, bias=True,
             shift=100.0),
        Case("gelu", "the activation follows the bias", M=9, N=40, K=48, bias=True, activation="gelu", scale=3.0),
        Case("silu", "an activation without a bias", M=6, N=17, K=16, activation="silu", scale=3.0),
        Case("relu", "negative sums are zeros", M=6, N=33, K=80, bias=True, activation="relu"),
        Case("batched", "the leading dims are several, and so are the scales", lead=(2, 3), N=12, K=48, bias=True),
        Case("single", "there is no leading dim at all: one row, one scale", lead=(), N=17, K=24),
        Case("point", "one feature in and one out", M=9, N=1, K=1, bias=True),
        Case("deep", "a sum past 2^24, which fp32 would round", M=3, N=5, K=4001, deep=True, to="float32"),
        Case("full", "-128 is a valid value too: its square is 2^14", M=4, N=9, K=64, full=True),
        Case("loud", "a result past fp16's largest value is an infinity", M=3, N=16, K=64, scale=1e5, to="float16"),
        Case("zero", "a row of zeros has scale 0", M=3, N=16, K=16, plant=0.0),
        Case("nan", "a NaN scale spoils its own row and no other", M=4, N=9, K=16, plant=float("nan")),
        Case("half", "16-bit results are rounded once, from fp32", M=6, N=54, K=64, to="float16", bias=True,
             mixed=["x_scale", "w_scale"]),
        Case("brain", "bf16 is what a caller gets by default", M=6, N=55, K=64, to="bfloat16",
             mixed=["x_scale", "w_scale"]),
        Case("double", "an fp64 result of fp32 scales", M=6, N=10, K=64, to="float64", mixed=["x_scale", "w_scale"]),
        Case("empty", "there is no row, and nothing is launched", M=0, N=9, K=16, bias=True),
        Case("tall", "more rows than a tile has, in several groups of tiles", M=1100, N=300, K=64, bias=True),
        Case("tall_odd", "the same, with rows that are not aligned", M=300, N=150, K=20),
        Case("square_4k", "the size that kernels are compared at", M=4096, N=4096, K=4096, **BIG),
        Case("square_8k", "the same, eight times the work", M=8192, N=8192, K=8192, **BIG),
        Case("llama_up", "the gate and up projection of an 8B model at 16k tokens", M=16384, N=28672, K=4096, **BIG),
        Case("decode", "one token of 64 requests: the weight's bytes are the time", M=64, N=6144, K=4096, **BIG),
    ],
)  # fmt: skip
