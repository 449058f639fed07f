"""Small models in fp64, packed batches and one-process results that the parallel modes are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from bagu import ops
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.parallel.mesh import Mesh, MeshConfig, open_mesh

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8,
    "intermediate_size": 32, "max_len": 64,
}  # fmt: skip
EXACT = 1e-10  # of fp64 results in a different order of summation
IGNORE = -100
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
Gradients = dict[str, torch.Tensor]


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig(**SMALL | changes)


def model_of(config: ModelConfig, seed: int = 0) -> Transformer:
    """Weights are larger than usual (unless nothing bounds the stream), vectors are not constant: errors show."""
    model = init_weights(Transformer(config, dtype=torch.float64), seed)
    louder = 1.0 if config.norm.placement == "none" else 4.0
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            p.mul_(louder) if p.ndim > 1 else p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def batch_of(lengths: Sequence[int], seed: int = 0) -> tuple[Packed, torch.Tensor]:
    """Documents of these lengths, and their targets; every seventh target is ignored."""
    ids = torch.randint(SMALL["vocab_size"], (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    targets = ids.roll(-1)
    targets[::7] = IGNORE
    return (ids, torch.cat([torch.arange(n) for n in lengths]), cu_seqlens, max(lengths)), targets


def number_of_targets(targets: Iterable[torch.Tensor]) -> int:
    return sum(int((t != IGNORE).sum()) for t in targets)


Values = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def loss_of(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, total: int, values: Values
) -> torch.Tensor:
    """Cross-entropy with a z-loss, divided by the targets of the whole step."""
    return ops.token_losses(*values(hidden, weight, targets), 1e-2).loss.sum() / total


def one_process(
    model: Transformer,
    batches: Sequence[tuple[Packed, torch.Tensor]],
    total: int | None = None,
    micro_batches: int | None = None,
) -> tuple[float, Gradients]:
    """Loss and gradients of these micro-batches, of a step with `total` targets in `micro_batches`; None is these."""
    model.zero_grad()
    total = number_of_targets(t for _, t in batches) if total is None else total
    loss = 0.0
    for batch, targets in batches:
        out = model(*batch)
        part = loss_of(out.hidden, model.head_weight, targets, total, ops.linear_cross_entropy)
        part = part if out.aux_loss is None else part + out.aux_loss / (micro_batches or len(batches))
        part.backward()
        loss += float(part.detach())
    return loss, gradients(model)


def gradients(model: torch.nn.Module) -> Gradients:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def worst(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(float((found[n] - w).abs().max() / w.abs().max().clamp(min=1e-6)) for n, w in wanted.items())


def open_cpu(**sizes: int) -> Mesh:
    return open_mesh(MeshConfig(**sizes), torch.device("cpu"))
