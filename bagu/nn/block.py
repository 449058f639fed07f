"""One layer: attention, then the feed-forward network, each with a residual connection.

The stream between blocks is `(x, delta)`: the residual stream, and a delta that is still to be added to it. The norm of
the next block can then fuse the addition. A delta of None means that there is nothing to add.
"""

import math
from typing import Unpack

import torch
from torch import nn
from torch.nn import functional as F

from bagu.nn.attention import Attention, Context
from bagu.nn.config import ModelConfig
from bagu.nn.ffn import FFN
from bagu.nn.linear import Factory
from bagu.nn.mla import MLA
from bagu.nn.moe import MoE, Routing
from bagu.nn.norm import make_norm

Stream = tuple[torch.Tensor, torch.Tensor | None, Routing | None]


def expected_size(alpha: float, sublayers: int) -> float:
    """Standard deviation of the stream after this many sublayers, each of which adds alpha² to a variance of 1."""
    return math.sqrt(1.0 + sublayers * alpha * alpha)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.placement, self.dropout = config.norm.placement, config.dropout
        self.residual = config.multipliers.residual
        self.attention: Attention | MLA = (Attention if config.mla is None else MLA)(config, layer, **factory)
        experts = config.experts(layer)
        self.ffn: FFN | MoE = (
            FFN(config, config.intermediate_size, **factory) if experts is None else MoE(config, experts, **factory)
        )
        if self.placement != "none":
            self.attention_norm = make_norm(config.norm, config.hidden_size, **factory)
            self.ffn_norm = make_norm(config.norm, config.hidden_size, **factory)
        if self.placement == "sandwich":
            self.attention_post_norm = make_norm(config.norm, config.hidden_size, **factory)
            self.ffn_post_norm = make_norm(config.norm, config.hidden_size, **factory)
        self.alpha = config.norm.alpha or 0.0
        self.betas = [expected_size(self.alpha, 2 * layer + i) for i in range(2)]

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None, context: Context) -> Stream:
        match self.placement:
            case "pre":
                h, x = self.attention_norm.add(delta, x)
                h, x = self.ffn_norm.add(self.attend(h, context), x)
                delta, routing = self.feed(h)
                return x, delta, routing
            case "sandwich":
                h, x = self.attention_norm.add(delta, x)
                h, x = self.ffn_norm.add(self.attention_post_norm(self.attend(h, context)), x)
                delta, routing = self.feed(h)
                return x, self.ffn_post_norm(delta), routing
            case "post":
                x, _ = self.attention_norm.add(self.attend(x, context), x)
                delta, routing = self.feed(x)
                x, _ = self.ffn_norm.add(delta, x)
                return x, None, routing
            case "output":
                x = x if delta is None else x + delta
                x = x + self.attention_norm(self.attend(x, context))
                delta, routing = self.feed(x)
                return x, self.ffn_norm(delta), routing
            case "none":
                x = x + self.alpha * self.attend(x / self.betas[0], context)
                delta, routing = self.feed(x / self.betas[1])
                return x + self.alpha * delta, None, routing

    def attend(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return self.scale(self.attention(x, context))

    def feed(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing | None]:
        if isinstance(self.ffn, MoE):
            y, routing = self.ffn(x)
            return self.scale(y), routing
        return self.scale(self.ffn(x)), None

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """Dropout and the residual multiplier."""
        x = x if self.residual == 1.0 else x * self.residual
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
