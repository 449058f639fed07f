"""Gumbel-softmax in PyTorch: for CPUs and torch.compile, and as readable formulas."""

import torch

from bagu.ops.contract.signature import accumulator
from bagu.ops.gumbel_softmax.noise import gumbel, words


def forward(logits: torch.Tensor, tau: float, hard: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    z = _noisy(logits, tau, seed)
    if not logits.shape[-1]:  # empty rows have no largest value
        return logits.clone(), z.new_full(z.shape[:-1], -torch.inf), z.new_zeros(z.shape[:-1])
    top = z.detach().amax(-1)
    e = torch.exp(z - top.unsqueeze(-1))
    total = e.sum(-1)
    y = e / total.unsqueeze(-1)
    if hard:
        first = torch.zeros_like(y).scatter(-1, z.detach().argmax(-1, keepdim=True), 1.0)
        y = first + (y - y.detach())  # the value of `first` (NaN where y is NaN), the gradient of y
    return y.to(logits.dtype), top, total.detach()


def backward(
    dy: torch.Tensor, logits: torch.Tensor, top: torch.Tensor, total: torch.Tensor, tau: float, hard: bool, seed: int
) -> tuple[torch.Tensor]:
    y = torch.exp(_noisy(logits, tau, seed) - top.unsqueeze(-1)) / total.unsqueeze(-1)
    dyf = dy.to(y.dtype)
    return ((y * (dyf - (dyf * y).sum(-1, keepdim=True)) / tau).to(logits.dtype),)


def _noisy(logits: torch.Tensor, tau: float, seed: int) -> torch.Tensor:
    acc = accumulator(logits.dtype)
    return (logits.to(acc) + gumbel(words(logits, seed), acc)) / tau
