"""Two towers (CLIP, SigLIP): an image and a text get unit vectors in one space, and a learned scale turns cosines into
logits. The image tower is any module that returns `pooled` vectors: a ViT or a GroupViT."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Unpack

import torch
from torch import nn
from torch.nn import functional as F

from bagu.nn.config import ModelConfig
from bagu.nn.init import draw, init_weights
from bagu.nn.linear import Factory, Linear, parameter
from bagu.nn.model import Transformer
from bagu.nn.norm import Norm
from bagu.nn.vision.group import GroupViT, GroupViTConfig
from bagu.nn.vision.vit import ViT, ViTConfig, segment_mean

MAX_SCALE = 100.0  # CLIP's cap: beyond it training is unstable


@dataclass(frozen=True, kw_only=True)
class TowersConfig:
    """`dim` is the size of the shared vectors; None: both towers have it already, without projections (SigLIP)."""

    kind: Literal["towers"] = "towers"
    image: ViTConfig | GroupViTConfig
    text: ModelConfig
    dim: int | None
    text_pool: Literal["last", "mean"] = "mean"
    text_projection_bias: bool = False
    text_projection: bool = True
    sigmoid_bias: bool = False  # SigLIP: a learned bias of the logits
    first_scale: float = field(default=1 / 0.07)


class TwoTowers(nn.Module):
    def __init__(self, config: TowersConfig, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.config = config
        image, text = config.image, config.text
        self.image: ViT | GroupViT = (
            ViT(image, **factory) if isinstance(image, ViTConfig) else GroupViT(image, **factory)
        )
        self.text = Transformer(text, **factory)
        vit = image if isinstance(image, ViTConfig) else image.vit
        dim = vit.hidden_size if config.dim is None else config.dim
        self.image_projection = None if config.dim is None else Linear(vit.hidden_size, dim, **factory)
        self.text_projection = (
            Linear(text.hidden_size, dim, bias=config.text_projection_bias, **factory)
            if config.text_projection
            else None
        )
        self.log_scale = parameter(**factory)
        self.logit_bias = parameter(**factory) if config.sigmoid_bias else None

    @property
    def scale(self) -> torch.Tensor:
        return self.log_scale.exp().clamp(max=MAX_SCALE)

    def image_vectors(self, images: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """[B, dim], unit length."""
        return self.shared(self.image(images).pooled)

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim], unit length: vectors of the image tower in the space of both."""
        return F.normalize(x if self.image_projection is None else self.image_projection(x), dim=-1)

    def text_vectors(
        self, ids: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int
    ) -> torch.Tensor:
        """[S, dim], unit length, of packed texts."""
        hidden = self.text(ids, positions, cu_seqlens, max_len).hidden
        ends = cu_seqlens[1:].long()
        if self.config.text_pool == "last":
            pooled = hidden[ends - 1]
        else:
            owner = torch.bucketize(torch.arange(len(ids), device=ends.device), ends, right=True)
            pooled = segment_mean(hidden, owner, len(ends))
        return F.normalize(pooled if self.text_projection is None else self.text_projection(pooled), dim=-1)


@torch.no_grad()
def init_vision(model: nn.Module, seed: int) -> nn.Module:
    """First weights of a model that contains Transformers, drawn by name as nn/init.py does: matrices outside of them
    keep the variance of their input."""
    inside: set[int] = set()
    groups: list[torch.Tensor] = []
    for path, module in model.named_modules():
        if isinstance(module, Transformer):
            init_weights(module, seed + 1 + zlib.crc32(path.encode()) % 2**16)
            inside |= {id(p) for p in module.parameters()}
        elif isinstance(module, GroupViT):
            groups += [body.get_parameter("embedding.weight") for body in module.bodies]
    owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    for name, p in model.named_parameters():
        if id(p) in inside:
            continue
        owner = owners[id(p)]
        if name.endswith("log_scale"):
            assert isinstance(owner, TwoTowers)
            p.fill_(math.log(owner.config.first_scale))
        elif isinstance(owner, Norm) and name.endswith("weight"):
            p.fill_(1.0)
        elif name.endswith("bias"):
            p.zero_()
        else:
            p.copy_(draw(p.shape, name, seed) * (p.shape[-1] ** -0.5 if isinstance(owner, Linear) else 0.02))
    for number, tokens in enumerate(groups):
        # as long as a patch, and orthogonal: at 0.02 attention adds the same to all, and one group takes every patch
        nn.init.orthogonal_(tokens, tokens.shape[1] ** 0.5, generator=torch.Generator().manual_seed(seed + number))
    return model
