"""A vision-language model: ViT, pixel shuffle, projector, and any decoder of the package.

The text has one placeholder token per vector of an image; the decoder's `placed` puts the projected patches there.
Positions run on, so an image is a run of tokens like any other: packing, KV cache and prefix cache need nothing new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import torch
from torch import nn

from bagu.errors import ArgumentError
from bagu.nn.change import evaluating
from bagu.nn.choices import at_least, refuse
from bagu.nn.config import ModelConfig
from bagu.nn.ffn import activate
from bagu.nn.kv import KV, DenseKV
from bagu.nn.linear import Factory, Linear
from bagu.nn.model import Output, Placed, Transformer
from bagu.nn.sample import decode
from bagu.nn.vision.vit import Seen, ViT, ViTConfig


@dataclass(frozen=True, kw_only=True)
class VLMConfig:
    """`shuffle` × `shuffle` neighbouring patches become one vector for the decoder (pixel shuffle): fewer tokens, wider
    features. `image_token` is the placeholder's id in the decoder's vocabulary."""

    kind: Literal["vlm"] = "vlm"
    vit: ViTConfig
    decoder: ModelConfig
    image_token: int
    shuffle: int = 2

    def __post_init__(self) -> None:
        at_least(self, 1, "shuffle")
        if self.vit.side % self.shuffle:
            refuse(f"shuffle = {self.shuffle} of {self.vit.side} patches along a side", "choose a divisor")
        if not 0 <= self.image_token < self.decoder.vocab_size:
            refuse(f"image_token = {self.image_token} of {self.decoder.vocab_size} tokens", "it is a token's id")

    @property
    def image_tokens(self) -> int:
        """Tokens of an image of the largest size."""
        return (self.vit.side // self.shuffle) ** 2


def shuffled(patches: torch.Tensor, grid: tuple[int, int], block: int) -> torch.Tensor:
    """[rows * columns / block², block² * D] of the patches [rows * columns, D] of an image."""
    rows, columns = grid
    x = patches.view(rows // block, block, columns // block, block, -1)
    return x.transpose(1, 2).reshape(rows * columns // block**2, -1)


class VisionPart(nn.Module):
    """The part of a vision-language model before its decoder: images to vectors."""

    def __init__(self, config: VLMConfig, vit: ViT, up: Linear, down: Linear) -> None:
        super().__init__()
        self.config, self.vit, self.up, self.down = config, vit, up, down

    def encode(self, images: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The vectors [N, D] of each image, in the order of its placeholders."""
        seen: Seen = self.vit(images)
        grids, block = seen.packed.grids, self.config.shuffle
        if wrong := next((g for g in grids if g[0] % block or g[1] % block), None):
            raise ArgumentError(f"an image of {wrong[0]} × {wrong[1]} patches", hint=f"give multiples of {block}")
        counts = [rows * columns for rows, columns in grids]
        parts = seen.hidden[seen.packed.rows].split(counts)
        wide = torch.cat([shuffled(part, grid, block) for part, grid in zip(parts, grids, strict=True)])
        vectors = self.down(activate("gelu", self.up(wide)))
        return list(vectors.split([n // block**2 for n in counts]))


class VLM(VisionPart):
    def __init__(self, config: VLMConfig, **factory: Unpack[Factory]) -> None:
        wide, D = config.vit.hidden_size * config.shuffle**2, config.decoder.hidden_size
        up, down = (Linear(size, D, bias=True, **factory) for size in (wide, D))
        super().__init__(config, ViT(config.vit, **factory), up, down)
        self.decoder = Transformer(config.decoder, **factory)

    def place(self, ids: torch.Tensor, images: torch.Tensor | Sequence[torch.Tensor]) -> Placed:
        """The vectors of all images at the placeholders of ids[T], in order."""
        vectors = torch.cat(self.encode(images))
        rows = torch.nonzero(ids == self.config.image_token).squeeze(1)
        if len(rows) != len(vectors):
            raise ArgumentError(
                f"the text has {len(rows)} image tokens, and the images {len(vectors)} vectors",
                hint=f"write {self.config.image_tokens} image tokens for each image",
            )
        return Placed(rows, vectors)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_len: int,
        kv: KV | None = None,
        *,
        images: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> Output:
        """As `Transformer.forward`, with the images whose placeholders are in `ids`."""
        placed = None if images is None else self.place(ids, images)
        out: Output = self.decoder(ids, positions, cu_seqlens, max_len, kv, placed=placed)
        return out

    @torch.no_grad()
    def answer(
        self, prompts: Sequence[Sequence[int]], images: torch.Tensor | Sequence[torch.Tensor], max_new: int, eos_id: int
    ) -> list[list[int]]:
        """Greedy answers to a batch of prompts that contain the placeholders of `images`, in order."""
        table = self.decoder.embedding.weight
        kv = DenseKV(
            self.decoder.config, len(prompts), max(map(len, prompts)) + max_new, device=table.device, dtype=table.dtype
        )

        def forward(t: int, ids: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int) -> Any:
            return self(ids, positions, cu_seqlens, max_len, kv, images=images if t == 0 else None).hidden

        with evaluating(self):
            return decode(
                prompts, max_new, eos_id, kv, forward, lambda t, alive, hidden: self.decoder.logits(hidden).argmax(-1)
            )
