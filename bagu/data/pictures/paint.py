"""Masks to pictures: random place, size and turn, random colours on random grounds. A batch at a time, in torch, as a
function of a generator."""

import torch
from torch.nn import functional as F

CONTRAST = 0.35  # least difference of brightness between a glyph and its ground
BRIGHTNESS = (0.299, 0.587, 0.114)


def uniform(shape: tuple[int, ...], low: float, high: float, stream: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(shape, generator=stream)


def colours(count: int, stream: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """[count, 3] of a glyph and of its ground, in 0 to 1. Of 16 random pairs the first with enough contrast."""
    pairs = torch.rand(count, 16, 2, 3, generator=stream)
    difference = (pairs @ torch.tensor(BRIGHTNESS)).diff(dim=2).abs().squeeze(2)
    first = (difference >= CONTRAST).int().argmax(1)
    chosen = pairs[torch.arange(count), first]
    return chosen[:, 0], chosen[:, 1]


def turned(masks: torch.Tensor, size: int, stream: torch.Generator, *, jitter: float = 1.0) -> torch.Tensor:
    """[N, size, size] in 0 to 1: the masks [N, S, S] scaled, shifted and turned at random, up to 10 degrees."""
    N = len(masks)
    angle = jitter * uniform((N,), -0.175, 0.175, stream)
    scale = 1 + jitter * uniform((N,), -0.1, 0.25, stream)
    shift = jitter * uniform((N, 2), -0.12, 0.12, stream)
    cos, sin = scale * torch.cos(angle), scale * torch.sin(angle)
    matrix = torch.stack((torch.stack((cos, -sin, shift[:, 0]), 1), torch.stack((sin, cos, shift[:, 1]), 1)), 1)
    grid = F.affine_grid(matrix, [N, 1, 2 * size, 2 * size], align_corners=False)
    drawn = F.grid_sample(masks.float().unsqueeze(1) / 255, grid, align_corners=False)
    return F.avg_pool2d(drawn, 2).squeeze(1)  # drawn at twice the size: edges stay smooth


def painted(masks: torch.Tensor, size: int, stream: torch.Generator, *, jitter: float = 1.0) -> torch.Tensor:
    """[N, 3, size, size] uint8: each mask in a random colour on a random ground."""
    cover = turned(masks, size, stream, jitter=jitter).unsqueeze(1)
    ink, ground = colours(len(masks), stream)
    picture = cover * ink[:, :, None, None] + (1 - cover) * ground[:, :, None, None]
    noise = 0.02 * torch.randn(picture.shape, generator=stream)
    return ((picture + noise).clamp(0, 1) * 255).round().to(torch.uint8)
