"""GroupViT (https://arxiv.org/abs/2202.11094): group tokens run with the patches through some layers, and then take
them in: every patch goes to one group. What remains of an image are a few vectors, and the map of who went where.

Attention would let every patch be read by every query. Here the softmax runs over the groups (ops.group_assign), the
sum is a mean over the members, and the matrix of assignments is kept: it is the segmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, Unpack

import torch
from torch import nn
from torch.nn import functional as F

from bagu import ops
from bagu.errors import ArgumentError
from bagu.nn.choices import at_least
from bagu.nn.ffn import activate
from bagu.nn.linear import Factory, Linear
from bagu.nn.model import Placed, Transformer
from bagu.nn.norm import LayerNorm
from bagu.nn.vision.patches import pack
from bagu.nn.vision.vit import ViTConfig, as_floats


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`layers` of Transformer with the group tokens, which then take the tokens in: `groups` remain."""

    layers: int
    groups: int

    def __post_init__(self) -> None:
        at_least(self, 1, "layers", "groups")


@dataclass(frozen=True, kw_only=True)
class GroupViTConfig:
    """`vit` gives the sizes of patches and layers; its `num_layers` run on the last groups, and its pool is not used:
    the mean of the groups is the image."""

    kind: Literal["groupvit"] = "groupvit"
    vit: ViTConfig
    stages: tuple[Stage, ...]
    tau: float = 1.0
    eps: float = 1.0  # added to the number of a group's members
    carry: bool = True  # a group's vector contains its group token, which has seen every patch; else its members only


