"""Multi-head latent attention (DeepSeek-V2 and V3, https://arxiv.org/abs/2405.04434).

    c = norm(x W_kv_a)              the latent, kv_rank per token; keys and values of all heads are computed from it
    k = [c W_uk, rope(x W_kr)]      a part per head, and a part with the position that all heads share
    q = [q_nope, rope(q_rope)]      through a latent of its own if q_rank is given

Training expands c to keys and values. With a KV view nothing is expanded: W_uk is absorbed into the queries and W_uv is
applied after attention, which becomes MQA over one head of kv_rank + rope_dim; the cache holds c and the shared key
only. Both are equal up to rounding. In invariant mode, where training and inference must give the same bits, training
is absorbed too: expanding the cached latents at every step would cost more.

Dims: T = tokens, H = heads, C = kv_rank, N = nope_dim, R = rope_dim, E = v_dim.
"""

from typing import Unpack

import torch
from torch import nn

from bagu import ops
from bagu.nn.attention import Context, Softmax
from bagu.nn.config import ModelConfig, Rope
from bagu.nn.linear import Factory, Linear
from bagu.nn.norm import RMSNorm
from bagu.ops.invariant.mode import active


class MLA(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        mla, H, hidden, wn = config.mla, config.num_heads, config.hidden_size, config.weight_norm
        assert mla is not None and isinstance(config.positions, Rope), "ModelConfig requires RoPE for MLA"
        self.num_heads, self.dims, self.layout = H, mla, config.positions.layout
        if mla.q_rank is None:
            self.q = Linear(hidden, H * config.head_dim, weight_norm=wn, **factory)
        else:
            self.q_a = Linear(hidden, mla.q_rank, weight_norm=wn, **factory)
            self.q_norm = RMSNorm(mla.q_rank, mla.eps, **factory)
            self.q_b = Linear(mla.q_rank, H * config.head_dim, weight_norm=wn, **factory)
        self.kv_a = Linear(hidden, mla.kv_rank + mla.rope_dim, weight_norm=wn, **factory)
        self.kv_norm = RMSNorm(mla.kv_rank, mla.eps, **factory)
        self.kv_b = Linear(mla.kv_rank, H * (mla.nope_dim + mla.v_dim), weight_norm=wn, **factory)
        self.out = Linear(H * mla.v_dim, hidden, bias=config.out_bias, weight_norm=wn, **factory)
        self.softmax = Softmax(config, layer)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        T, H, (N, R, C) = x.shape[0], self.num_heads, (self.dims.nope_dim, self.dims.rope_dim, self.dims.kv_rank)
        q = self.q(x) if self.dims.q_rank is None else self.q_b(self.q_norm(self.q_a(x)))
        q_nope, q_rope = q.view(T, H, N + R).split((N, R), 2)
        latent, k_rope = self.kv_a(x).split((C, R), 1)
        latent = self.kv_norm(latent)
        q_rope, k_rope = self.turn(q_rope, context), self.turn(k_rope.unsqueeze(1), context)
        attend = self.expanded if context.kv is None and not active() else self.absorbed
        return self.out(attend(q_nope, q_rope, latent, k_rope, context).flatten(1))

    def turn(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        cos, sin = context.signals.cos, context.signals.sin
        assert cos is not None and sin is not None, "ModelConfig requires RoPE for MLA"
        return ops.rope(x, cos, sin, layout=self.layout)

    def expanded(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """Expand a key and a value per head; used in training."""
        H, N, E = self.num_heads, self.dims.nope_dim, self.dims.v_dim
        k_nope, v = self.kv_b(latent).view(-1, H, N + E).split((N, E), 2)
        k = torch.cat((k_nope, k_rope.expand(-1, H, -1)), 2)
        y: torch.Tensor = self.softmax(torch.cat((q_nope, q_rope), 2), k, v, context)
        return y

    def absorbed(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """q (c W_uk) = (q W_ukᵀ) c: queries are mapped to the latent space, and all heads share one KV head."""
        N, C = self.dims.nope_dim, self.dims.kv_rank
        w_uk, w_uv = self.kv_b.merged().view(self.num_heads, -1, C).split((N, self.dims.v_dim), 1)
        q = torch.cat((per_head(q_nope, w_uk.mT), q_rope), 2)
        c = latent.unsqueeze(1)
        k = torch.cat((c, k_rope), 2)
        if context.kv is None:
            seen = self.softmax(q, k, c, context)
        else:
            seen = self.softmax.cached(context.kv, q, k, None, C, context.signals)
        return per_head(seen, w_uv)


def per_head(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x[T, H, K] times w[H, N, K] per head, as [T, H, N]."""
    if not active():
        return torch.einsum("thk,hnk->thn", x, w)
    T, H, K = x.shape  # heads are the experts of a grouped matmul, each with T rows
    ends = torch.arange(T, H * T + 1, T, dtype=torch.int32, device=x.device)
    return ops.grouped_matmul(x.transpose(0, 1).reshape(-1, K), w, ends).view(H, T, -1).transpose(0, 1)
