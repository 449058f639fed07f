"""Cross-entropy of each token against its target, with label smoothing s and z-loss z.

    lse[m]  = log(sum_v exp(x[m, v]))
    loss[m] = lse[m] - (1 - s) * x[m, t[m]] - s * mean_v x[m, v] + z * lse[m]^2        0 where t[m] is ignored

An ignored row has loss 0 and gradient 0, also if it contains NaN. A target that is neither ignored nor inside the
vocabulary gives NaN. A logit of -inf (a masked word) has probability and gradient 0; with label smoothing it makes the
loss infinite.

Dims: M = tokens, V = vocabulary.   Papers: https://arxiv.org/abs/1512.00567 (smoothing), 2204.02311 (z-loss, 5)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims

IGNORED = -100  # in the targets of a case: stands for the case's ignore_index
ALL, INF, NAN = ..., float("inf"), float("nan")


class Args(NamedTuple):
    logits: torch.Tensor
    targets: torch.Tensor
    ignore_index: int
    label_smoothing: float
    z_loss: float


def reference(a: Args) -> torch.Tensor:
    """The definition. An ignored row is replaced by zeros, so that its NaN and its gradient do not propagate."""
    targets = a.targets
    kept = targets != a.ignore_index
    x = torch.where(kept.unsqueeze(-1), a.logits, 0.0)
    inside = (targets >= 0) & (targets < x.shape[-1])
    word = torch.where(inside, targets, 0).long().unsqueeze(-1)
    target_logit = torch.where(inside, x.gather(-1, word).squeeze(-1), torch.nan)
    lse = x.logsumexp(-1)
    loss = lse - (1 - a.label_smoothing) * target_logit
    if a.label_smoothing:  # 0 * -inf is NaN
        loss = loss - a.label_smoothing * x.mean(-1)
    if a.z_loss:
        loss = loss + a.z_loss * lse.square()
    return torch.where(kept, loss, 0.0)


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if not 0.0 <= args["label_smoothing"] <= 1.0:
        raise ArgumentError(
            f"cross_entropy: label_smoothing is {args['label_smoothing']}, expected a share between 0 and 1",
            hint="0.1 gives a tenth of the probability to the whole vocabulary",
        )


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, V = case.get("lead", (case.get("M", 1),)), case["V"]
    logits = case.get("scale", 1.0) * streams.normal("logits", *lead, V)
    targets = streams.integers("targets", 0, V, *lead)
    ignore_index = case.get("ignore_index", streams.choice("ignore_index", IGNORED, -7))
    for row, word in case.get("targets", {}).items():
        targets[row] = ignore_index if word == IGNORED else word
    for row, word, value in case.get("plant", ()):
        logits[row, word] = value
    return {
        "logits": logits,
        "targets": targets.to(case.get("index", torch.int64)),
        "ignore_index": ignore_index,
        "label_smoothing": case.get("label_smoothing", 0.0),
        "z_loss": case.get("z_loss", 0.0),
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Maximum, subtract, exp, add per logit, each read once; per token a target, a loss and both parts of lse."""
    M, V = dims["M"], dims["V"]
    return Cost(flops=4 * M * V, bytes=M * V * itemsize + 20 * M)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Subtract, exp, scale, compare per logit; logits are read once, their gradient is written once."""
    M, V = dims["M"], dims["V"]
    return Cost(flops=4 * M * V, bytes=2 * M * V * itemsize + 20 * M)


CASES = [
    Case("even", "every term of the loss is there, and one target is ignored", M=4, V=32, label_smoothing=0.1,
         z_loss=0.01, targets={2: IGNORED}),
    Case("ragged", "rows start off a 16-byte boundary and one is ignored", M=5, V=123, targets={1: IGNORED}),
    Case("batched", "the leading dims are several, and are folded into rows", lead=(2, 3), V=40),
    Case("single", "there is no leading dim at all: one token", lead=(), V=24),
    Case("binary", "a row is shorter than one 16-byte load", M=19, V=2, z_loss=0.1),
    Case("empty", "there is no token, and nothing is launched", M=0, V=24),
    Case("short", "a row lies inside one 16-byte load or crosses two", M=9, V=3, label_smoothing=0.2),
    Case("point", "a vocabulary of one word has a loss of exactly 0", M=6, V=1),
    Case("smooth", "the target's share is spread over a vocabulary that fills no block", M=5, V=102,
         label_smoothing=0.3),
    Case("z", "the z-loss pulls the logsumexp to 0 and adds to every gradient", M=5, V=103, z_loss=0.1),
    Case("loud", "exp of these logits overflows unless the maximum is taken off", M=6, V=77, scale=1000.0),
    Case("huge", "logits so large that lse is the largest one in fp32; seven share the probability", M=5, V=77,
         plant=[(ALL, slice(3, 10), 1e8)], targets={ALL: 4, 2: IGNORED}),
    Case("faint", "all logits are nearly equal, and the loss is log V", M=6, V=77, scale=1e-3),
    Case("sure", "the target takes almost all, and its gradient is what is left of 1", M=4, V=33, targets={ALL: 5},
         plant=[(ALL, 5, 10.0)]),
    Case("ignored", "every target is ignored: losses and gradients are 0", M=3, V=33, targets={ALL: IGNORED}),
    Case("padding", "the ignored word is one of the vocabulary", M=6, V=20, ignore_index=3,
         targets={0: 3, 1: 0, 4: 3}),
    Case("outside", "a target outside the vocabulary reads no memory and gives NaN", M=5, V=20,
         targets={0: 20, 1: -1, 2: 2**40, 3: 19}),
    Case("int32", "targets may be int32, the ignored one among them", M=4, V=50, index=torch.int32,
         targets={3: IGNORED}),
    Case("masked", "a masked word has no probability and no gradient, even as a target", M=3, V=37,
         plant=[(ALL, slice(5, 30), -INF)], targets={0: 2, 1: 7, 2: 31}),
    Case("masked_smooth", "smoothing asks a masked word for probability, and the loss is infinite", M=3, V=37,
         label_smoothing=0.1, plant=[(1, slice(5, 30), -INF)], targets={ALL: 2}),
    Case("blocked", "a row with nothing but masked words has no distribution: NaN, and only there", M=3, V=21,
         plant=[(1, ALL, -INF)]),
    Case("nan", "a NaN spoils its own row and no other; in an ignored row it is not looked at", M=4, V=33,
         plant=[(0, 16, NAN), (2, 0, NAN)], targets={2: IGNORED}),
    Case("nan_late", "a NaN in a later block spoils the row too", M=3, V=4500, plant=[(1, 4400, NAN)]),
    Case("inf", "an infinite logit takes all probability, and its own gradient is inf - inf", M=4, V=33,
         plant=[(0, 16, INF), (1, 32, INF)], targets={1: 32}),
    Case("inf_z", "with z-loss the gradient of such a row is NaN throughout", M=4, V=33, z_loss=0.1,
         plant=[(0, 16, INF)]),
    Case("long", "a row is several blocks, read by one program; the loudest word comes last", M=5, V=9001,
         label_smoothing=0.1, plant=[(ALL, 9000, 30.0)], targets={0: 9000, 1: 0, 3: IGNORED}),
    Case("wide", "few long rows are split over programs", M=2, V=40003, label_smoothing=0.1, z_loss=0.01,
         plant=[(0, 3, 25.0), (1, 40000, 25.0)], targets={0: 39999}),
    Case("wide_ignored", "split rows may be ignored; there are so many that the rows decide how often", M=5,
         V=49200, sms=1, targets={1: IGNORED, 4: IGNORED}),
    Case("llama_131k", "a vocabulary of Llama 3's size at 4k tokens", bench=True, M=4096, V=131072),
    Case("llama_32k", "the vocabulary of Llama 2 at 8k tokens", bench=True, M=8192, V=32000),
    Case("odd", "an odd V has no aligned rows", bench=True, M=2048, V=65537),
    Case("gemma_262k", "the widest vocabulary in use", bench=True, M=4096, V=262144),
]  # fmt: skip

SPEC = OpSpec(
    name="cross_entropy",
    signature="logits[*M, V], targets[*M]: int, ignore_index: int, label_smoothing: float, z_loss: float"
    " -> losses[*M]: acc; base[*M]: acc, rest[*M]: acc",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    cost_backward=cost_backward,
    grads=("logits",),
    saves=("logits", "targets", "base", "rest"),
    ulps=1,
    nonempty=("V",),
    independent=("M",),
    peers=True,
    cases=CASES,
)
