"""LoRA adapters for step.cpp: the pairs of each slot in the layout of low_rank.h, in fp32.

The gain of a norm that is multiplied into a weight is multiplied into A too. The scale is in B already.
"""

import ctypes
import math
from collections.abc import Mapping

import numpy as np
import torch

from bagu.serve.adapters.layers import NO_ADAPTER, GroupedLinear
from bagu.serve.cpu.match import DecodeStep, Weight


def tiled(rows: torch.Tensor, lanes: int, *, gated: bool = False) -> torch.Tensor:
    """Rows [N, K] as tiles [P, 2W, K]: 2W rows or, gated, W of each half; the last one is padded with zeros."""
    pieces = list(rows.chunk(2)) if gated else [rows]
    each = 2 * lanes // len(pieces)
    count = -(-len(pieces[0]) // each)
    full = [torch.nn.functional.pad(p, (0, 0, 0, count * each - len(p))).view(count, each, -1) for p in pieces]
    return torch.cat(full, 1)


class _Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("rank", ctypes.c_int64)]


class _Slot:
    """The pairs of an adapter: [layers, 4], in the order qkv, out, up, down."""

    def __init__(self, count: int) -> None:
        self.structs = (_Pair * count)()
        self.kept: list[torch.Tensor] = []  # keeps the memory alive that the structs point to

    @property
    def address(self) -> int:
        return ctypes.addressof(self.structs)


class LowRankPairs:
    """Packs the pairs of a slot at its first use."""

    def __init__(self, step: DecodeStep, layers: Mapping[str, GroupedLinear], lanes: int) -> None:
        self.step, self.layers, self.lanes = step, layers, lanes
        self.width = 0  # floats of A x of a token, at most
        self._slots: dict[int, _Slot] = {}

    def forget(self, slot: int) -> None:
        """The weights in this slot have changed."""
        self._slots.pop(slot, None)

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """[S]: where the pairs of each token's slot are; 0 for a token without an adapter."""
        found = {slot: 0 if slot == NO_ADAPTER else self._slot(slot).address for slot in np.unique(slots).tolist()}
        return np.array([found[slot] for slot in slots.tolist()], dtype=np.uint64)

    def _slot(self, slot: int) -> _Slot:
        found = self._slots.get(slot)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = self._slots[slot] = self._pack(slot)
        return found

    def _pack(self, slot: int) -> _Slot:
        packed = _Slot(4 * len(self.step.layers))
        up = "gate_up" if self.step.gated else "up"
        for i, weights in enumerate(self.step.layers):
            linears = (
                ("attention.qkv", weights.qkv, weights.qkv_rows),
                ("attention.out", weights.out, None),
                (f"ffn.{up}", weights.up, None),
                ("ffn.down", weights.down, None),
            )
            for j, (name, weight, rows) in enumerate(linears):
                pair = self.layers[f"blocks.{i}.{name}"].pairs.get(slot)
                if pair is not None:
                    gated = self.step.gated and j == 2
                    packed.structs[4 * i + j] = self._pair(packed, *pair, weight, rows, gated=gated)
        return packed

    def _pair(
        self, packed: _Slot, a: torch.Tensor, b: torch.Tensor, weight: Weight, rows: torch.Tensor | None, *, gated: bool
    ) -> _Pair:
        assert (b.shape[0], a.shape[1]) == weight.weight.shape, "match.py follows the layers in their order"
        rank, a, b = a.shape[0], a.float(), b.float() if rows is None else b.float()[rows]
        if weight.gain is not None:
            a = a * (weight.gain.float() * math.sqrt(a.shape[1]))
        wide = tiled(a, self.lanes)
        tiles_a = (wide[:, : self.lanes] if rank <= self.lanes else wide).transpose(1, 2).contiguous()
        tiles_b = tiled(b, self.lanes, gated=gated).transpose(1, 2).contiguous()
        packed.kept += [tiles_a, tiles_b]
        self.width = max(self.width, tiles_a.shape[0] * tiles_a.shape[2])
        return _Pair(tiles_a.data_ptr(), tiles_b.data_ptr(), rank)