class MLP(nn.Module):
    def __init__(self, size: int, inner: int, out: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.up = Linear(size, inner, bias=True, **factory)
        self.down = Linear(inner, out, bias=True, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(activate("gelu", self.up(x)))
        return y


class CrossAttention(nn.Module):
    """Groups look at the tokens once before they take them in."""

    def __init__(self, config: ViTConfig, **factory: Unpack[Factory]) -> None:
        super().__init__()
        D, self.heads = config.hidden_size, config.num_heads
        self.query, self.key, self.value, self.out = (Linear(D, D, bias=True, **factory) for _ in range(4))
        self.norm = LayerNorm(D, config.eps, bias=True, **factory)
        self.mlp = MLP(D, config.intermediate_size, D, **factory)
        self.norm_post = LayerNorm(D, config.eps, bias=True, **factory)

    def forward(self, groups: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for f, x in ((self.query, groups), (self.key, tokens), (self.value, tokens))
        )
        x = groups + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y: torch.Tensor = self.norm_post(x + self.mlp(self.norm(x)))
        return y


class GroupingBlock(nn.Module):
    """Tokens [B, T, D] and group tokens [B, N, D] to groups [B, G, D], and the soft assignment [B, G, T]."""

    def __init__(self, config: GroupViTConfig, num_tokens: int, groups: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        vit, self.tau, self.eps, self.carry = config.vit, config.tau, config.eps, config.carry
        D = vit.hidden_size
        self.norm_groups, self.norm_mixed, self.norm_tokens, self.norm_new = (
            LayerNorm(D, vit.eps, bias=True, **factory) for _ in range(4)
        )
        self.mixer = MLP(num_tokens, D // 2, groups, **factory)
        self.cross = CrossAttention(vit, **factory)
        self.query, self.key, self.value, self.out = (Linear(D, D, bias=True, **factory) for _ in range(4))
        self.channels = MLP(D, 4 * D, D, **factory)

    def forward(
        self, tokens: torch.Tensor, groups: torch.Tensor, seed: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With a `seed` the assignment is sampled, as in training; without, every token takes its best group."""
        tokens = self.norm_tokens(tokens)
        groups = self.norm_mixed(self.mixer(self.norm_groups(groups).mT.contiguous()).mT.contiguous())
        groups = self.cross(groups, tokens)
        scores = self.key(tokens) @ self.query(groups).mT * tokens.shape[2] ** -0.5  # [B, T, G]
        taken = ops.group_assign(
            scores, self.value(tokens), tau=self.tau, hard=True, noise=seed is not None, seed=seed or 0, eps=self.eps
        )
        x = self.out(taken) + groups if self.carry else self.out(taken)
        return x + self.channels(self.norm_new(x)), ops.softmax(scores).mT


class Grouped(NamedTuple):
    """What a GroupViT makes of images of one size."""

    groups: torch.Tensor  # [B, G, D]: after the last norm
    pooled: torch.Tensor  # [B, D]: their mean
    assignments: tuple[torch.Tensor, ...]  # [B, G, T] soft, of each stage
    grid: tuple[int, int]


class GroupViT(nn.Module):
    def __init__(self, config: GroupViTConfig, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.config, vit = config, config.vit
        self.patches = Linear(vit.channels * vit.patch_size**2, vit.hidden_size, bias=vit.patch_bias, **factory)
        self.bodies = nn.ModuleList(
            Transformer(vit.transformer(stage.groups, stage.layers), **factory) for stage in config.stages
        )
        self.grouping = nn.ModuleList(GroupingBlock(config, s.groups, s.groups, **factory) for s in config.stages)
        self.last = Transformer(vit.transformer(0), **factory)

    def forward(self, images: torch.Tensor | Sequence[torch.Tensor]) -> Grouped:
        """Images of one size: uint8 pixels or normalized floats, [B, C, H, W]."""
        if not isinstance(images, torch.Tensor):
            raise ArgumentError("GroupViT takes images of one size", hint="stack them")
        vit = self.config.vit
        packed = pack(as_floats(images, vit, self.patches.dtype), vit.patch_size, vit.side, 0)
        x = self.patches(packed.patches).unflatten(0, (len(images), -1))
        positions = packed.positions.view(x.shape[:2])
        assignments = []
        for body, grouping, stage in zip(self.bodies, self.grouping, self.config.stages, strict=True):
            hidden = self._run(body, x, positions, stage.groups)
            seed = int(torch.randint(2**62, ())) if self.training else None
            x, soft = grouping(hidden[:, stage.groups :], hidden[:, : stage.groups], seed)
            assignments.append(soft)
            positions = torch.arange(stage.groups, device=x.device).expand(len(x), -1)
        groups = self._run(self.last, x, positions, 0)
        return Grouped(groups, groups.mean(1), tuple(assignments), packed.grids[0])

    def _run(self, body: nn.Module, x: torch.Tensor, positions: torch.Tensor, groups: int) -> torch.Tensor:
        """[B, groups + T, D]: group tokens and x[B, T, D] through the layers of a stage."""
        B, T, D = x.shape
        length, device = groups + T, x.device
        own = torch.arange(groups, device=device).expand(B, -1)
        ids = torch.cat((own, torch.zeros(B, T, dtype=torch.int64, device=device)), 1)
        places = torch.cat((own, positions + groups), 1)
        rows = torch.arange(B * length, device=device).view(B, length)[:, groups:]
        cu_seqlens = torch.arange(0, B * length + 1, length, dtype=torch.int32, device=device)
        placed = Placed(rows.flatten(), x.flatten(0, 1))
        return body(ids.flatten(), places.flatten(), cu_seqlens, length, placed=placed).hidden.view(B, length, D)

    @torch.no_grad()
    def shares(self, images: torch.Tensor) -> torch.Tensor:
        """[B, G, rows, columns]: how much of a patch is in each of the last groups, the product over the stages."""
        seen = self(images)
        share = seen.assignments[0]
        for later in seen.assignments[1:]:
            share = later @ share
        return share.unflatten(2, seen.grid).float()

    def segments(self, images: torch.Tensor, *, guided: bool = True) -> torch.Tensor:
        """[B, H, W] int64: the last group of every pixel. The maps of the groups go from patches to pixels guided by
        the colours of the image, or by bilinear interpolation."""
        maps = self.shares(images)
        if guided:
            return upsample_guided(maps, images).argmax(1)
        return F.interpolate(maps, tuple(images.shape[-2:]), mode="bilinear").argmax(1)


def upsample_guided(
    maps: torch.Tensor, images: torch.Tensor, *, radius: int = 2, reach: float = 1.0, contrast: float = 0.8
) -> torch.Tensor:
    """Joint bilateral upsampling (https://dl.acm.org/doi/10.1145/1276377.1276497): maps[B, G, h, w] of patches to
    [B, G, H, W] of pixels. A pixel takes the mean of the patches around it, weighted by their distance (in patches,
    deviation `reach`) and by how much their mean colour differs from the pixel's (in deviations of the image's
    colours, deviation `contrast`). So an edge that is finer than a patch follows the image."""
    size, (h, w) = images.shape[-2:], maps.shape[-2:]
    x = images.to(maps.dtype)
    x = x - x.mean((2, 3), keepdim=True)
    x = x / x.square().sum(1, keepdim=True).mean((2, 3), keepdim=True).sqrt().clamp(min=1e-6)
    small = F.adaptive_avg_pool2d(x, (h, w))
    around = F.pad(torch.cat((maps, small), 1), (radius,) * 4, mode="replicate")
    offsets = [((torch.arange(n, device=x.device) + 0.5) * m / n) % 1 - 0.5 for n, m in zip(size, (h, w), strict=True)]
    total = maps.new_zeros(*maps.shape[:2], *size)
    for dy, dx in product(range(2 * radius + 1), repeat=2):
        part, colour = F.interpolate(around[:, :, dy : dy + h, dx : dx + w], size).split((maps.shape[1], 3), 1)
        distance = (offsets[0] - dy + radius).square().unsqueeze(1) + (offsets[1] - dx + radius).square()
        difference = (x - colour).square().sum(1, keepdim=True)
        total += part * torch.exp(-distance / (2 * reach**2) - difference / (2 * contrast**2))
    return total
