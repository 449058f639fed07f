"""Muon: momentum, then the nearest (semi-)orthogonal matrix to it, so that no direction of a matrix is left behind.

    m ← μm + (1-μ)g        O = UVᵀ of (1-μ)g + μm = UΣVᵀ        θ ← (1 - ηλ) θ - η · 0.2 √max(R, C) · O

The factor gives an update the root mean square of an AdamW one (about 0.2), so one learning rate serves the matrices
here and the embeddings and vectors that AdamW updates. UVᵀ is found by five steps of a quintic Newton-Schulz iteration,
which needs matrix products only; its singular values end between about 0.7 and 1.2, and that is near enough. bf16 is
precise enough for it, so the iteration runs in whichever of bf16 and fp32 this machine multiplies faster.

https://kellerjordan.github.io/posts/muon, https://arxiv.org/abs/2502.16982 (the factor)
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from bagu.train.flat import Segment
from bagu.train.optim.rules import Now

__all__ = ["muon", "orthogonalise"]

QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at zero, so that small singular values grow fastest


def muon(
    segment: Segment, p: torch.Tensor, g: torch.Tensor, velocity: torch.Tensor, now: Now, *, momentum: float,
    weight_decay: float, newton_schulz_steps: int, newton_schulz_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Update a segment of matrices (a stack of experts is many). Those of one shape go through at once."""
    velocity.lerp_(g, 1 - momentum)
    g.lerp_(velocity, momentum)
    if weight_decay:
        p.mul_(1 - now.lr * weight_decay)
    by_shape: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for slot in segment.slots:
        shape = slot.parameter.shape
        pair = (slot.of(p, segment.start).view(-1, *shape[-2:]), slot.of(g, segment.start).view(-1, *shape[-2:]))
        by_shape[shape[-2:]].append(pair)
    for (rows, columns), pairs in by_shape.items():
        stacked = torch.cat([grads for _, grads in pairs])
        update = orthogonalise(stacked, newton_schulz_steps, newton_schulz_dtype)
        rate = now.lr * 0.2 * math.sqrt(max(rows, columns))
        for (matrices, _), part in zip(pairs, update.split([len(m) for m, _ in pairs]), strict=True):
            matrices.add_(part, alpha=-rate)


def orthogonalise(stack: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """About UVᵀ of each matrix UΣVᵀ in `stack` [n, R, C], computed and returned in `dtype`."""
    a, b, c = QUINTIC
    tall = stack.shape[1] > stack.shape[2]
    x = (stack.mT if tall else stack).to(dtype)  # the Gram matrix of the short side is the small one
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # all singular values at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
