"""Quantized safetensors, dequantized when they are read: GPTQ, AWQ, fp8 (DeepSeek-V3) and compressed-tensors.

    method, format                       tensors of a linear layer [N, K]                     W[n, k]
    gptq                                 qweight [K/p, N], qzeros [G, N/p], scales [G, N],    (q - (z + 1)) * s
                                         g_idx [K]; v2 of the format has no + 1
    awq (gemm)                           qweight [K, N/8], qzeros [G, N/8], scales [G, N]     (q - z) * s
    fp8                                  weight [N, K], weight_scale_inv [N/128, K/128],      q * s
                                         or weight_scale [], [1] or [N, 1]
    compressed-tensors float-, int-,     weight [N, K], weight_scale [], [1], [N, 1], [N, G]  (q - z) * s
    naive-quantized                      or in blocks, weight_zero_point
    compressed-tensors pack-quantized    weight_packed [N, K/p], weight_scale [N, G],         (q - z) * s
                                         weight_zero_point [N/p, G], weight_shape [2]
    mxfp4 (gpt-oss; experts [E, K, N])   NAME_blocks [E, N, K/32, 16], NAME_scales [E, N, K/32]  q * 2^(s - 127)

In mxfp4 a byte has two fp4 values, the first in the low bits; its products are exact in bf16. Other packed tensors are
int32 with p = 32 / bits values each, the first in the lowest bits. The products are computed in
fp32, so a model has the logits of its dequantized weights. Scales of activations are not used: activations are not
quantized here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from bagu.errors import UnknownName
from bagu.machine.hub import WeightsError
from bagu.nn.stored import Stored, StoredTensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column i of eight is in nibble AWQ_ORDER[i]
PACKED_BITS = (2, 4, 8)  # bits that divide 32
PARTS = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point",
    "weight_shape", "weight_g_idx", "input_scale", "input_zero_point",
)  # fmt: skip

Parts = Mapping[str, StoredTensor]  # of one layer, by the last component of their names


def dequantized(files: Stored, config: Any) -> Stored:
    """The tensors with every quantized weight under its ordinary name, in fp32. `config` is the quantization_config of
    config.json; unsupported settings raise an error that names them."""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if method not in (*METHODS, "mxfp4"):
        raise UnknownName.among("quant_method", str(method), (*METHODS, "mxfp4"))
    if method == "mxfp4":
        return _mxfp4(files)
    expand = METHODS[method](config)
    layers: dict[str, dict[str, StoredTensor]] = {}
    out: dict[str, StoredTensor] = {}
    for name, tensor in files.items():
        base, _, part = name.rpartition(".")
        if part in PARTS or (part == "weight" and not {f"{base}.{p}" for p in PARTS[5:7]}.isdisjoint(files)):
            layers.setdefault(base, {})[part] = tensor
        else:
            out[name] = tensor
    for base, parts in layers.items():
        try:
            out[f"{base}.weight"] = expand(parts)
        except KeyError as error:
            raise WeightsError(
                f"{base} has {', '.join(sorted(parts))} and no {error.args[0]}, which {method} weights need",
                hint="check that the download is complete",
            ) from error
    return out


Expand = Callable[[Parts], StoredTensor]


def _gptq(config: Mapping[str, Any]) -> Expand:
    bits: Any = config.get("bits")
    form = config.get("checkpoint_format", "gptq")
    _require("gptq", "bits", bits, PACKED_BITS)
    _require("gptq", "checkpoint_format", form, ("gptq", "gptq_v2"))

    def expand(parts: Parts) -> StoredTensor:
        rows, N = parts["qweight"].shape
        return _tensor((N, rows * 32 // bits), parts["scales"], partial(read, parts))

    def read(parts: Parts) -> torch.Tensor:
        q = _unpacked(parts["qweight"].read(), bits, 0)  # [K, N]
        scales = parts["scales"].read().float()
        zeros = _unpacked(parts["qzeros"].read(), bits, 1) + (1 if form == "gptq" else 0)
        size = -(-len(q) // len(scales))
        group = parts["g_idx"].read().long() if "g_idx" in parts else torch.arange(len(q)) // size
        return ((q - zeros[group]) * scales[group]).T

    return expand


def _awq(config: Mapping[str, Any]) -> Expand:
    _require("awq", "bits", config.get("bits", config.get("w_bit")), (4,))
    _require("awq", "version", str(config.get("version", "gemm")).lower(), ("gemm",))

    def expand(parts: Parts) -> StoredTensor:
        K, columns = parts["qweight"].shape
        return _tensor((columns * 8, K), parts["scales"], partial(read, parts))

    def read(parts: Parts) -> torch.Tensor:
        q, zeros = (
            _unpacked(parts[name].read(), 4, 1).unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)
            for name in ("qweight", "qzeros")
        )
        size = -(-len(q) // len(zeros))
        return ((q - zeros.repeat_interleave(size, 0)) * parts["scales"].read().float().repeat_interleave(size, 0)).T

    return expand


def _fp8(config: Mapping[str, Any]) -> Expand:
    _require("fp8", "fmt", config.get("fmt", "e4m3"), ("e4m3",))
    block = tuple(config.get("weight_block_size") or ())

    def expand(parts: Parts) -> StoredTensor:
        scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
        weight = parts["weight"]
        return _tensor(weight.shape, scale, lambda: weight.read().float() * _spread(scale.read(), weight.shape, block))

    return expand


def _compressed(config: Mapping[str, Any]) -> Expand:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else 0
        raise WeightsError(f"compressed-tensors: {count} groups of layers in config_groups, and bagu reads one")
    weights = next(iter(groups.values())).get("weights") or {}
    form, block = config.get("format"), tuple(weights.get("block_structure") or ())
    forms = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
    _require("compressed-tensors", "format", form, forms)
    _require("compressed-tensors", "strategy", weights.get("strategy"), ("tensor", "channel", "group", "block"))
    bits: Any = weights.get("num_bits")
    _require("compressed-tensors", "num_bits", bits, PACKED_BITS if form == "pack-quantized" else (8,))

    def expand(parts: Parts) -> StoredTensor:
        scale = parts["weight_scale"]
        if "weight_g_idx" in parts:
            raise WeightsError("compressed-tensors: groups in another order (weight_g_idx) are not supported")
        if form != "pack-quantized":
            return _tensor(parts["weight"].shape, scale, partial(read, parts, parts["weight"].shape))
        shape = tuple(int(n) for n in parts["weight_shape"].read())
        return _tensor(shape, scale, partial(read_packed, parts, shape))

    def read(parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
        q = parts["weight"].read().float()
        if "weight_zero_point" in parts:
            q = q - _spread(parts["weight_zero_point"].read(), shape, block)
        return q * _spread(parts["weight_scale"].read(), shape, block)

    def read_packed(parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
        half = 1 << (bits - 1)  # values are stored with this offset
        q = _unpacked(parts["weight_packed"].read(), bits, 1)[:, : shape[1]] - half
        if "weight_zero_point" in parts:
            zeros = _unpacked(parts["weight_zero_point"].read(), bits, 0)[: shape[0]] - half
            q = q - _spread(zeros, shape, block)
        return q * _spread(parts["weight_scale"].read(), shape, block)

    return expand


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; the fourth bit is the sign


def _mxfp4(files: Stored) -> Stored:
    """The tensors with every pair of blocks and scales as one tensor [E, K, N]."""
    out = {name: t for name, t in files.items() if not name.endswith(("_blocks", "_scales"))}
    for name, blocks in files.items():
        base = name.removesuffix("_blocks")
        if base == name:
            continue
        if f"{base}_scales" not in files:
            raise WeightsError(f"{name} has no {base}_scales", hint="check that the download is complete")
        (E, N, groups, half), scales = blocks.shape, files[f"{base}_scales"]
        out[base] = StoredTensor((E, groups * half * 2, N), "bfloat16", partial(_read_mxfp4, blocks, scales))
    return out


def _read_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> torch.Tensor:
    table = torch.tensor([*FP4, *(-x for x in FP4)], dtype=torch.bfloat16)
    experts = []
    for packed, exponent in zip(blocks.read(), scales.read(), strict=True):  # one expert: the indices take 4 times more
        values = torch.stack((table[(packed & 15).int()], table[(packed >> 4).int()]), -1)  # [N, K/32, 16, 2]
        factor = torch.ldexp(torch.ones((), dtype=torch.float32), exponent.int() - 127).bfloat16()
        experts.append((values * factor[..., None, None]).flatten(1).T)
    return torch.stack(experts)


METHODS = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed}


def _require(method: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise WeightsError(
            f"{method}: quantization_config has {name} = {value!r}",
            hint=f"bagu reads {', '.join(map(str, allowed))}; else give a folder with bf16, fp16 or fp32 weights",
        )


def _tensor(shape: tuple[int, ...], scale: StoredTensor, read: Callable[[], torch.Tensor]) -> StoredTensor:
    """A dequantized weight. The dtype of a model is by default that of the scales, or bf16 if they are fp32."""
    return StoredTensor(shape, scale.dtype if scale.dtype in ("float16", "bfloat16") else "bfloat16", read)


def _unpacked(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The unsigned values of int32 words, which are packed along `dim`, as int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(1) if dim == 1 else values.movedim(-1, 1).flatten(0, 1)


def _spread(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> torch.Tensor:
    """A scale of the tensor, of rows, of groups of columns or of blocks, as fp32 that broadcasts to the weight."""
    wide = scale.float()
    if wide.numel() == 1:
        return wide.reshape(1, 1)
    if wide.dim() == 1:
        wide = wide.unsqueeze(1)
    for dim in (0, 1):
        if wide.shape[dim] not in (1, shape[dim]):
            size = block[dim] if len(block) == 2 else -(-shape[dim] // wide.shape[dim])
            wide = wide.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return wide
