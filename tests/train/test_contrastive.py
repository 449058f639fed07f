"""The contrastive loss is the one with the matrix, duplicates count nowhere, and an embedder learns from pairs."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from bagu.train.objectives.contrastive import contrastive_nll, first_of_each, text_keys


def naive(q: torch.Tensor, p: torch.Tensor, scale: float, keep: torch.Tensor) -> torch.Tensor:
    logits = scale * q[keep] @ p[keep].T
    targets = torch.arange(len(logits))
    both = [F.cross_entropy(x, targets, reduction="none") for x in (logits, logits.T)]
    return torch.zeros(len(q), dtype=q.dtype).masked_scatter(keep, (both[0] + both[1]) / 2)


def test_loss_and_gradients_are_those_of_the_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    for keep in (torch.ones(24, dtype=torch.bool), torch.rand(24, generator=generator) > 0.3):
        found = []
        for function in (contrastive_nll, naive):
            generator.manual_seed(1)
            q, p = (torch.randn(24, 16, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
            loss = function(F.normalize(q, dim=1), F.normalize(p, dim=1), 20.0, keep)
            loss.sum().backward()
            found.append((loss.detach(), q.grad, p.grad))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_equal_texts_are_found() -> None:
    texts = [[1, 2, 3], [3, 2, 1], [1, 2, 3], [5], [1, 2], [5]]
    ids = torch.tensor([i for t in texts for i in t])
    positions = torch.tensor([i for t in texts for i in range(len(t))])
    segment = torch.tensor([n for n, t in enumerate(texts) for _ in t])
    keys = text_keys(ids, positions, segment, len(texts))
    assert first_of_each(keys).tolist() == [True, True, False, True, True, False]
