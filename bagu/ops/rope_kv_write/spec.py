"""The attention inputs of new tokens, from the fused QKV projection: QK norm, RoPE, and the write to the paged cache.

    q, k, v = qkv[t, g, : n], qkv[t, g, n], qkv[t, g, n + 1]        n = C - 2 query heads per group
    q, k    = rms_norm(q, q_weight), rms_norm(k, k_weight)          with QK norm
    q, k    = rope(q), rope(k)                                      with cos and sin, a row per token
    k and v go to slot `slots[t]` of their caches (kv_write); q is returned

A norm's result is rounded to the dtype of qkv, as between the separate ops. With an 8-bit cache it is not: keys are
rounded once, when they are quantized. The op changes the caches and their scales in place. There are no gradients.

Dims: T = new tokens, G = key heads, C = heads of a group, D = head dim, H = G * n = query heads, R = rotated pairs,
2R <= D, N = blocks, B = slots per block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.contract.values import check_range
from bagu.ops.kv_write.quantize import check_cache
from bagu.ops.kv_write.spec import filled
from bagu.ops.kv_write.spec import reference as write
from bagu.ops.rms_norm.spec import reference as rms_norm
from bagu.ops.rope import spec as rope

INF, NAN = float("inf"), float("nan")


class Args(NamedTuple):
    qkv: torch.Tensor
    slots: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    layout: str


def reference(a: Args) -> torch.Tensor:
    """The definition, by the definitions of the separate ops."""
    q, k, v = a.qkv[:, :, :-2].flatten(1, 2), a.qkv[:, :, -2], a.qkv[:, :, -1]
    if a.q_weight is not None and a.k_weight is not None:
        q, k = rms_norm(q, a.q_weight, a.eps), rms_norm(k, a.k_weight, a.eps)
    if a.cos is not None and a.sin is not None:
        q, k = (rope.reference(rope.Args(x, a.cos, a.sin, None, a.layout)) for x in (q, k))
    write(k, a.slots, a.k_cache, a.k_scale)
    write(v, a.slots, a.v_cache, a.v_scale)
    return q


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    """cos and sin are independent random numbers, so that a kernel that swaps them fails."""
    T, G, n, D, R = case["T"], case["G"], case["n"], case["D"], case.get("R", 0)
    N, B = case.get("N", 5), case.get("B", 4)
    norm, dtype = case.get("norm", False), case.get("dtype", None)
    qkv = streams.normal("qkv", T, G, n + 2, D) * case.get("size", 1.0)
    for head, value in case.get("plant", {}).items():
        qkv[1, 0, head, D // 2] = value
    (k_cache, k_scale), (v_cache, v_scale) = (filled(streams, name, (N, B, G, D), dtype) for name in ("k", "v"))
    return {
        "qkv": qkv,
        "slots": torch.randperm(N * B, generator=torch.Generator().manual_seed(1))[:T],
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "cos": 2 * streams.uniform("cos", T, R) - 1 if R else None,
        "sin": 2 * streams.uniform("sin", T, R) - 1 if R else None,
        "q_weight": 1 + 0.1 * streams.normal("q_weight", D) if norm else None,
        "k_weight": 1 + 0.1 * streams.normal("k_weight", D) if norm else None,
        "eps": case.get("eps", streams.choice("eps", 1e-6, 0.02, 0.7)),
        "layout": case.get("layout", "half"),
    }


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if args["layout"] not in rope.LAYOUTS:
        raise UnknownName.among("layout", args["layout"], rope.LAYOUTS)
    if dims["C"] < 3:
        raise ArgumentError(
            f"rope_kv_write: a group of qkv has {dims['C']} heads, expected 3 or more",
            hint="the query heads of a key head, its key and its value",
        )
    for one, other in (("cos", "sin"), ("q_weight", "k_weight"), ("k_scale", "v_scale")):
        if (args[one] is None) != (args[other] is None):
            raise ArgumentError(f"rope_kv_write: one of {one} and {other} is None", hint="pass both or neither")
    if args["cos"] is not None and 2 * dims["R"] > dims["D"]:
        raise ArgumentError(
            f"rope_kv_write: cos has {dims['R']} pairs, and a head has {dims['D']} features",
            hint="the tables have at most half as many columns as a head has features",
        )
    for name in ("k", "v"):
        check_cache("rope_kv_write", f"{name}_cache", args[f"{name}_cache"], args[f"{name}_scale"], args["qkv"].dtype)


def unsupported(args: Mapping[str, Any]) -> str | None:
    """The reason the Triton kernel cannot run a call; None if it can."""
    old = args["qkv"].is_cuda and torch.cuda.get_device_capability(args["qkv"].device) < (8, 9)
    if old and args["k_cache"].dtype == torch.float8_e4m3fn:
        return "fp8 needs a GPU of compute capability 8.9 or more"
    return None


def derive(args: Mapping[str, Any], dims: Dims) -> Dims:
    return {"H": dims["G"] * (dims["C"] - 2), "cache_itemsize": args["k_cache"].dtype.itemsize}


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    check_range("rope_kv_write", "slots", args["slots"], dims["N"] * dims["B"], "the cache")


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """With norm and rotation: four operations per element for each. qkv is read once; q, k and v are written once."""
    T, G, C, D = (dims[n] for n in "TGCD")
    moved = T * G * D * (C * itemsize + (C - 2) * itemsize + 2 * dims["cache_itemsize"])
    return Cost(flops=8 * T * G * (C - 1) * D, bytes=moved + 8 * T + 8 * T * dims.get("R", 0))


NORMED: dict[str, Any] = {"G": 2, "n": 2, "D": 16, "R": 8, "norm": True}
SPEC = OpSpec(
    name="rope_kv_write",
    signature="qkv[T, G, C, D], slots[T]: i64, k_cache[N, B, G, D]: any, v_cache[N, B, G, D]: any,"
    " k_scale[N, B, G]?: acc, v_scale[N, B, G]?: acc, cos[T, R]?: float, sin[T, R]?: float, q_weight[D]?: float,"
    " k_weight[D]?: float, eps: float, layout: str -> q[T, H, D]",
    mutates=("k_cache", "v_cache", "k_scale", "v_scale"),
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    derive=derive,
    refuse=refuse,
    unsupported=unsupported,
    check_values=check_values,
    ulps=2,  # a norm is rounded before the rotation
    nonempty=("N", "B", "G", "D"),
    independent=("G",),
    composed=True,
    cases=[
        Case("even", "QK norm and RoPE of every feature, with grouped queries", T=6, **NORMED),
        Case("ragged", "no size is a power of two, and some features are not rotated", T=7, G=3, n=3, D=11, R=4,
             norm=True, B=3, N=7),
        Case("interleaved", "pairs are neighbours, and some features are not rotated", T=5, G=2, n=1, D=10, R=4,
             norm=True, layout="interleaved"),
        Case("interleaved_whole", "pairs are neighbours, every feature is rotated", T=3, G=1, n=4, D=8, R=4,
             layout="interleaved", norm=True),
        Case("rope", "RoPE without a norm, as in Llama", T=5, G=2, n=2, D=8, R=4),
        Case("norm", "a norm without RoPE, an odd head", T=5, G=2, n=2, D=9, norm=True),
        Case("copy", "neither of them: q is a copy", T=5, G=2, n=3, D=9),
        Case("mha", "one query head per key head", T=4, G=3, n=1, D=8, R=4, norm=True),
        Case("mqa", "one key head, and many query heads", T=2, G=1, n=40, D=8, R=4, norm=True),
        Case("empty", "there is no token, and nothing is launched", T=0, **NORMED),
        Case("one", "one token: its neighbours in the caches keep what they hold", T=1, **NORMED),
        Case("faint", "x^2 is near eps, so a kernel that drops eps shows it", T=4, size=1e-3, eps=1e-6, **NORMED),
        Case("mixed", "tables and weights stay fp32 beside 16-bit activations", T=4,
             mixed=["cos", "sin", "q_weight", "k_weight"], **NORMED),
        Case("nan", "a NaN in the value or in a query does not reach the key", T=4, plant={0: NAN, 3: NAN}, **NORMED),
        Case("inf", "an infinite value is copied: 0 * inf is NaN", T=4, plant={3: INF}, **NORMED),
        Case("int8", "keys and values are quantized, with a scale per token and head", T=6, dtype="int8", **NORMED),
        Case("int8_ragged", "the same, no size a power of two", T=7, G=3, n=3, D=11, R=4, norm=True, B=3, N=7,
             dtype="int8", size=20.0),
        Case("int8_copy", "the same without norm and RoPE", T=3, G=2, n=1, D=9, dtype="int8"),
        Case("int8_zero", "a row of zeros has scale 0, without 0 / 0", T=3, dtype="int8", size=0.0, **NORMED),
        Case("int8_nan", "a NaN makes the scale of its own row NaN, and no other", T=4, dtype="int8",
             plant={3: NAN}, **NORMED),
        Case("fp8", "the same in 8-bit floats", T=6, dtype="fp8", **NORMED),
        Case("fp8_zero", "a row of zeros has scale 0, without 0 / 0", T=3, dtype="fp8", size=0.0, **NORMED),
        Case("fp8_inf", "an infinity makes the scale of its own row infinite, and its numbers 0", T=4, dtype="fp8",
             plant={3: INF}, **NORMED),
        Case("qwen3_decode", "one token of 256 requests to a 0.6B model", T=256, G=8, n=2, D=128, R=64, norm=True,
             N=4096, B=16, bench=True),
        Case("llama_decode", "one token of 256 requests to an 8B model, without a norm", T=256, G=8, n=4, D=128, R=64,
             N=4096, B=16, bench=True),
        Case("qwen3_prefill", "a prompt of 8k tokens to a 0.6B model", T=8192, G=8, n=2, D=128, R=64, norm=True,
             N=4096, B=16, bench=True),
        Case("qwen3_int8", "256 requests with an int8 cache", T=256, G=8, n=2, D=128, R=64, norm=True, N=4096, B=16,
             dtype="int8", bench=True),
    ],
)  # fmt: skip
