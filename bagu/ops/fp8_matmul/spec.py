"""A linear layer whose activations and weight are fp8 (e4m3): a scale per row of x and per row of w.

    y[m, n] = act(x_scale[m] * w_scale[n] * sum_k x[m, k] * w[n, k] + bias[n]) + residual[m, n]

Scales, bias, activation and residual are computed in fp32 and rounded once to `dtype`. The sum is fp32, but Hopper's
fp8 instructions keep only about 14 bits of it: the Triton kernel adds their sums of 128 terms in fp32, and the error
stays below a rounding to 16 bits. So `dtype` is bfloat16 or float16. `activation` is None, "gelu" (exact), "gelu_tanh",
"silu" or "relu". Dims: M = rows (tokens), K = input features, N = output features.
Paper: https://arxiv.org/abs/2209.05433 (FP8 formats for deep learning)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.ops.activations import ACTIVATIONS, activate
from bagu.ops.contract.core import Case, OpSpec, Rule, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.int8_matmul.spec import BIG, check_scales, cost
from bagu.ops.kernels.launch import is_hopper

E4M3 = torch.float8_e4m3fn
DTYPES = ("bfloat16", "float16")


class Args(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    activation: str | None
    dtype: str


def reference(a: Args) -> torch.Tensor:
    """The definition."""
    z = (a.x @ a.w.mT) * a.x_scale.unsqueeze(-1) * a.w_scale
    y = activate(z if a.bias is None else z + a.bias, a.activation)
    return y if a.residual is None else y + a.residual


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if args["activation"] not in (None, *ACTIVATIONS):
        raise UnknownName.among("activation of fp8_matmul", args["activation"], ACTIVATIONS)
    if args["dtype"] not in DTYPES:
        raise UnknownName.among("dtype of fp8_matmul", args["dtype"], DTYPES)
    for name in ("x", "w"):
        if args[name].dtype != E4M3:
            raise ArgumentError(
                f"fp8_matmul: {name} has dtype {args[name].dtype}, expected {E4M3}",
                hint="quantize_fp8 returns such rows with their scales; matmul multiplies 16 bits",
            )


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    """As of `int8_matmul`: 0 is the scale of a row of zeros only, as `quantize_fp8` returns it."""
    check_scales("fp8_matmul", "quantize_fp8", args)


def unsupported(args: Mapping[str, Any]) -> str | None:
    """The reason that the kernel cannot run a call."""
    if args["x"].shape[-1] % 16:
        return f"the kernel reads rows by TMA, in units of 16 bytes, and K is {args['x'].shape[-1]}"
    if args["x"].is_cuda and not is_hopper(args["x"].device):
        return "the kernel needs a Hopper GPU"
    return None


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N, K = case.get("lead", (case.get("M", 1),)), case["N"], case["K"]
    x_scale = case.get("scale", 1.0) / 16 * (0.5 + streams.uniform("x_scale", *lead))
    if "plant" in case.params:
        x_scale[-1] = case["plant"]
    return {
        "x": (16 * streams.normal("x", *lead, K)).to(E4M3),
        "w": (16 * streams.normal("w", N, K)).to(E4M3),
        "x_scale": x_scale,
        "w_scale": K**-0.5 / 16 * (0.5 + streams.uniform("w_scale", N)),
        "bias": streams.normal("bias", N) if case.get("bias", False) else None,
        "residual": streams.normal("residual", *lead, N) if case.get("residual", False) else None,
        "activation": case.get("activation", None),
        "dtype": case.get("to", streams.choice("dtype", "bfloat16", "float16")),
    }


def takes_scaled_mm(x: torch.Tensor, w: torch.Tensor, dtype: str) -> bool:
    """Whether torch._scaled_mm multiplies these with a scale per row."""
    fits = x.numel() > 0 and x.shape[-1] % 16 == 0 and w.shape[0] % 16 == 0 and dtype == "bfloat16"
    return x.is_cuda and fits and is_hopper(x.device)


SPEC = OpSpec(
    name="fp8_matmul",
    signature=(
        "x[*M, K]: any, w[N, K]: any, x_scale[*M]: float, w_scale[N]: float, bias[N]?: float, residual[*M, N]?: float, "
        "activation: str?, dtype: str -> y[*M, N]: given"
    ),
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
    prefer_torch=(
        Rule(
            when="the result is bfloat16 and N a multiple of 16",
            runs="torch._scaled_mm",
            why="with the same error it takes 106 and 819 us at 4096^3 and 8192^3 on an H200, the kernel 144 and 1306",
            holds=lambda args: takes_scaled_mm(args["x"], args["w"], args["dtype"]),
        ),
    ),
    matmul_rate=2.0,
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", M=8, N=16, K=32),
        Case("ragged", "no side is a multiple of a block, so every mask is used", M=5, N=23, K=48),
        Case("bias", "the bias joins the sum before it is rounded", M=7, N=24, K=48, bias=True),
        Case("gelu", "the activation follows the bias", M=9, N=40, K=48, bias=True, activation="gelu", scale=2.0),
        Case("whole", "every part of the epilogue at once, in several leading dims", lead=(2, 3), N=24, K=48, bias=True,
             residual=True, activation="silu"),
        Case("whole_odd", "the same, with rows of y that are not aligned", M=6, N=17, K=32, bias=True, residual=True,
             activation="gelu_tanh"),
        Case("batched", "the leading dims are several, and so are the scales", lead=(2, 3), N=12, K=48),
        Case("single", "there is no leading dim at all: one row, one scale", lead=(), N=17, K=32),
        Case("deep", "a sum of several blocks of K", M=3, N=5, K=9008),
        Case("nan", "a NaN scale spoils its own row and no other", M=4, N=9, K=16, plant=float("nan")),
        Case("mixed", "fp32 scales for results of 16 bits, as callers have them", M=6, N=56, K=64, to="float16",
             bias=True, mixed=["x_scale", "w_scale"]),
        Case("odd", "K is no multiple of 16, which torch alone multiplies", M=5, N=23, K=37, bias=True),
        Case("empty", "there is no row, and nothing is launched", M=0, N=9, K=16, bias=True),
        Case("tall", "more rows than a tile has, in several groups of tiles", M=300, N=150, K=160, bias=True),
        Case("square_4k", "the size that kernels are compared at", M=4096, N=4096, K=4096, **BIG),
        Case("square_8k", "the same, eight times the work", M=8192, N=8192, K=8192, **BIG),
        Case("decode", "one token of 64 requests: the weight's bytes are the time", M=64, N=6144, K=4096, **BIG),
    ],
)  # fmt: skip
