"""Group assignment in PyTorch: for CPUs and torch.compile, and as readable formulas."""

import torch

from bagu.ops.contract.signature import accumulator
from bagu.ops.group_assign.spec import Args
from bagu.ops.gumbel_softmax.noise import gumbel, words


def forward(args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    share = _shares(args)[0]
    mass = share.sum(1)
    y = share.mT @ args.values.to(share.dtype) / (mass.unsqueeze(2) + args.eps)
    return y.to(args.scores.dtype), mass.detach()


def backward(args: Args, dy: torch.Tensor, y: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    share, soft = _shares(args)
    per = dy.to(share.dtype) / (mass.unsqueeze(2) + args.eps)  # [B, G, D]
    dvalues = share @ per
    own = (per * y.to(per.dtype)).sum(2)  # [B, G]: a token moves the mean by its distance from it
    dshare = args.values.to(per.dtype) @ per.mT - own.unsqueeze(1)
    dscores = soft * (dshare - (soft * dshare).sum(-1, keepdim=True)) / args.tau
    return dscores.to(args.scores.dtype), dvalues.to(args.values.dtype)


def _shares(args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of each token in each group, with the gradient of the soft one, and the soft one."""
    acc = accumulator(args.scores.dtype)
    z = args.scores.to(acc)
    if args.noise:
        z = z + gumbel(words(args.scores, args.seed), acc)
    soft = torch.softmax(z / args.tau, -1)
    if not args.hard or not soft.shape[-1]:
        return soft, soft
    first = torch.zeros_like(soft).scatter(-1, z.detach().argmax(-1, keepdim=True), 1.0)
    return first + (soft - soft.detach()), soft
