"""Linear layers of a batch in which every token may have another LoRA adapter: y = x Wᵀ + B (A x), by its slot.

    GroupedLinear   CPU: a pair of products for the tokens of each adapter in the batch
    StackedLinear   GPU: all adapters at once: a decode computes the layer and its adapters in one op (ops.lora_linear),
                    quantized layers and prompts are followed by another launch (ops.lora_add)

The number of launches does not depend on the batch, and a CUDA graph can hold them: the slots of the tokens are a
tensor. `AdapterWeights` owns the tensors. Those of the stacks grow with the ranks and slots in use; graphs that read
the old ones are then captured again.

Dims: T = tokens, K = inputs, N = outputs, L = slots, R = rank.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from bagu import ops
from bagu.nn.change import with_modules
from bagu.nn.linear import Linear
from bagu.nn.model import Transformer
from bagu.nn.peft import Adapter
from bagu.serve.adapters.registry import adaptable

NO_ADAPTER = -1  # the slot of a token without an adapter
FEW_TOKENS = 32  # of a step, up to which a layer and its adapters are one op; more are not measured


class Rows:
    """The adapters of the tokens of the next forward."""

    def __init__(self) -> None:
        self.slots: torch.Tensor | None = None  # [T] int64; None: no token has one
        self.groups: list[tuple[int, torch.Tensor | None]] = []  # (slot, its rows); None: all rows

    def load(self, slots: torch.Tensor | None) -> None:
        self.slots, self.groups = slots, []
        if slots is None or slots.device.type != "cpu":
            return
        values = slots.numpy()
        for slot in np.unique(values).tolist():
            if slot != NO_ADAPTER:
                rows = np.flatnonzero(values == slot)
                self.groups.append((slot, None if len(rows) == len(values) else torch.from_numpy(rows)))


def scaled(b: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * b.to(torch.promote_types(b.dtype, torch.float32))


class GroupedLinear(nn.Module):
    """`base`, and the pairs of each slot in their own tensors."""

    def __init__(self, linear: Linear, rows: Rows) -> None:
        super().__init__()
        self.base: nn.Module = linear
        self.rows = rows
        self.device, self.dtype = linear.weight.device, linear.dtype
        self.pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def install(self, slot: int, pair: tuple[torch.Tensor, torch.Tensor] | None, scale: float) -> None:
        """Replace the pair of a slot; None: the adapter does not change this layer."""
        self.pairs.pop(slot, None)
        if pair is not None:
            a, b = pair
            self.pairs[slot] = a.to(self.device, self.dtype), scaled(b, scale).to(self.device, self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        for slot, rows in self.rows.groups:
            if slot not in self.pairs:
                continue
            a, b = self.pairs[slot]  # added in place: a copy of y for each adapter takes longer than its products
            if rows is None:
                y += ops.matmul(ops.matmul(x, a), b)
            else:
                y.index_add_(0, rows, ops.matmul(ops.matmul(x.index_select(0, rows), a), b))
        return y


class StackedLinear(nn.Module):
    """`base`, and the pairs of all slots in two tensors. A pair of a lower rank is padded with zeros."""

    a: torch.Tensor  # [L, R, K]
    b: torch.Tensor  # [L, N, R]

    def __init__(self, linear: Linear, rows: Rows) -> None:
        super().__init__()
        self.base: nn.Module = linear
        self.rows = rows
        empty = linear.weight.new_empty(0, dtype=linear.dtype)
        self.register_buffer("a", empty.new_zeros(0, 0, linear.in_features))
        self.register_buffer("b", empty.new_zeros(0, linear.out_features, 0))

    def install(self, slot: int, pair: tuple[torch.Tensor, torch.Tensor] | None, scale: float) -> None:
        """Replace the pair of a slot; None: the adapter does not change this layer."""
        if pair is not None:
            self._grow(slot + 1, pair[0].shape[0])
        if slot >= len(self.a):
            return
        self.a[slot], self.b[slot] = 0, 0
        if pair is not None:
            a, b = pair
            self.a[slot, : len(a)] = a.to(self.a.device, self.a.dtype)
            self.b[slot, :, : len(a)] = scaled(b, scale).to(self.b.device, self.b.dtype)

    def _grow(self, slots: int, rank: int) -> None:
        L, R, K = self.a.shape
        slots, rank = max(slots, L), max(rank, R)
        if (slots, rank) == (L, R):
            return
        a, b = self.a.new_zeros(slots, rank, K), self.b.new_zeros(slots, self.b.shape[1], rank)
        a[:L, :R], b[:L, :, :R] = self.a, self.b
        self.a, self.b = a, b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base, slots = self.base, self.rows.slots
        if slots is not None and len(self.a) and len(x) <= FEW_TOKENS and isinstance(base, Linear) and base.is_plain:
            return ops.lora_linear(x, base.weight, self.a, self.b, slots, base.bias)
        y: torch.Tensor = base(x)
        if slots is not None and len(self.a):
            ops.lora_add(y, x, self.a, self.b, slots)
        return y


class AdapterWeights:
    """The weights of all adapters of a model, by slot. They outlive the model's packed weights: `wrap` puts them around
    the layers of a newly packed model."""

    def __init__(self, model: Transformer, make: Callable[[Linear, Rows], GroupedLinear | StackedLinear]) -> None:
        self.rows = Rows()
        self.layers: Mapping[str, GroupedLinear | StackedLinear] = {
            name: make(linear, self.rows) for name, linear in adaptable(model).items()
        }

    def install(self, slot: int, adapter: Adapter) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for name, layer in self.layers.items():
                layer.install(slot, adapter.pairs.get(name), adapter.scale)

    def wrap(self, model: Transformer) -> Transformer:
        """A copy of `model`, whose linear layers may be quantized, with these layers around its own."""

        def around(name: str, module: nn.Module) -> nn.Module | None:
            layer = self.layers.get(name)
            if layer is not None:
                layer.base = module
            return layer

        return with_modules(model, around)
