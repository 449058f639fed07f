"""A short step on a CPU as one C++ call: step.cpp, compiled for this machine, and its arguments. It computes decodes,
verified drafts and short prompts.

It is used if match.py finds that step.cpp computes the same as the model; `Transformer.forward` decodes otherwise. ms
per step of the 8M model without its head, 128 tokens per stream, two cores of a noisy machine, alternating in one
process (lower quartiles; on a quiet machine fp32 takes 0.66, 1.3, 4.1):

    streams                      1      8      32     32 with one token each: no attention
    fp32                         0.75   1.9    6.6    3.3
    bf16                         0.48   1.5    5.7    3.1
    int8                         0.38   1.3    6.2    2.9

The gain of a norm and the square root of its size are multiplied into the weight after it. These weights are a copy;
`Transformer.forward` computes prompts with the model's own weights. On x86, int8 quantizes only the weights, with a
scale per row: activations stay fp32, so a product is more accurate than that of quantize.py, which rounds both and
computes the prompts. On ARM with int8 dot products, both files round activations too.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from bagu.machine import native
from bagu.serve.cpu.match import DecodeStep, LayerWeights, Weight
from bagu.serve.kv.paged import PagedKV

__all__ = ["CompiledDecode", "Decodes", "PackedLinear", "compiles", "has_int8_dot"]

SOURCE = "serve/cpu/step.cpp"
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}
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


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] as int8 and the scales [N] of its rows."""
    w = weight.float()
    scales = w.abs().amax(1).clamp_(min=1e-12) / 127
    return (w / scales.unsqueeze(1)).round_().to(torch.int8), scales


