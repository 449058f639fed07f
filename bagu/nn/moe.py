"""A mixture of experts: a router sends each token to its `top_k` of E experts and sums their outputs.

    scores = softmax(x W_r) or sigmoid(x W_r), in fp32
    y      = sum over the chosen e of  weight_e * FFN_e(x)   +   FFN_shared(x)

Tokens are sorted by expert, so that the tokens of an expert are contiguous and all experts are two grouped matmuls. No
token is dropped. Two methods balance the load, alone or together:

    aux_weight    a loss E * sum_e f_e p_e, f the fraction of choices and p the mean score of e; 1 if balanced
                  (Switch, https://arxiv.org/abs/2101.03961, over all choices as in GShard)
    bias_rate     a bias on the scores for the choice only, raised after each step for experts with a load below
                  average and lowered for the others (https://arxiv.org/abs/2408.15664); it gets no gradient

Dims: T = tokens, E = experts, K = top_k, D = hidden size, F = expert size.
"""

from typing import NamedTuple, Unpack

import torch
from torch import nn

from bagu import ops
from bagu.nn.config import ModelConfig, MoEConfig
from bagu.nn.ffn import FFN, activate
from bagu.nn.linear import Factory, Linear, parameter
from bagu.ops.invariant.mode import sigmoid


class Routing(NamedTuple):
    """Routing statistics of a layer."""

    aux_loss: torch.Tensor | None  # [] fp32, times aux_weight
    load: torch.Tensor  # [E] int64: number of tokens of each expert


class Router(Linear):
    """A linear layer in fp32 for any model dtype: rounding a score could change the choice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        acc = torch.promote_types(x.dtype, torch.float32)
        return ops.matmul(x.to(acc), self.merged().to(acc), None if self.bias is None else self.bias.to(acc))


def choose(scores: torch.Tensor, bias: torch.Tensor | None, moe: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights[T, K], experts[T, K]) of the chosen experts. With groups (DeepSeek-V3), only experts of the best
    `top_groups` groups are candidates; the score of a group is the sum of its best two."""
    T, E = scores.shape
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if moe.num_groups > 1:
        groups = ranked.view(T, moe.num_groups, -1)
        best = groups.topk(2, dim=2).values.sum(2).topk(moe.top_groups, dim=1).indices
        open_groups = torch.zeros_like(ranked[:, : moe.num_groups], dtype=torch.bool).scatter(1, best, True)
        ranked = groups.masked_fill(~open_groups.unsqueeze(2), float("-inf")).view(T, E)
    experts = ranked.topk(moe.top_k, dim=1).indices
    weights = scores.gather(1, experts)
    if moe.normalize_top_k:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)  # sigmoids can all be 0
    return weights * moe.route_scale, experts


def balance_loss(scores: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
    """E * sum f p: 1 if tokens and scores are evenly distributed, E if one expert has all."""
    share = load.to(scores.dtype) / load.sum()
    p = (scores / scores.sum(1, keepdim=True)).mean(0)  # softmax scores already sum to 1
    return load.numel() * (share * p).sum()


class MoE(nn.Module):
    bias: torch.Tensor | None

    def __init__(self, config: ModelConfig, moe: MoEConfig, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.moe, self.kind, self.clamp = moe, config.ffn, config.gate_clamp
        E, D, F = moe.num_experts, config.hidden_size, moe.expert_size
        self.router = Router(D, E, bias=moe.router_bias, **factory)
        if config.gated:
            self.gate_up = parameter(E, 2 * F, D, **factory)
        else:
            self.up = parameter(E, F, D, **factory)
        self.gated = config.gated
        self.down = parameter(E, D, F, **factory)
        biased = config.ffn_bias
        self.into_bias = parameter(E, (1 + config.gated) * F, **factory) if biased else None
        self.down_bias = parameter(E, D, **factory) if biased else None
        self.shared = FFN(config, moe.num_shared * F, **factory) if moe.num_shared else None
        bias = None if moe.bias_rate is None else torch.zeros(E, device=factory.get("device"), dtype=torch.float32)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        logits = self.router(x)
        scores = ops.softmax(logits) if self.moe.scoring == "softmax" else sigmoid(logits)
        weights, experts = choose(scores, self.bias, self.moe)
        ones = torch.ones_like(experts).flatten()
        load = torch.zeros(self.moe.num_experts, dtype=torch.int64, device=x.device)
        load = load.scatter_add(0, experts.flatten(), ones)
        y = self.visit(x, weights, experts, load)
        if self.shared is not None:
            y = y + self.shared(x)
        aux = None if self.moe.aux_weight is None else self.moe.aux_weight * balance_loss(scores, load)
        return y, Routing(aux, load)

    def visit(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
        """Send each token to its experts and sum their outputs."""
        (T, D), K = x.shape, self.moe.top_k
        order = experts.flatten().argsort(stable=True)  # choices sorted by expert; choice c belongs to token c // K
        offsets = load.cumsum(0).to(torch.int32)
        y = self.run_experts(x.index_select(0, order // K), offsets)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(T * K, device=order.device))
        choices = y.index_select(0, back).view(T, K, D)  # a gather in both directions, so no atomics are needed
        return torch.einsum("tkd,tk->td", choices, weights.to(x.dtype))

    def run_experts(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The outputs of the experts for rows x that are sorted by expert; the rows of expert e end at offsets[e]."""
        h = ops.grouped_matmul(x, self.gate_up if self.gated else self.up, offsets)
        if self.into_bias is None or self.down_bias is None:
            return ops.grouped_matmul(activate(self.kind, h, self.clamp), self.down, offsets)
        expert = torch.searchsorted(offsets, torch.arange(len(x), dtype=offsets.dtype, device=x.device), right=True)
        h = activate(self.kind, h + self.into_bias.index_select(0, expert), self.clamp)
        return ops.grouped_matmul(h, self.down, offsets) + self.down_bias.index_select(0, expert)

    @torch.no_grad()
    def update_balance(self, load: torch.Tensor) -> None:
        """One update of the balancing bias from the load of a full batch."""
        assert self.bias is not None and self.moe.bias_rate is not None
        load = load.to(self.bias.dtype)
        self.bias += self.moe.bias_rate * torch.sign(load.mean() - load)
