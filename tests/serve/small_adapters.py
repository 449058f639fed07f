"""Random LoRA adapters that change what a small model says, as values and as PEFT folders."""

from __future__ import annotations

from pathlib import Path

import torch

from bagu.nn.lora import add_lora, lora_state
from bagu.nn.model import Transformer
from bagu.nn.peft import Adapter, save_adapter
from bagu.serve.adapters.registry import adaptable


def random_adapter(model: Transformer, seed: int, *, rank: int = 3, targets: str = "") -> Adapter:
    """Pairs for every linear layer whose name contains `targets`."""
    draw = torch.Generator().manual_seed(seed)
    pairs = {
        name: (
            0.3 * torch.randn(rank, linear.in_features, generator=draw),
            0.3 * torch.randn(linear.out_features, rank, generator=draw),
        )
        for name, linear in adaptable(model).items()
        if targets in name
    }
    return Adapter(rank=rank, scale=0.5, pairs=pairs)


@torch.no_grad()
def merge_into(model: Transformer, adapter: Adapter) -> Transformer:
    """Add the adapter to the weights of the model."""
    linears = adaptable(model)
    for name, (a, b) in adapter.pairs.items():
        weight = linears[name].weight
        weight.copy_(weight.double() + adapter.scale * b.double() @ a.double())
    return model


@torch.no_grad()
def saved_adapter(
    model: Transformer, folder: Path, seed: int, *, rank: int = 3, targets: str = ".*", size: float = 0.3
) -> Path:
    """Write a PEFT folder for `model`, which is unchanged but for LoRA layers: use a model of its own."""
    add_lora(model, rank=rank, alpha=2.0 * rank, targets=targets)
    draw = torch.Generator().manual_seed(seed)
    for p in lora_state(model).values():
        p.copy_(size * torch.randn(p.shape, generator=draw))
    save_adapter(model, folder, base="somewhere")
    return folder
