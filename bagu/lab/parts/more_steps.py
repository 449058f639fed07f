"""Training and loss of small models over text or over sequences that a lab draws."""

from collections.abc import Callable
from typing import Literal

import torch

from bagu import ops
from bagu.data import DataConfig, Loader, TokenStore
from bagu.data.loader import Transform
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.train import OptimizerConfig, ScheduleConfig, TrainConfig, fit

IGNORE = -100  # a target that does not count
Draw = Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]  # ids[N, T], targets[N, T]


def go_on(
    model: Transformer, tokens: TokenStore, data: DataConfig, *, steps: int, seed: int, lr: float = 0.02,
    kind: Literal["muon", "adamw"] = "muon", warmup: int | None = None, precision: Literal["fp8"] | None = None,
    change: Transform | None = None,
) -> Transformer:  # fmt: skip
    """Train a model further, in place, with a new optimizer; the learning rate ends at 0. `change` is applied to each
    batch."""
    config = TrainConfig(
        steps=steps,
        seed=seed,
        optimizer=OptimizerConfig(kind=kind, lr=lr),
        precision=precision,
        schedule=ScheduleConfig(kind="linear", warmup_steps=max(steps // 20, 1) if warmup is None else warmup),
    )
    loader = Loader({"text": tokens}, data)
    done = fit(config, model, loader if change is None else loader.mapped(change))
    if done.interrupted:  # Ctrl-C ends the lab, not only this training
        raise KeyboardInterrupt
    return model


def new(config: ModelConfig, seed: int, device: str) -> Transformer:
    return init_weights(Transformer(config, device=device), seed)


def train_on_draws(model: Transformer, draw: Draw, *, steps: int, seed: int, lr: float) -> Transformer:
    """Train in place by AdamW on sequences that `draw` makes, new ones in each step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 20, 1) * (1 - step / steps)
        ids, targets = (x.to(model.embedding.weight.device) for x in draw(generator))
        keep = targets.flatten() != IGNORE
        logit, lse = ops.linear_cross_entropy(hidden(model, ids)[keep], model.head_weight, targets.flatten()[keep])
        optimizer.zero_grad()
        (lse - logit).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def hidden(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    """[N T, width]: the last hidden states of ids[N, T], each row a text from position 0 on."""
    N, T = ids.shape
    cu_seqlens = torch.arange(0, N * T + 1, T, dtype=torch.int32, device=ids.device)
    return model(ids.flatten(), torch.arange(T, device=ids.device).repeat(N), cu_seqlens, T).hidden


@torch.no_grad()
def right(model: Transformer, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Whether the likeliest token is the target, as 0 or 1, [N, T]; NaN where the target does not count."""
    best = (hidden(model, ids) @ model.head_weight.t()).argmax(-1).view(ids.shape)
    return torch.where(targets == IGNORE, float("nan"), (best == targets).double())