def padded_inputs(K: int) -> int:
    """K rounded up to the padded size of int8 weights and activations."""
    step: int = library().bagu_int8_k_step()
    return -(-K // step) * step


class _Linear(ctypes.Structure):
    _fields_ = [("tiles", POINTER), ("scales", POINTER), ("bias", POINTER)]


class _Layer(ctypes.Structure):
    _fields_ = [(name, _Linear) for name in ("qkv", "out", "up", "down")]
    _fields_ += [(name, POINTER) for name in ("qk_gain", "keys", "values")] + [("window", LONG)]


class _Model(ctypes.Structure):
    _fields_ = [(n, LONG) for n in ("hidden", "heads", "key_heads", "head_dim", "inner", "block_size", "num_layers")]
    _fields_ += [(n, LONG) for n in ("activation", "gated")] + [(n, FLOAT) for n in ("eps", "qk_eps", "scale")]
    _fields_ += [(n, POINTER) for n in ("table", "gain", "cos", "sin", "layers")]


class _Step(ctypes.Structure):
    _fields_ = [(n, LONG) for n in ("tokens", "several", "threads", "columns")]
    _fields_ += [(n, POINTER) for n in ("ids", "lengths", "table_rows", "tables")]
    _fields_ += [(n, POINTER) for n in ("x", "qkv", "y", "inner", "quantized", "scales", "out")]


class Decodes(NamedTuple):
    """S new tokens, at most one of each sequence, or `several`: then in the order of their positions."""

    new: np.ndarray  # [3, S] int64: the token, the length of its sequence up to it, the sequence's row of the tables
    tables: np.ndarray  # [rows, blocks] int32
    several: bool = False


def _at(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class PackedLinear:
    """A weight [N, K] in the layout of packed_linear.h: y = x Wᵀ + b, with x and y in fp32. `int8` quantizes it with a
    scale per row. `gated`: the first half of the rows are gates, and gates and ups alternate W by W."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False, int8: bool = False
    ) -> None:
        (self.N, self.K), self.lanes = weight.shape, library().bagu_lanes()
        weight, scales = rounded(weight.detach()) if int8 else (weight.detach(), None)
        self.weight = self._interleaved(self._tiles(weight, gated), int8)
        self.scales, self.bias = (
            None if x is None else self._tiles(x.detach().float().unsqueeze(1), gated).contiguous()
            for x in (scales, bias)
        )
        self.struct = _Linear(_at(self.weight), _at(self.scales), _at(self.bias))
        self._head = getattr(library(), f"bagu_head_{NAMES[weight.dtype]}")
        self._head.argtypes = [ctypes.POINTER(_Linear), POINTER, POINTER, POINTER, LONG, LONG, LONG, ctypes.c_int]
        self._head.restype = None

    def _tiles(self, rows: torch.Tensor, gated: bool) -> torch.Tensor:
        """Rows [N, K] as tiles [P, 2W, K]: 2W rows or, gated, W of each half; the last one is padded with zeros."""
        pieces = list(rows.chunk(2)) if gated else [rows]
        each = 2 * self.lanes // len(pieces)
        count = -(-len(pieces[0]) // each)
        full = [torch.nn.functional.pad(p, (0, 0, 0, count * each - len(p))).view(count, each, -1) for p in pieces]
        return torch.cat(full, 1)

    def _interleaved(self, tiles: torch.Tensor, int8: bool) -> torch.Tensor:
        """Tiles [P, 2W, K] as [P, K, 2W], or [P, K / 4, 2W, 4] for dot products of int8."""
        dot = library().bagu_int8_dot() if int8 else 1
        if dot == 1:
            return tiles.transpose(1, 2).contiguous()
        tiles = torch.nn.functional.pad(tiles, (0, padded_inputs(self.K) - self.K))
        return tiles.unflatten(2, (-1, dot)).transpose(1, 2).contiguous()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """y[S, N], and the index of the first largest value of each row."""
        x, S = x.float().contiguous(), len(x)
        y, tokens = torch.empty(S, self.N), torch.empty(S, dtype=torch.int64)
        pointers = (x.data_ptr(), y.data_ptr(), tokens.data_ptr())
        self._head(self.struct, *pointers, S, self.K, self.N, torch.get_num_threads())
        return y, tokens


class CompiledDecode:
    def __init__(self, step: DecodeStep, kv: PagedKV, *, int8: bool = False) -> None:
        self.step, self.kv, self.int8 = step, kv, int8
        self._step = getattr(library(), f"bagu_step_{'int8_' * int8}{NAMES[step.table.dtype]}")
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
        )  # fmt: skip
        self.buffers: Sequence[torch.Tensor] = ()

    def _layer(self, w: LayerWeights) -> _Layer:
        weight, bias, gain = w.qkv
        qkv = Weight(weight[w.qkv_rows], None if bias is None else bias[w.qkv_rows], gain)
        linears = [self._packed(linear) for linear in (qkv, w.out)]
        linears += [self._packed(w.up, gated=self.step.gated), self._packed(w.down)]
        gain = None if w.qk_gain is None else w.qk_gain.float() * math.sqrt(self.step.head_dim)
        self.kept += [*linears, gain]
        pointers = map(_at, (gain, *self.kv.layers[w.cache].tensors))
        return _Layer(*(linear.struct for linear in linears), *pointers, w.window or 0)

    def _packed(self, linear: Weight, *, gated: bool = False) -> PackedLinear:
        w = linear.weight
        if linear.gain is not None:
            w = (w.float() * (linear.gain.float() * math.sqrt(self.hidden))).to(w.dtype)
        return PackedLinear(w, linear.bias, gated=gated, int8=self.int8)

    def __call__(self, step: Decodes) -> torch.Tensor:
        """The hidden state of each new token, [S, hidden size], as `Transformer.forward` returns it."""
        S = step.new.shape[1]
        if not self.buffers or len(self.buffers[0]) != S:
            heads, keys = (n * self.step.head_dim for n in (self.step.num_heads, self.step.num_key_heads))
            widest = padded_inputs(max(self.hidden, heads, self.inner))
            self.buffers = [torch.empty(S, width) for width in (self.hidden, heads + 2 * keys, heads, self.inner)]
            self.buffers += [torch.empty(S, widest if self.int8 else 0, dtype=torch.int8), torch.empty(S)]
            self.pointers = [b.data_ptr() for b in self.buffers]
        out = self.step.table.new_empty(S, self.hidden)
        first, row = step.new.ctypes.data, step.new.strides[0]
        call = _Step(
            S, step.several, torch.get_num_threads(), step.tables.shape[1], first, first + row, first + 2 * row,
            step.tables.ctypes.data, *self.pointers, out.data_ptr(),
        )  # fmt: skip
        self._step(self.model, call)
        return out
