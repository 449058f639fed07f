"""The loss of a linear head over all tokens, with its gradients computed in the same pass.

    x = hidden @ weight.T        lse[m] = log(sum_v exp(x[m, v]))
    loss = sum_m token_weights[m] * (lse[m] - x[m, t[m]] + z_loss * lse[m]^2)        over the m that are not ignored

Without token_weights the loss is the mean over the tokens that are not ignored; 0 if all are.

The weights are known in the forward, and so is the gradient of every logit: there are three GEMMs (x, dx @ weight, dx.T
@ hidden) and x is computed once. `target_logit` and `lse` are as in linear_cross_entropy, but constants. The residuals
are d loss / d hidden and d loss / d weight, computed only if `grad_hidden` and `grad_weight` request them; the backward
multiplies them by the incoming scalar.

Dims: M = tokens, D = features, V = vocabulary; H, W = shapes of the residuals.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.linear_cross_entropy import spec as head
from bagu.ops.linear_cross_entropy.losses import token_losses


class Args(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    token_weights: torch.Tensor | None
    ignore_index: int
    z_loss: float
    memory: int | None
    grad_hidden: bool
    grad_weight: bool


def reference(a: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition, on all logits at once; autograd gives the gradients."""
    target_logit, lse = head.reference(head.Args(a.hidden, a.weight, a.targets, a.ignore_index, a.memory))
    losses = token_losses(target_logit, lse, a.z_loss).loss
    kept = a.targets != a.ignore_index
    weights = 1 / kept.sum().clamp(min=1) if a.token_weights is None else a.token_weights
    return torch.where(kept, weights * losses, 0.0).sum(), target_logit.detach(), lse.detach()


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    args = head.inputs(case, streams)
    M = max(1, args["targets"].numel())
    spread = 0.0 if case.bench else 0.5  # other libraries give all tokens equal weight
    weights = (1 + spread * streams.normal("token_weights", *args["targets"].shape)) / M
    if "ignored_weight" in case.params:
        weights[args["targets"] == args["ignore_index"]] = case["ignored_weight"]
    return args | {
        "token_weights": None if case.get("mean", False) else weights,
        "z_loss": case.get("z_loss", streams.choice("z_loss", 0.0, 0.05)),
        "grad_hidden": "hidden" not in case.frozen,
        "grad_weight": "weight" not in case.frozen,
    }


def derive(args: Mapping[str, Any], dims: Dims) -> Dims:
    """The residuals' shapes."""
    return {
        "H": (*dims["M"], dims["D"]) if args["grad_hidden"] else (0,),
        "W": (dims["V"], dims["D"]) if args["grad_weight"] else (0,),
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Three GEMMs; hidden and weight are read once, their gradients are written once."""
    M, D, V = dims["M"], dims["D"], dims["V"]
    return Cost(flops=6 * M * D * V, bytes=2 * (M * D + V * D) * itemsize + 20 * M)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Both gradients are read once, scaled and written once."""
    M, D, V = dims["M"], dims["D"], dims["V"]
    return Cost(flops=M * D + V * D, bytes=2 * (M * D + V * D) * itemsize + 4)


OF_WEIGHTS = [
    Case("unweighted_frozen", "nor is it without gradients", M=5, D=16, V=40, ignore_index=-7,
         targets={1: head.IGNORED, 4: head.IGNORED}, ignored_weight=float("nan"), frozen=["hidden", "weight"]),
    Case("mean", "without weights: the mean of the tokens that are not ignored", lead=(2, 4), D=16, V=40, mean=True,
         targets={(1, 2): head.IGNORED}),
    Case("mean_frozen", "without gradients; more tokens than a block of the loss has", M=2100, D=16, V=3,
         mean=True, targets={7: head.IGNORED, 2099: head.IGNORED}, frozen=["hidden", "weight"]),
    Case("mean_of_none", "the mean over no token is 0", M=3, D=16, V=40, mean=True, targets={head.ALL: head.IGNORED}),
]  # fmt: skip

SPEC = OpSpec(
    name="linear_cross_entropy_loss",
    signature="hidden[*M, D], weight[V, D], targets[*M]: int, token_weights[*M]?: float, ignore_index: int,"
    " z_loss: float, memory: int?, grad_hidden: bool, grad_weight: bool"
    " -> loss[]: acc, target_logit[*M]: acc, lse[*M]: acc; hidden_grad[*H], weight_grad[*W]",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=partial(head.refuse_memory, "linear_cross_entropy_loss"),
    cost_backward=cost_backward,
    grads=("hidden", "weight"),
    saves=("hidden", "weight", "hidden_grad", "weight_grad"),
    constant=("target_logit", "lse"),
    derive=derive,
    ulps=2,  # as in linear_cross_entropy; the product with the incoming scalar adds one rounding, 0.8 measured in all
    ulps_of=head.TARGET_LOGIT,
    nonempty=("D", "V"),
    independent=(),
    peers=True,
    cases=[
        *(c.replace(z_loss=0.01) if c.name == "even" else c for c in head.CASES),
        Case("z", "the z-loss pulls every logsumexp to 0", M=6, D=8, V=40, z_loss=0.1, targets={2: head.IGNORED}),
        Case(
            "unweighted",
            "the weight of an ignored token is not looked at, even if it is NaN",
            M=5,
            D=16,
            V=40,
            targets={1: head.IGNORED, 4: head.IGNORED},
            ignored_weight=float("nan"),
            ignore_index=-7,
        ),
        Case("mixed", "token weights stay fp32 beside 16-bit activations", M=6, D=8, V=40, mixed=["token_weights"]),
        *OF_WEIGHTS,
        *head.BENCH,
    ],
)
