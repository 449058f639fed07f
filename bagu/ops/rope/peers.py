"""Other implementations of rotary position embedding, for the benchmark."""

from __future__ import annotations

import torch

from bagu.errors import NotOffered


def eager(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None, layout: str
) -> torch.Tensor:
    """The usual model code: rotate_half, or complex multiplication; tables are gathered per call, in x's dtype."""
    T, R = x.shape[-3], cos.shape[1]
    c, s = ((t[:T] if positions is None else t[positions]).unsqueeze(-2) for t in (cos, sin))
    turned, rest = x[..., : 2 * R], x[..., 2 * R :]
    if layout == "half":
        c, s = (torch.cat((t, t), -1).to(x.dtype) for t in (c, s))
        rotated = torch.cat((-turned[..., R:], turned[..., :R]), -1)
        y = turned * c + rotated * s
    else:
        pairs = torch.view_as_complex(turned.float().unflatten(-1, (R, 2)))
        y = torch.view_as_real(pairs * torch.complex(c.float(), s.float())).flatten(-2).to(x.dtype)
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


def liger(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None, layout: str
) -> torch.Tensor:
    """Liger rotates queries and keys together and in place, so it gets a copy of x as the queries."""
    from liger_kernel.ops.rope import LigerRopeFunction

    if layout != "half":
        raise NotOffered("Liger's rope is the half layout only")
    T, R = x.shape[-3], cos.shape[1]
    c, s = (t[:T] if positions is None else t[positions] for t in (cos, sin))
    c, s = (torch.cat((t, t), -1).to(x.dtype).reshape(-1, T, 2 * R) for t in (c, s))
    q = x.reshape(-1, *x.shape[-3:]).clone().transpose(1, 2)
    k = q.new_empty(q.shape[0], 1, T, q.shape[-1])
    return LigerRopeFunction.apply(q, k, c, s)[0].transpose(1, 2).reshape(x.shape)
