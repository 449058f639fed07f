"""A step on a CPU as one C++ call: step.cpp, compiled for this machine, and its arguments. It computes decodes,
verified drafts and prompts.

It is used if match.py finds that step.cpp computes the same as the model; `Transformer.forward` decodes otherwise. ms
per step of the 8M model without its head, 128 tokens per stream, two cores of a noisy machine, alternating in one
process (lower quartiles; on a quiet machine fp32 takes 0.66, 1.3, 4.1):

    streams                      1      8      32     32 with one token each: no attention
    fp32                         0.75   1.9    6.6    3.3
    bf16                         0.48   1.5    5.7    3.1
    int8                         0.38   1.3    6.2    2.9

The gain of a norm and the square root of its size are multiplied into the weight after it. These weights are a copy;
`Transformer.forward` computes long prompts with the model's own weights. int8 rounds weights with a scale per row; on
CPUs with int8 dot products (ARM, x86 with VNNI) activations too, with a scale per token. On others activations stay
fp32, so a product is more accurate than that of quantize.py, which rounds both and computes the long prompts. int4
rounds weights in groups of 128 and activations to int8 on every CPU (int4_product.h). Where the step rounds
activations, it computes all prompts, and is the only copy.
LoRA adapters (low_rank.py) are fp32 in every case.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from bagu.machine import native
from bagu.ops.int4_matmul.layout import num_groups, quantize_int4, unpacked
from bagu.serve.cpu.low_rank import LowRankPairs, tiled
from bagu.serve.cpu.match import DecodeStep, LayerWeights, Weight
from bagu.serve.kv.paged import PagedKV

Rounding = Literal["int8", "int4"] | None  # of weights; None keeps their dtype

SOURCE = "serve/cpu/step.cpp"
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu_squared")  # in the order of step.cpp
POINTER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def compiles(dtype: torch.dtype) -> bool:
    """Whether step.cpp can be compiled on this machine and supports models of this dtype."""
    return dtype in (torch.float32, torch.bfloat16) and native.library(SOURCE) is not None


def has_int8_dot() -> bool:
    """Whether this CPU has int8 dot products, which take activations in int8 too."""
    found = native.library(SOURCE)
    return found is not None and found.bagu_int8_dot() > 1


def library() -> ctypes.CDLL:
    found = native.library(SOURCE)
    assert found is not None, "`compiles` is asked first"
    return found


def lanes() -> int:
    """The floats of a vector of this CPU: tiles have twice as many outputs."""
    found: int = library().bagu_lanes()
    return found


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] as int8 and the scales [N] of its rows."""
    w = weight.float()
    scales = w.abs().amax(1).clamp_(min=1e-12) / 127
    return (w / scales.unsqueeze(1)).round_().to(torch.int8), scales


