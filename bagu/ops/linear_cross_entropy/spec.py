"""A linear head for cross-entropy: each token's target logit and logsumexp, without storing all logits.

    x = hidden @ weight.T        target_logit[m] = x[m, t[m]]        lse[m] = log(sum_v exp(x[m, v]))

Both are 0 and have no gradient where t[m] is ignored. A target that is neither ignored nor inside the vocabulary
gives a NaN logit. The logits exist for one chunk of tokens at a time, as many as fit in `memory` bytes, and in the
forward of 16-bit operands on Triton not at all; the backward computes them again. There are four GEMMs in all: x, x
again, dx @ weight, dx.T @ hidden.

lse is one number in the accumulator's dtype: a loss lse - target_logit and probabilities exp(x - lse) are off by up to
|lse| * 2^-24 in fp32, 6e-5 at a logit of 1,000. (`cross_entropy` keeps lse in two parts and is exact.)

Dims: M = tokens, D = features, V = vocabulary.   Paper: https://arxiv.org/abs/2411.09009
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.cross_entropy.torch_backend import target_logits

IGNORED = -100  # in the targets of a case: stands for the case's ignore_index
ALL, INF, NAN = ..., float("inf"), float("nan")
# Tensor cores truncate where they add: the logit of cuBLAS is 3.4 spacings of fp32 off in "tiles_deep" on an H200.
TARGET_LOGIT = {"target_logit": 4}


class Args(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    ignore_index: int
    memory: int | None


def reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, on all logits at once."""
    kept = a.targets != a.ignore_index
    x = torch.where(kept.unsqueeze(-1), a.hidden @ a.weight.T, 0.0)
    return torch.where(kept, target_logits(x, a.targets), 0.0), torch.where(kept, x.logsumexp(-1), 0.0)


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, D, V = case.get("lead", (case.get("M", 1),)), case["D"], case["V"]
    hidden = case.get("scale", 1.0) * streams.normal("hidden", *lead, D)
    targets = streams.integers("targets", 0, V, *lead)
    ignore_index = case.get("ignore_index", streams.choice("ignore_index", IGNORED, -7))
    for row, word in case.get("targets", {}).items():
        targets[row] = ignore_index if word == IGNORED else word
    for row, feature, value in case.get("plant", ()):
        hidden[row, feature] = value
    weight = D**-0.5 * streams.normal("weight", V, D)
    if case.get("low", False):
        hidden, weight = -60.0 * hidden.abs(), weight.abs()
    return {
        "hidden": hidden,
        "weight": weight,
        "targets": targets.to(case.get("index", torch.int64)),
        "ignore_index": ignore_index,
        "memory": case.get("memory", None),
    }


