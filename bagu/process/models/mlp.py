"""Sixteen networks that share their weights: an MLP whose heads scale inputs and outputs of each layer (TabM, 2024).

The layers are bagu's ops. Heads start with random signs of the first scaling, so that they differ; the prediction is
their mean. Training is AdamW for a fixed number of steps with a fixed seed: the same bits for the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    import torch

HEADS, WIDTH, STEPS, RATE, DECAY, BATCH = 16, 32, 200, 8e-3, 3e-2, 128
BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Mlp:
    weights: dict[str, np.ndarray]
    centre: float
    scale: float

    @classmethod
    def fit(cls, x: np.ndarray, y: np.ndarray) -> Self:
        import torch

        centre, scale = float(y.mean()), float(y.std()) or 1.0
        generator = torch.Generator().manual_seed(0)
        rows, target = torch.tensor(x, dtype=torch.float32), torch.tensor((y - centre) / scale, dtype=torch.float32)
        start = _initial(x.shape[1], generator)
        flat = torch.cat([w.flatten() for w in start.values()]).requires_grad_()
        mean, square = torch.zeros_like(flat), torch.zeros_like(flat)

        def weights() -> dict[str, torch.Tensor]:
            parts = flat.split([w.numel() for w in start.values()])
            return {name: part.view(w.shape) for (name, w), part in zip(start.items(), parts, strict=True)}

        for step in range(STEPS):
            picked = torch.randperm(len(rows), generator=generator)[:BATCH]
            loss = (_forward(weights(), rows[picked]) - target[picked, None]).square().mean()
            slope = torch.autograd.grad(loss, flat)[0]
            with torch.no_grad():
                _adamw(flat, slope, mean, square, step + 1, RATE * min(1.0, 2 * (1 - step / STEPS)))
        return cls({name: w.detach().numpy().copy() for name, w in weights().items()}, centre, scale)

    def predict(self, x: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            weights = {name: torch.from_numpy(w) for name, w in self.weights.items()}
            heads = _forward(weights, torch.tensor(x, dtype=torch.float32))
        return self.centre + self.scale * heads.mean(1).double().numpy()

    def on(self, x: np.ndarray, y: np.ndarray) -> Self:
        return self.fit(x, y)

    def arrays(self) -> dict[str, np.ndarray]:
        return {**self.weights, "scaling": np.array([self.centre, self.scale])}

    @classmethod
    def from_arrays(cls, a: dict[str, np.ndarray]) -> Self:
        centre, scale = map(float, a["scaling"])
        return cls({name: w for name, w in a.items() if name != "scaling"}, centre, scale)


def _initial(inputs: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    import torch

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    return {
        "signs": torch.randint(0, 2, (HEADS, inputs), generator=generator).float() * 2 - 1,
        "first": normal(WIDTH, inputs, scale=inputs**-0.5),
        "first_bias": normal(HEADS, WIDTH, scale=0.1),
        "norm": torch.ones(WIDTH),
        "norm_bias": torch.zeros(WIDTH),
        "scales": 1 + normal(HEADS, WIDTH, scale=0.3),
        "second": normal(WIDTH, WIDTH, scale=WIDTH**-0.5),
        "second_bias": normal(HEADS, WIDTH, scale=0.1),
        "out": normal(HEADS, WIDTH, scale=WIDTH**-0.5),
        "out_bias": torch.zeros(HEADS),
    }


def _adamw(
    flat: torch.Tensor, slope: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, step: int, rate: float
) -> None:
    """One step of AdamW, in place. Not torch.optim: its first step imports torch's compiler, 2 s."""
    mean.lerp_(slope, 1 - BETAS[0])
    square.mul_(BETAS[1]).addcmul_(slope, slope, value=1 - BETAS[1])
    root = (square / (1 - BETAS[1] ** step)).sqrt_().add_(1e-8)
    flat.mul_(1 - rate * DECAY).addcdiv_(mean, root, value=-rate / (1 - BETAS[0] ** step))


def _forward(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """[rows, heads]"""
    from bagu import ops

    first = (w["signs"][:, None] * w["first"]).flatten(0, 1)
    hidden = ops.matmul(x, first, w["first_bias"].flatten()).unflatten(1, (HEADS, WIDTH))
    hidden = ops.gelu(ops.layer_norm(hidden, w["norm"], w["norm_bias"]))
    hidden = hidden + ops.gelu(ops.matmul(hidden * w["scales"], w["second"]) + w["second_bias"])
    return (hidden * w["out"]).sum(-1) + w["out_bias"]
