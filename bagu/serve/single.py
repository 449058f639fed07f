"""A decode step of one sequence on a CPU: vectors, and as few calls as can be.

One token of the 8M model is 0.73 ms of reading weights, and every torch call beside them costs 1 to 3 us more than its
arithmetic: between two products 2 MB of weights have gone through the cache, and the caller's code is not there any
more. So a norm is a dot product, whose result scales the next matrix product from inside (`alpha`); RoPE is a product
with the D x D matrix of this position; and keys and values are read where they lie, which asks for blocks in a row.
A step of the engine on two cores is 1.4 ms; with the calls of decode.py it is 1.7.

Dims: H = heads, G = key heads, D = features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.functional import silu

from bagu.nn.config import Rope
from bagu.nn.ffn import activate
from bagu.nn.model import Transformer
from bagu.serve.layers import Layer
from bagu.serve.packed import Packed, Plain

__all__ = ["Single"]


class Turn:
    """RoPE of one position as a matrix: (a, b) @ [[cos, sin], [-sin, cos]], a and b the halves of a head."""

    def __init__(self, cos: np.ndarray, sin: np.ndarray) -> None:
        half = cos.shape[1]
        self.cos, self.sin = cos, sin
        self.matrix = torch.zeros(2 * half, 2 * half)
        flat = self.matrix.numpy().reshape(-1)
        step = 2 * half + 1  # along a diagonal
        self.main, self.above, self.below = (
            flat[::step].reshape(2, half),
            flat[half::step][:half],
            flat[2 * half**2 :: step],
        )

    def to(self, position: int) -> torch.Tensor:
        self.main[:], self.above[:] = self.cos[position], self.sin[position]
        np.negative(self.sin[position], out=self.below)
        return self.matrix


class Single:
    """The hidden state of one new token. For fp32 and weights of `Plain`."""

    def __init__(self, model: Transformer, layers: Sequence[Layer]) -> None:
        c = model.config
        H, G, D = c.num_heads, c.num_kv_heads, c.head_dim
        assert model.norm is not None
        self.layers, self.scale, self.kind = layers, c.scale, c.ffn
        self.table, self.gain = model.embedding.weight.detach(), model.norm.weight.detach() * math.sqrt(c.hidden_size)
        self.floor, self.head_floor = c.hidden_size * c.norm.eps, torch.tensor(math.sqrt(D * c.norm.eps))
        self.x = torch.empty(c.hidden_size)
        self.qkv = torch.empty((H + 2 * G) * D)
        self.up = torch.empty(layers[0].up.many.shape[1])  # type: ignore[attr-defined]
        self.gate, self.rest = self.up.chunk(2)
        self.qk = self.qkv[: (H + G) * D].view(H + G, D)
        rope = isinstance(c.positions, Rope)
        self.turn = Turn(*(t.numpy() for t in model.positions.tables(self.table.device))) if rope else None
        self.turned = torch.empty(H + G, D) if rope else self.qk
        self.q = self.turned[:H].view(1, G, H // G, D)  # the queries of a group are rows of one head
        self.k, self.v = self.turned[H:].view(-1).numpy(), self.qkv[(H + G) * D :].numpy()
        self.x_bits = self.x.numpy()

    def __call__(self, ids: torch.Tensor, position: int, first: int) -> torch.Tensor:
        """[1, hidden_size], for a token at `position` of a sequence whose place 0 is place `first` of the pool."""
        torch.index_select(self.table, 0, ids, out=self.x.view(1, -1))
        turn = None if self.turn is None else self.turn.to(position)
        for layer in self.layers:
            self._scaled(layer.qkv, self.qkv)
            self._add(layer.out, self._attend(layer, turn, position, first))
            self._scaled(layer.up, self.up)
            self._add(layer.down, self._feed())
        return self.gain.mul(self._size()).mul_(self.x).view(1, -1)

    def _size(self) -> float:
        """What RMSNorm multiplies with, less the sqrt(size) that is in the weight behind it."""
        x = self.x_bits
        return 1.0 / math.sqrt(x.dot(x) + self.floor)

    def _scaled(self, linear: Packed, out: torch.Tensor) -> None:
        """The norm and the product behind it."""
        assert isinstance(linear, Plain)
        bias, beta = (out, 0) if linear.bias is None else (linear.bias, 1)
        torch.addmv(bias, linear.rows, self.x, beta=beta, alpha=self._size(), out=out)

    def _add(self, linear: Packed, y: torch.Tensor) -> None:
        assert isinstance(linear, Plain)
        self.x.addmv_(linear.rows, y)
        if linear.bias is not None:
            self.x.add_(linear.bias)

    def _feed(self) -> torch.Tensor:
        if self.kind != "swiglu":
            return activate(self.kind, self.up.view(1, -1)).view(-1)
        return silu(self.gate, inplace=True).mul_(self.rest)

    def _attend(self, layer: Layer, turn: torch.Tensor | None, position: int, first: int) -> torch.Tensor:
        if layer.head_gain is not None:
            size = torch.linalg.vector_norm(self.qk, 2, -1, True)
            self.qk.div_(torch.hypot(size, self.head_floor, out=size)).mul_(layer.head_gain)
        if turn is not None:
            torch.mm(self.qk, turn, out=self.turned)
        slot = first + position
        layer.key_bits[slot], layer.value_bits[slot] = self.k, self.v
        length = position + 1 if layer.window is None else min(layer.window, position + 1)
        k = layer.key_heads.narrow(2, slot + 1 - length, length)
        v = layer.value_heads.narrow(2, slot + 1 - length, length)
        return sdpa(self.q, k, v, scale=self.scale).view(-1)