def refuse_memory(op: str, args: Mapping[str, Any], dims: Dims) -> None:
    """Raise if the memory budget of `op` is not positive."""
    if args["memory"] is not None and args["memory"] < 1:
        raise ArgumentError(
            f"{op}: memory is {args['memory']} bytes, and the logits of a chunk need at least one",
            hint="a budget below one token's logits does one token at a time; None takes the default",
        )


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """One GEMM; hidden and weight are read once, and each token has a target and two results."""
    M, D, V = dims["M"], dims["D"], dims["V"]
    return Cost(flops=2 * M * D * V, bytes=(M * D + V * D) * itemsize + 16 * M)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Three GEMMs, the first recomputes the logits; hidden and weight are read, their gradients are written."""
    M, D, V = dims["M"], dims["D"], dims["V"]
    return Cost(flops=6 * M * D * V, bytes=2 * (M * D + V * D) * itemsize + 20 * M)


CASES = [
    Case("even", "two chunks of tokens, and one target is ignored", M=4, D=8, V=32, memory=256, targets={2: IGNORED}),
    Case("ragged", "three chunks, the last shorter, rows that fill no block", M=7, D=13, V=123, memory=1500,
         targets={1: IGNORED}),
    Case("whole", "the budget holds all logits, so there is one chunk", M=6, D=24, V=80),
    Case("tiles", "TMA reads the operands: tiles of exps, not logits, and no side fills them", M=131, D=80, V=300,
         targets={5: IGNORED, 7: 299, 130: 128}),
    Case("batched", "the leading dims are several, and a chunk may end inside one", lead=(2, 3), D=8, V=40, memory=700),
    Case("tiles_even", "the vocabulary fills its tiles; several chunks for the gradient alone", M=9, D=32, V=256,
         memory=2048, targets={1: 255, 3: IGNORED}),
    Case("single", "there is no leading dim at all: one token", lead=(), D=12, V=24),
    Case("tiles_outside", "a target outside the vocabulary reads no row of the weight", M=5, D=16, V=24,
         targets={0: 24, 1: -1, 2: 2**40}),
    Case("starved", "the budget is below one row of logits: one token at a time", M=5, D=6, V=50, memory=1),
    Case("tiles_many", "more tiles than `_row_scores` reads at once", M=3, D=16, V=32769,
         targets={1: 32767, 2: IGNORED}),
    Case("thin", "one feature, so the logits are an outer product", M=5, D=1, V=39),
    Case("tiles_deep", "more features than `_row_scores` reads at once", M=3, D=1040, V=24),
    Case("loud", "exp of these logits overflows unless the maximum is taken off", M=6, D=16, V=77, scale=300.0,
         targets={2: IGNORED}),
    Case("tiles_nan", "a NaN spoils its own token, and nothing where that is ignored", M=4, D=16, V=33,
         targets={2: IGNORED}, plant=[(1, 3, NAN), (2, 3, NAN)]),
    Case("tiles_ignored", "every target is ignored", M=5, D=16, V=24, targets={ALL: IGNORED}),
    Case("tiles_inf", "an infinite logit makes the logsumexp infinite, not NaN", M=4, D=16, V=33, plant=[(1, 3, INF)],
         frozen=["hidden", "weight"]),
    Case("tiles_low", "the exp of 0 less the logsumexp overflows: columns after the last word must not have it", M=5,
         D=16, V=41, low=True),
    Case("point", "a vocabulary of one word: the logsumexp is the logit", M=5, D=9, V=1),
    Case("ignored", "every target is ignored: results and gradients are 0", M=4, D=8, V=33, memory=300,
         targets={ALL: IGNORED}),
    Case("padding", "the ignored word is one of the vocabulary", M=6, D=8, V=20, ignore_index=3,
         targets={0: 3, 1: 0, 4: 3}),
    Case("outside", "a target outside the vocabulary reads no memory and gives a NaN logit", M=5, D=8, V=20,
         targets={0: 20, 1: -1, 2: 2**40, 3: 19}),
    Case("int32", "targets may be int32, the ignored one among them", M=4, D=8, V=54, index=torch.int32,
         targets={3: IGNORED}),
    Case("nan", "a NaN spoils its own token and, through the sum over tokens, the weight's gradient", M=4, D=8, V=33,
         plant=[(1, 3, NAN)]),
    Case("frozen_head", "no gradient of the weight is asked for: one product less", M=6, D=8, V=40, memory=700,
         frozen=["weight"]),
    Case("frozen", "no gradient is asked for at all", M=6, D=16, V=40, targets={4: IGNORED},
         frozen=["hidden", "weight"]),
    Case("frozen_body", "no gradient of the hidden states is asked for", M=6, D=8, V=40, frozen=["hidden"]),
    Case("empty", "there is no token: the weight's gradient is 0", M=0, D=8, V=24),
    Case("wide", "a row is several blocks, written over itself in 16 bits", M=3, D=4, V=9001),
    Case("split", "few long rows, so a row is read by several programs", M=2, D=2, V=40003, targets={0: 40002}),
]  # fmt: skip
BENCH = [
    Case("llama_8b", "the head of an 8B Llama 3 at 4k tokens", bench=True, M=4096, D=4096, V=128256),
    Case("qwen_2b", "three chunks, so dweight is summed in fp32", bench=True, M=8192, D=2048, V=151936),
    Case("gpt2", "an odd vocabulary, so rows of logits are padded", bench=True, M=8192, D=768, V=50257),
]

SPEC = OpSpec(
    name="linear_cross_entropy",
    signature="hidden[*M, D], weight[V, D], targets[*M]: int, ignore_index: int, memory: int?"
    " -> target_logit[*M]: acc, lse[*M]: acc",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=partial(refuse_memory, "linear_cross_entropy"),
    cost_backward=cost_backward,
    grads=("hidden", "weight"),
    saves=("hidden", "weight", "targets", "lse"),
    # 16-bit gradients of the logits are rounded before two GEMMs. If each operand has an independent error of at most
    # half a spacing, a product has an error of 0.2 spacings of its rms (one sigma); the worst of 10^5 results is near
    # 5 sigma, 1.0, and the result's own rounding adds 0.5. Measured in fp16: up to 1.3.
    ulps=2,
    ulps_of=TARGET_LOGIT,
    nonempty=("D", "V"),
    independent=("M",),
    peers=True,
    cases=[*CASES, *BENCH],
)