def padded_inputs(K: int, rounding: Rounding) -> int:
    """K rounded up to the padded size of quantized weights and activations."""
    step: int = library().bagu_int4_k_step() if rounding == "int4" else library().bagu_int8_k_step()
    return -(-K // step) * step


class _Linear(ctypes.Structure):
    _fields_ = [("tiles", POINTER), ("scales", POINTER), ("bias", POINTER)]


class _Layer(ctypes.Structure):
    _fields_ = [(name, _Linear) for name in ("qkv", "out", "up", "down")]
    _fields_ += [(name, POINTER) for name in ("qk_gain", "keys", "values", "means")] + [
        ("window", LONG),
        ("group", LONG),
    ]


class _Model(ctypes.Structure):
    _fields_ = [(n, LONG) for n in ("hidden", "heads", "key_heads", "head_dim", "inner", "block_size", "num_layers")]
    _fields_ += [(n, LONG) for n in ("activation", "gated")] + [(n, FLOAT) for n in ("eps", "qk_eps", "scale")]
    _fields_ += [(n, POINTER) for n in ("table", "gain", "cos", "sin", "layers")]
    _fields_ += [(n, LONG) for n in ("top", "near", "dense_below")]


class _Step(ctypes.Structure):
    _fields_ = [(n, LONG) for n in ("tokens", "several", "threads", "rows", "columns")]
    _fields_ += [(n, POINTER) for n in ("ids", "lengths", "table_rows", "tables")]
    _fields_ += [(n, POINTER) for n in ("x", "qkv", "y", "inner", "quantized", "groups", "adapters", "low")]
    _fields_ += [("low_width", LONG), ("out", POINTER)]


class Decodes(NamedTuple):
    """S new tokens, at most one of each sequence, or `several`: then in the order of their positions."""

    new: np.ndarray  # [3, S] int64: the token, the length of its sequence up to it, the sequence's row of the tables
    tables: np.ndarray  # [groups of layers * rows, blocks] int32
    several: bool = False
    adapters: np.ndarray | None = None  # [S] int64: slots; None if no token has an adapter


def _at(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class PackedLinear:
    """A weight [N, K] in the layout of tile_product.h: y = x Wᵀ + b, with x and y in fp32. `rounding` quantizes it:
    int8 with a scale per row, int4 with a scale per group of 128 inputs. `gated`: the first half of the rows are gates,
    and gates and ups alternate W by W."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False, rounding: Rounding = None
    ) -> None:
        (self.N, self.K), self.lanes = weight.shape, lanes()
        weight, self.gated, self.scales = weight.detach(), gated, None
        name = NAMES[weight.dtype] if rounding is None else rounding
        if rounding == "int4":
            self.weight, self.scales = self._int4(weight)
        elif rounding == "int8":
            self.weight, self.scales = self._int8(weight)
        else:
            self.weight = self._tiles(weight).transpose(1, 2).contiguous()
        self.bias = None if bias is None else self._tiles(bias.detach().float().unsqueeze(1)).contiguous()
        self.struct = _Linear(_at(self.weight), _at(self.scales), _at(self.bias))
        self._head = getattr(library(), f"bagu_head_{name}")
        self._head.argtypes = [ctypes.POINTER(_Linear), POINTER, POINTER, POINTER, LONG, LONG, LONG, ctypes.c_int]
        self._head.restype = None

    def _tiles(self, rows: torch.Tensor) -> torch.Tensor:
        return tiled(rows, self.lanes, gated=self.gated)

    def _int8(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tiles [P, K, 2W], or [P, K / 4, 2W, 4] for dot products, and a scale per row."""
        values, scales = rounded(weight)
        tiles, dot = self._tiles(values), library().bagu_int8_dot()
        if dot == 1:
            tiles = tiles.transpose(1, 2)
        else:
            tiles = torch.nn.functional.pad(tiles, (0, padded_inputs(self.K, "int8") - self.K))
            tiles = tiles.unflatten(2, (-1, dot)).transpose(1, 2)
        if library().bagu_int8_plus_128():
            tiles = tiles ^ -128  # the bits of w + 128 as an unsigned byte
        return tiles.contiguous(), self._tiles(scales.unsqueeze(1)).contiguous()

    def _int4(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tiles [P, K / 4, W, 4] of pairs of values, and scales [P, G, 2W]. int4_product.h describes both."""
        wide = torch.nn.functional.pad(weight, (0, padded_inputs(self.K, "int4") - self.K))
        packed, scales, _ = quantize_int4(wide)
        tiles = self._tiles(unpacked(packed)).unflatten(2, (-1, 4)).transpose(1, 2)
        low, high = tiles[:, :, : self.lanes], tiles[:, :, self.lanes :]
        if library().bagu_int4_signed_high():
            high = high ^ 8  # q - 8 in two's complement
        pairs = low | high << 4
        return pairs.contiguous(), self._tiles(scales).transpose(1, 2).contiguous()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """y[S, N], and the index of the first largest value of each row."""
        x, S = x.float().contiguous(), len(x)
        y, tokens = torch.empty(S, self.N), torch.empty(S, dtype=torch.int64)
        pointers = (x.data_ptr(), y.data_ptr(), tokens.data_ptr())
        self._head(self.struct, *pointers, S, self.K, self.N, torch.get_num_threads())
        return y, tokens


class CompiledDecode:
    def __init__(
        self, step: DecodeStep, kv: PagedKV, *, rounding: Rounding = None, low_rank: LowRankPairs | None = None
    ) -> None:
        # `step` is not kept: it holds all weights before packing
        self.table, self.gated, self.kv, self.rounding = step.table, step.gated, kv, rounding
        self.num_heads, self.num_key_heads, self.head_dim = step.num_heads, step.num_key_heads, step.head_dim
        self.low_rank = low_rank
        prefix = "" if rounding is None else f"{rounding}_"
        self._step = getattr(library(), f"bagu_step_{prefix}{NAMES[step.table.dtype]}")
        self._step.argtypes = [ctypes.POINTER(_Model), ctypes.POINTER(_Step)]
        self._step.restype = None
        self.hidden, self.inner = step.table.shape[1], step.layers[0].down.weight.shape[1]
        self.gain = step.gain.float() * math.sqrt(self.hidden)
        self.kept: list[object] = []  # keeps the memory alive that the structs point to
        self.structs = (_Layer * len(step.layers))(*map(self._layer, step.layers))
        self.model = _Model(
            self.hidden, step.num_heads, step.num_key_heads, step.head_dim, self.inner, kv.block_size,
            len(step.layers), ACTIVATIONS.index(step.activation), step.gated, self.hidden * step.eps,
            step.head_dim * step.qk_eps, step.scale, _at(step.table), _at(self.gain),
            *map(_at, step.rope_tables or (None, None)), ctypes.addressof(self.structs),
            *((0, 0, 0) if kv.choice is None else (kv.choice.top, kv.choice.near, kv.choice.dense_below)),
        )  # fmt: skip
        self.kept += step.rope_tables
        self.buffers: Sequence[torch.Tensor] = ()

    def _layer(self, w: LayerWeights) -> _Layer:
        weight, bias, gain = w.qkv
        qkv = Weight(weight[w.qkv_rows], None if bias is None else bias[w.qkv_rows], gain)
        linears = [self._packed(linear) for linear in (qkv, w.out)]
        linears += [self._packed(w.up, gated=self.gated), self._packed(w.down)]
        gain = None if w.qk_gain is None else w.qk_gain.float() * math.sqrt(self.head_dim)
        self.kept += [*linears, gain]
        cache = self.kv.layers[w.cache]
        pointers = map(_at, (gain, cache.keys, cache.values, cache.means))
        return _Layer(*(linear.struct for linear in linears), *pointers, w.window or 0, self.kv.group_of[w.cache])

    def _packed(self, linear: Weight, *, gated: bool = False) -> PackedLinear:
        w = linear.weight
        if linear.gain is not None:
            w = (w.float() * (linear.gain.float() * math.sqrt(self.hidden))).to(w.dtype)
        return PackedLinear(w, linear.bias, gated=gated, rounding=self.rounding)

    def __call__(self, step: Decodes) -> torch.Tensor:
        """The hidden state of each new token, [S, hidden size], as `Transformer.forward` returns it."""
        S = step.new.shape[1]
        if not self.buffers or len(self.buffers[0]) != S:
            heads, keys = (n * self.head_dim for n in (self.num_heads, self.num_key_heads))
            widest = 0 if self.rounding is None else padded_inputs(max(self.hidden, heads, self.inner), self.rounding)
            self.buffers = [torch.empty(S, width) for width in (self.hidden, heads + 2 * keys, heads, self.inner)]
            self.buffers += [torch.empty(S, widest, dtype=torch.int8), torch.empty(S, num_groups(widest), 2)]
            self.pointers = [b.data_ptr() for b in self.buffers]
        out = self.table.new_empty(S, self.hidden)
        adapters, low, width = None, None, 0
        if step.adapters is not None:
            assert self.low_rank is not None, "the runner loads adapters only if the engine has slots for them"
            addresses = self.low_rank.addresses(step.adapters)
            adapters, width = addresses.ctypes.data, self.low_rank.width
            low = torch.empty(S, width)
        first, row = step.new.ctypes.data, step.new.strides[0]
        call = _Step(
            S, step.several, torch.get_num_threads(), len(step.tables) // len(self.kv.groups), step.tables.shape[1],
            first, first + row, first + 2 * row, step.tables.ctypes.data, *self.pointers, adapters, _at(low), width,
            out.data_ptr(),
        )  # fmt: skip
        self._step(self.model, call)
        return out
