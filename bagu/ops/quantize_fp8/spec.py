"""Quantization to fp8 (e4m3): the numbers of a row as 8-bit floats and one scale.

    scale = max |x| / 448        q = x / scale, rounded to e4m3, ties to even, so that |q| <= 448 and x ≈ q * scale

Rows of zeros, tiny scales, NaN and infinities are as in `quantize_int8`: a row with an invalid number has an invalid
scale and q = 0. There are no gradients.
Dims: M = rows, N = columns.
Paper: https://arxiv.org/abs/2209.05433 (FP8 formats for deep learning)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.kv_write.quantize import LARGEST
from bagu.ops.quantize_int8.spec import SPEC as INT8

E4M3 = torch.float8_e4m3fn


def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, without the rounding to e4m3."""
    scale = x.abs().amax(-1) / LARGEST[E4M3] if x.shape[-1] else x.new_zeros(x.shape[:-1])
    scale = torch.where(scale < 2.0**-126, 0.0, scale)
    rows = scale.unsqueeze(-1)
    return torch.where((rows > 0) & rows.isfinite(), x / rows, 0.0), scale


def unsupported(args: Mapping[str, Any]) -> str | None:
    """The reason the Triton kernel cannot run a call; None if it can."""
    if args["x"].is_cuda and torch.cuda.get_device_capability(args["x"].device) < (8, 9):
        return "fp8 needs a GPU of compute capability 8.9 or more"
    return None


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    return {"x": INT8.inputs(case, streams)["x"]}


def cost(dims: Mapping[str, Any], itemsize: int) -> Cost:
    """Abs, max, product, round; x is read once, q and the scales are written once."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=4 * M * N, bytes=M * N * (itemsize + 1) + 4 * M)


SPEC = OpSpec(
    name="quantize_fp8",
    signature="x[*M, N] -> q[*M, N]: f8, scale[*M]: acc",
    reference=reference,
    inputs=inputs,
    cost=cost,
    unsupported=unsupported,
    ulps=0.5,
    ulps_of={"scale": 1},
    independent=("M",),
    peers=True,
    cases=[case for case in INT8.cases if case.get("by", "row") == "row"],
)
