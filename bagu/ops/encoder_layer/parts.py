"""The composition of an encoder layer from the blocks of one backend, forward and backward.

    after     s1 = x + attention(x)      n1 = norm1(s1)     s2 = n1 + mlp(n1)     y = norm2(s2)
    before    n1 = norm1(x)     s2 = x + attention(n1)      n2 = norm2(s2)        y = s2 + mlp(n2)

A residual's gradient is added by the kernel that makes the gradient of the other branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from bagu.ops.encoder_layer.spec import Args, attention, feed_forward

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Parts:
    attention: ModuleType  # a backend of self_attention
    mlp: ModuleType  # a backend of mlp
    norm: Callable[..., tuple[Any, ...]]  # (x, weight, bias, eps, addend) -> norm, x + addend, mean, rstd
    norm_backward: Callable[..., tuple[Any, ...]]  # (dy, x, weight, bias, mean, rstd, eps, plus) -> dx + plus, dw, db

    def forward(self, a: Args) -> Tensors:
        """y, what the blocks keep, the three tensors between them, and the statistics of the norms."""
        x, eps = a.x, a.eps
        if a.norm_first:
            n1, _, mean1, r1 = self.norm(x, a.norm1, a.norm1_bias, eps, None)
        mixed, *kept = self.attention.forward(attention(a, n1 if a.norm_first else x))
        if a.norm_first:
            n2, s2, mean2, r2 = self.norm(mixed, a.norm2, a.norm2_bias, eps, x)
            y, z, _, h = self.mlp.forward(feed_forward(a, n2), plus=s2)
            return y, *kept, n1, s2, n2, z, h, mean1, r1, mean2, r2
        n1, s1, mean1, r1 = self.norm(mixed, a.norm1, a.norm1_bias, eps, x)
        fed, z, _, h = self.mlp.forward(feed_forward(a, n1))
        y, s2, mean2, r2 = self.norm(fed, a.norm2, a.norm2_bias, eps, n1)
        return y, *kept, s1, n1, s2, z, h, mean1, r1, mean2, r2

    def backward(
        self, a: Args, dy: torch.Tensor, qkv: torch.Tensor, mixed: torch.Tensor, lse: torch.Tensor, one: torch.Tensor,
        two: torch.Tensor, three: torch.Tensor, z: torch.Tensor, h: torch.Tensor, mean1: torch.Tensor, r1: torch.Tensor,
        mean2: torch.Tensor, r2: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        def of_mlp(d: torch.Tensor, n: torch.Tensor, plus: torch.Tensor | None) -> Any:
            return self.mlp.backward(feed_forward(a, n), d, z, d.new_empty(0), h, plus=plus)

        def of_attention(d: torch.Tensor, n: torch.Tensor, plus: torch.Tensor | None) -> Any:
            return self.attention.backward(attention(a, n), d, qkv, mixed, lse, plus=plus)

        first, second = (a.norm1, a.norm1_bias, mean1, r1, a.eps), (a.norm2, a.norm2_bias, mean2, r2, a.eps)
        if a.norm_first:  # one, two and three are n1, s2 and n2
            dn2, dup, ddown, _, dup_bias, ddown_bias = of_mlp(dy, three, None)
            ds2, dnorm2, dnorm2_bias = self.norm_backward(dn2, two, *second, dy)
            dn1, dw_in, dw_out, db_in, db_out = of_attention(ds2, one, None)
            dx, dnorm1, dnorm1_bias = self.norm_backward(dn1, a.x, *first, ds2)
        else:  # s1, n1 and s2
            ds2, dnorm2, dnorm2_bias = self.norm_backward(dy, three, *second, None)
            dn1, dup, ddown, _, dup_bias, ddown_bias = of_mlp(ds2, two, ds2)
            ds1, dnorm1, dnorm1_bias = self.norm_backward(dn1, one, *first, None)
            dx, dw_in, dw_out, db_in, db_out = of_attention(ds1, a.x, ds1)
        of_blocks = dw_in, db_in, dw_out, db_out, dup, dup_bias, ddown, ddown_bias
        return dx, *of_blocks, dnorm1, dnorm1_bias, dnorm2, dnorm2_bias
