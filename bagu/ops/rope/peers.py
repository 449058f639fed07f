"""Other implementations of rotary position embedding, for the benchmark."""

from __future__ import annotations

import torch

from bagu.errors import NotOffered
from bagu.ops.rope.spec import Args


def eager(args: Args) -> torch.Tensor:
    """The usual model code: rotate_half, or complex multiplication; tables are gathered per call, in x's dtype."""
    x = args.x
    T, R = x.shape[-3], args.cos.shape[1]
    c, s = ((t[:T] if args.positions is None else t[args.positions]).unsqueeze(-2) for t in (args.cos, args.sin))
    turned, rest = x[..., : 2 * R], x[..., 2 * R :]
    if args.layout == "half":
        c, s = (torch.cat((t, t), -1).to(x.dtype) for t in (c, s))
        rotated = torch.cat((-turned[..., R:], turned[..., :R]), -1)
        y = turned * c + rotated * s
    else:
        pairs = torch.view_as_complex(turned.float().unflatten(-1, (R, 2)))
        y = torch.view_as_real(pairs * torch.complex(c.float(), s.float())).flatten(-2).to(x.dtype)
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


def liger(args: Args) -> torch.Tensor:
    """Liger rotates queries and keys together and in place, so it gets a copy of x as the queries."""
    x = args.x
    from liger_kernel.ops.rope import LigerRopeFunction

    if args.layout != "half":
        raise NotOffered("Liger's rope is the half layout only")
    T, R = x.shape[-3], args.cos.shape[1]
    c, s = (t[:T] if args.positions is None else t[args.positions] for t in (args.cos, args.sin))
    c, s = (torch.cat((t, t), -1).to(x.dtype).reshape(-1, T, 2 * R) for t in (c, s))
    q = x.reshape(-1, *x.shape[-3:]).clone().transpose(1, 2)
    k = q.new_empty(q.shape[0], 1, T, q.shape[-1])
    return LigerRopeFunction.apply(q, k, c, s)[0].transpose(1, 2).reshape(x.shape)
