"""The vision Transformer (https://arxiv.org/abs/2010.11929): patches, the package's Transformer without a causal mask,
and a pool. It is no model of its own: `ViTConfig.transformer` is the configuration.

    pool "cls"         the hidden state of a learned first token (ViT, CLIP)
    pool "mean"        the mean over the patches
    pool "attention"   a learned query attends to the patches, then an MLP (SigLIP)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Unpack

import torch
from torch import nn

from bagu.nn.choices import NormConfig, at_least, refuse
from bagu.nn.config import FFNKind, ModelConfig
from bagu.nn.ffn import FFN
from bagu.nn.linear import Factory, Linear, parameter
from bagu.nn.model import Placed, Transformer
from bagu.nn.norm import LayerNorm
from bagu.nn.position_choices import Learned
from bagu.nn.vision.patches import Packed, pack, to_floats

Pool = Literal["cls", "mean", "attention"]


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """`image_size` is the largest side; smaller images use a part of the positions. `standardize` gives every image
    mean 0 and deviation 1; else pixels are -1 to 1."""

    kind: Literal["vit"] = "vit"
    image_size: int
    patch_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    channels: int = 3
    pool: Pool = "mean"
    registers: int = 0  # learned tokens besides the class token (https://arxiv.org/abs/2309.16588)
    ffn: FFNKind = "gelu"
    eps: float = 1e-6
    qkv_bias: bool = True
    patch_bias: bool = True
    embedding_norm: bool = False  # CLIP: a norm before the first block
    standardize: bool = False

    def __post_init__(self) -> None:
        at_least(self, 1, "image_size", "patch_size", "hidden_size", "num_layers", "num_heads", "channels")
        at_least(self, 0, "registers")
        if self.image_size % self.patch_size:
            refuse(f"patches of {self.patch_size} in an image of {self.image_size}", "the side must be a multiple")
        if self.pool == "attention" and self.registers:
            refuse("registers with the attention pool, which would attend to them", "use pool cls or mean")
        if self.hidden_size % self.num_heads:
            refuse(f"num_heads = {self.num_heads} does not divide hidden_size = {self.hidden_size}", "choose a divisor")

    @property
    def side(self) -> int:
        """Patches along the side of the largest image."""
        return self.image_size // self.patch_size

    @property
    def specials(self) -> int:
        return (self.pool == "cls") + self.registers

    def transformer(self, specials: int | None = None, num_layers: int | None = None) -> ModelConfig:
        """A Transformer whose vocabulary are the special tokens."""
        count = self.specials if specials is None else specials
        return ModelConfig(
            vocab_size=max(count, 1), hidden_size=self.hidden_size, num_layers=num_layers or self.num_layers,
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.hidden_size // self.num_heads,
            intermediate_size=self.intermediate_size, max_len=count + self.side * self.side,
            norm=NormConfig(kind="layer", eps=self.eps, bias=True), positions=Learned(), causal=False, lm_head=False,
            qkv_bias=self.qkv_bias, out_bias=True, ffn=self.ffn, ffn_bias=True, embedding_norm=self.embedding_norm,
        )  # fmt: skip


class Seen(NamedTuple):
    """What a ViT makes of some images."""

    hidden: torch.Tensor  # [T, D]: of every token, after the last norm
    pooled: torch.Tensor  # [B, D]
    packed: Packed


def segment_mean(x: torch.Tensor, owner: torch.Tensor, count: int) -> torch.Tensor:
    """[count, D]: the mean of the rows of x[N, D] that belong to each owner."""
    total = x.new_zeros(count, x.shape[1]).index_add(0, owner, x)
    return total / torch.bincount(owner, minlength=count).clamp(min=1).unsqueeze(1).to(x.dtype)


def as_floats(
    images: torch.Tensor | Sequence[torch.Tensor], config: ViTConfig, dtype: torch.dtype
) -> torch.Tensor | list[torch.Tensor]:
    """uint8 pixels as the config wants them; floats are normalized already."""
    if not isinstance(images, torch.Tensor):
        return [
            to_floats(x, dtype, standardize=config.standardize) if x.dtype == torch.uint8 else x.to(dtype)
            for x in images
        ]
    return to_floats(images, dtype, standardize=config.standardize) if images.dtype == torch.uint8 else images.to(dtype)


class AttentionPool(nn.Module):
    """SigLIP's head: one learned query over the patches of an image, then x + MLP(norm(x))."""

    def __init__(self, config: ViTConfig, **factory: Unpack[Factory]) -> None:
        super().__init__()
        D = config.hidden_size
        self.heads = config.num_heads
        self.probe = parameter(1, D, **factory)
        self.query = Linear(D, D, bias=True, **factory)
        self.key_value = Linear(D, 2 * D, bias=True, **factory)
        self.out = Linear(D, D, bias=True, **factory)
        self.norm = LayerNorm(D, config.eps, bias=True, **factory)
        self.mlp = FFN(config.transformer(), config.intermediate_size, **factory)

    def forward(self, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        B, D = len(packed.grids), self.probe.shape[1]
        q = self.query(self.probe).view(self.heads, -1)
        k, v = self.key_value(hidden).view(len(hidden), 2, self.heads, -1).unbind(1)
        # one query per image: its scores are a product, and a softmax over each segment
        scores = (k * q).sum(-1) * (D // self.heads) ** -0.5  # [T, H]
        ends = packed.cu_seqlens.long()
        owner = torch.bucketize(torch.arange(len(hidden), device=ends.device), ends[1:], right=True)
        index = owner.unsqueeze(1).expand_as(scores)
        top = scores.new_full((B, self.heads), -torch.inf).scatter_reduce(0, index, scores.detach(), "amax")
        e = torch.exp(scores - top[owner])
        share = e / scores.new_zeros(B, self.heads).index_add(0, owner, e)[owner]
        pooled = v.new_zeros(B, self.heads, v.shape[2]).index_add(0, owner, v * share.unsqueeze(2)).flatten(1)
        x: torch.Tensor = self.out(pooled)
        y: torch.Tensor = x + self.mlp(self.norm(x))
        return y


class ViT(nn.Module):
    def __init__(self, config: ViTConfig, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.config = config
        size = config.channels * config.patch_size**2
        self.patches = Linear(size, config.hidden_size, bias=config.patch_bias, **factory)
        self.body = Transformer(config.transformer(), **factory)
        self.pool = AttentionPool(config, **factory) if config.pool == "attention" else None

    def forward(self, images: torch.Tensor | Sequence[torch.Tensor]) -> Seen:
        """Images are uint8 pixels, or floats that are normalized already, [B, C, H, W] or a list of [C, H, W]."""
        c = self.config
        packed = pack(as_floats(images, c, self.patches.dtype), c.patch_size, c.side, c.specials)
        placed = Placed(packed.rows, self.patches(packed.patches))
        out = self.body(packed.ids, packed.positions, packed.cu_seqlens, packed.max_len, placed=placed)
        return Seen(out.hidden, self._pooled(out.hidden, packed), packed)

    def _pooled(self, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        match self.config.pool:
            case "cls":
                return hidden[packed.cu_seqlens[:-1].long()]
            case "mean":
                ends = packed.cu_seqlens[1:].long()
                return segment_mean(hidden[packed.rows], torch.bucketize(packed.rows, ends, right=True), len(ends))
            case "attention":
                assert self.pool is not None
                pooled: torch.Tensor = self.pool(hidden, packed)
                return pooled
