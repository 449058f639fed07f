"""The attention calls on a CUDA device that Triton does not run: it cannot, or another kernel is faster.

The figures are for bf16, causal, 16 heads of 128, 16,384 tokens (docs/journal/004). Triton runs packed segments of
different lengths: 337 / 262 against FlashAttention-2's 241 / 214 at up to 4k, 490 / 350 against 291 / 272 at up to 16k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagu.ops.attention import cuda
from bagu.ops.attention.block_sizes import WIDEST
from bagu.ops.attention.shape import Shape, uniform
from bagu.ops.contract.core import Rule


def unsupported(args: Mapping[str, Any]) -> str | None:
    """The reason the Triton kernels cannot run a call; None if they can."""
    widest = max(args["q"].shape[-1], args["v"].shape[-1])
    if args["bias"] is not None:
        return "its kernels have no learned bias by distance"
    if widest > WIDEST:
        return f"its tiles have room for heads of {WIDEST} features, and here is one of {widest}"
    return None


def _shape(args: Mapping[str, Any]) -> Shape:
    return Shape(**{name: args[name] for name in ("causal", "window", "slopes", "bias", "sinks", "softcap")})


def _cudnn_is_faster(args: Mapping[str, Any]) -> bool:
    q, v, shape = args["q"], args["v"], _shape(args)
    length = args["max_len"]
    equal = uniform(q.shape[0], args["cu_seqlens"], length)
    return equal and cuda.fits(q, v, shape) and cuda.prefers_equal(q, v, shape, length)


def _not_measured(args: Mapping[str, Any]) -> bool:
    q, v = args["q"], args["v"]
    return q.shape[0] > 0 and cuda.fits(q, v, _shape(args)) and not cuda.hopper(q.device.index or 0)


PREFER_TORCH = (
    Rule(
        when="segments of one length, causal or full, 16 bits, heads of up to 128 features, on Hopper or newer",
        runs="cuDNN",
        why="581 / 489 against 482 / 346 TFLOP/s at 4k, 638 / 551 against 570 / 389 at 16k (forward / backward, H200);"
        " not in deterministic mode, since its backward does not promise the same bits twice",
        holds=_cudnn_is_faster,
    ),
    Rule(
        when="16 bits, no slopes, bias, sinks or softcap, on a GPU older than Hopper",
        runs="FlashAttention-2",
        why="the Triton kernels are measured on Hopper only",
        holds=_not_measured,
    ),
)
