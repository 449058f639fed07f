"""One function per update rule, over flat tensors: p and g of a segment, and the rule's state, all fp32.

Each changes p and its state in place, and may use g as scratch memory, because the next step overwrites it. θ is the
parameter, g the gradient, η the learning rate, λ the weight decay. Decay is L2 (added to g) in the older rules, and
decoupled (θ shrinks by ηλ) in AdamW, Lion and Muon, as in their papers. Muon is in muon.py: it needs the matrices'
shapes.
"""

import math
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Now:
    """The values of one update that all segments share: its learning rate, and its number, counted from 1."""

    lr: float
    step: int


def sgd(p: Tensor, g: Tensor, now: Now, *, weight_decay: float) -> None:
    """θ ← θ - η (g + λθ)"""
    _l2(p, g, weight_decay)
    p.add_(g, alpha=-now.lr)


def momentum(p: Tensor, g: Tensor, velocity: Tensor, now: Now, *, momentum: float, weight_decay: float) -> None:
    """v ← μv + g;  θ ← θ - ηv"""
    _l2(p, g, weight_decay)
    velocity.mul_(momentum).add_(g)
    p.add_(velocity, alpha=-now.lr)


def nesterov(p: Tensor, g: Tensor, velocity: Tensor, now: Now, *, momentum: float, weight_decay: float) -> None:
    """v ← μv + g;  θ ← θ - η (g + μv): to first order, the gradient at the point to which the momentum moves θ."""
    _l2(p, g, weight_decay)
    velocity.mul_(momentum).add_(g)
    p.add_(g.add_(velocity, alpha=momentum), alpha=-now.lr)


def adagrad(p: Tensor, g: Tensor, square_sum: Tensor, now: Now, *, eps: float, weight_decay: float) -> None:
    """G ← G + g²;  θ ← θ - η g / (√G + ε): frequent features slow down, and the step size never grows again."""
    _l2(p, g, weight_decay)
    square_sum.addcmul_(g, g)
    p.addcdiv_(g, square_sum.sqrt().add_(eps), value=-now.lr)


def adadelta(
    p: Tensor,
    g: Tensor,
    square_avg: Tensor,
    delta_avg: Tensor,
    now: Now,
    *,
    rho: float,
    eps: float,
    weight_decay: float,
) -> None:
    """E[g²] ← ρE[g²] + (1-ρ)g²;  Δ = g √(E[Δ²]+ε) / √(E[g²]+ε);  E[Δ²] as E[g²];  θ ← θ - ηΔ (Δ has θ's unit)"""
    _l2(p, g, weight_decay)
    square_avg.mul_(rho).addcmul_(g, g, value=1 - rho)
    delta = delta_avg.add(eps).sqrt_().div_(square_avg.add(eps).sqrt_()).mul_(g)
    delta_avg.mul_(rho).addcmul_(delta, delta, value=1 - rho)
    p.add_(delta, alpha=-now.lr)


def rmsprop(p: Tensor, g: Tensor, square_avg: Tensor, now: Now, *, rho: float, eps: float, weight_decay: float) -> None:
    """E[g²] ← ρE[g²] + (1-ρ)g²;  θ ← θ - η g / (√E[g²] + ε)"""
    _l2(p, g, weight_decay)
    square_avg.mul_(rho).addcmul_(g, g, value=1 - rho)
    p.addcdiv_(g, square_avg.sqrt().add_(eps), value=-now.lr)


def adam(
    p: Tensor,
    g: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    now: Now,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """m ← β₁m + (1-β₁)g;  v ← β₂v + (1-β₂)g²;  θ ← θ - η m̂ / (√v̂ + ε), where m̂ = m/(1-β₁ᵗ), v̂ = v/(1-β₂ᵗ)"""
    _l2(p, g, weight_decay)
    beta1, beta2 = betas
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**now.step)).add_(eps)
    p.addcdiv_(exp_avg, root, value=-now.lr / (1 - beta1**now.step))


def adamw(
    p: Tensor,
    g: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    now: Now,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Adam, and separately θ ← (1 - ηλ) θ, so that decay is not divided by √v̂."""
    _shrink(p, now, weight_decay)
    adam(p, g, exp_avg, exp_avg_sq, now, betas=betas, eps=eps, weight_decay=0.0)


def lion(p: Tensor, g: Tensor, exp_avg: Tensor, now: Now, *, betas: tuple[float, float], weight_decay: float) -> None:
    """θ ← (1 - ηλ) θ - η sign(β₁m + (1-β₁)g);  m ← β₂m + (1-β₂)g: one state, all updates have the same magnitude."""
    _shrink(p, now, weight_decay)
    p.add_(exp_avg.lerp(g, 1 - betas[0]).sign_(), alpha=-now.lr)
    exp_avg.lerp_(g, 1 - betas[1])


def _l2(p: Tensor, g: Tensor, weight_decay: float) -> None:
    if weight_decay:
        g.add_(p, alpha=weight_decay)


def _shrink(p: Tensor, now: Now, weight_decay: float) -> None:
    if weight_decay:
        p.mul_(1 - now.lr * weight_decay)
