"""Small models and packed tokens for the tests of nn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagu import ops
from bagu.nn import ModelConfig, Transformer, init_weights

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "max_len": 32,
}  # fmt: skip
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


def small(**changes: Any) -> ModelConfig:
    return ModelConfig(**SMALL | changes)


def make(config: ModelConfig, dtype: torch.dtype = torch.float32, *, seed: int = 0, louder: float = 4.0) -> Transformer:
    """Weights are `louder` times larger than usual: at 0.02 a small model is nearly linear and hides errors."""
    model = init_weights(Transformer(config, dtype=dtype), seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.mul_(louder)
            elif name.endswith("bias"):
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)), dtype=dtype))
    return model


def packed(lengths: Sequence[int], *, seed: int = 0, vocab: int = SMALL["vocab_size"]) -> Packed:
    """(ids, positions, cu_seqlens, max_len) of documents of these lengths."""
    ids = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return documents(ids.split(list(lengths)))


def documents(docs: Sequence[torch.Tensor]) -> Packed:
    lengths = [len(d) for d in docs]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return torch.cat(list(docs)), torch.cat([torch.arange(n) for n in lengths]), cu_seqlens, max(lengths)


def loss(model: Transformer, batch: Packed) -> torch.Tensor:
    """Mean loss with an arbitrary target per token, plus the balance loss."""
    ids = batch[0]
    out = model(*batch)
    weights = torch.full((len(ids),), 1 / len(ids), dtype=torch.promote_types(out.hidden.dtype, torch.float32))
    total: torch.Tensor = ops.linear_cross_entropy_loss(out.hidden, model.head_weight, ids.roll(-1), weights)[0]
    return total if out.aux_loss is None else total + out.aux_loss
