"""The layers of `bagu bench layers`: each built from torch.nn or from bagu.nn.drop_in, with the same weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bagu import ops
from bagu.nn import drop_in


@dataclass(frozen=True, kw_only=True)
class Layer:
    """`build(kit)` makes the layer from `kit`, torch.nn or drop_in. `shape` is that of an input without the batch."""

    name: str
    build: Callable[[Any], nn.Module]
    shape: tuple[int, ...]
    tokens: int | None = None  # inputs are integers below this


class SwiGLU(nn.Module):
    """w3(silu(w1 x) * w2 x): five ops of torch, one of bagu."""

    def __init__(self, kit: Any, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2 = kit.Linear(width, hidden, bias=False), kit.Linear(width, hidden, bias=False)
        self.w3 = kit.Linear(hidden, width, bias=False)
        self.fused = kit is drop_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return ops.mlp(x, self.w2.weight, self.w3.weight, gate=self.w1.weight, activation="silu")
        y: torch.Tensor = self.w3(nn.functional.silu(self.w1(x)) * self.w2(x))
        return y


class NormReLU(nn.Module):
    """A BatchNorm and a ReLU: one layer of drop_in, two of torch.nn."""

    def __init__(self, kit: Any, channels: int) -> None:
        super().__init__()
        self.norm = kit.BatchNorm2d(channels)
        self.fused = kit is drop_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x, "relu") if self.fused else nn.functional.relu(self.norm(x))
        return y


class EmbeddingLoss(nn.Module):
    """The ends of a language model: the embedding, and the loss of a linear head over the vocabulary."""

    def __init__(self, kit: Any, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = kit.Embedding(vocabulary, width)
        self.head = kit.Linear(width, vocabulary, bias=False)
        self.fused = kit is drop_in

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, targets = self.embedding(tokens).flatten(0, 1), tokens.roll(-1, -1).flatten()
        if self.fused:
            loss: torch.Tensor = ops.linear_cross_entropy_loss(x, self.head.weight, targets)[0]
            return loss
        return nn.functional.cross_entropy(self.head(x).float(), targets)


def _attention(kit: Any, width: int, heads: int) -> nn.Module:
    class SelfAttention(kit.MultiheadAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x, x, x, need_weights=False)[0]
            return y

    return SelfAttention(width, heads, batch_first=True)


def _encoder(kit: Any, width: int, heads: int) -> nn.Module:
    made: nn.Module = kit.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
    return made


def _layers(width: int, tokens: int, image: int, vocabulary: int) -> dict[str, Layer]:
    heads, channels = width // 64, width // 8
    found = [
        Layer(name="linear", build=lambda kit: kit.Linear(width, 4 * width), shape=(tokens, width)),
        Layer(name="int8_linear", build=lambda kit: int8(kit)(width, 4 * width), shape=(tokens, width)),
        Layer(
            name="conv2d",
            build=lambda kit: kit.Conv2d(channels, channels, 3, padding=1, bias=False),
            shape=(channels, image, image),
        ),
        Layer(
            name="batch_norm_relu", build=lambda kit: NormReLU(kit, 2 * channels), shape=(2 * channels, image, image)
        ),
        Layer(name="layer_norm", build=lambda kit: kit.LayerNorm(width), shape=(tokens, width)),
        Layer(name="attention", build=lambda kit: _attention(kit, width, heads), shape=(tokens, width)),
        Layer(name="encoder_layer", build=lambda kit: _encoder(kit, width, heads), shape=(tokens, width)),
        Layer(name="swiglu", build=lambda kit: SwiGLU(kit, width, 8 * width // 3 // 64 * 64), shape=(tokens, width)),
        Layer(
            name="embedding_loss",
            build=lambda kit: EmbeddingLoss(kit, vocabulary, width),
            shape=(tokens,),
            tokens=vocabulary,
        ),
    ]
    return {layer.name: layer for layer in found}


def int8(kit: Any) -> Any:
    return drop_in.Int8Linear if kit is drop_in else kit.Linear


LAYERS = {
    "cuda": _layers(width=1024, tokens=1024, image=56, vocabulary=32768),
    "cpu": _layers(width=256, tokens=128, image=28, vocabulary=4096),
}
