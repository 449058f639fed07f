"""Gumbel-softmax: a differentiable sample from a categorical distribution.

    z[m, n] = (logits[m, n] + g[m, n]) / tau        g = -log(-log(1 - u)), u uniform in (0, 1)
    y[m]    = softmax(z[m]), or with `hard` the one-hot of its largest, with the gradient of the soft sample

argmax_n z is distributed as softmax(logits). u[m, n] is word n % 4 of Philox4x32-10 at counter (n // 4, m) with key
`seed`, at the middle of its 2^-32 wide step; m counts rows from 0 over all leading dims. So the sample is a function
of seed and shape, the same on every backend, and the backward generates the noise again. A logit of -inf is never
chosen. A row of only -inf, or with a NaN or +inf, gives NaN, also with `hard`. If several z are largest, the first one
is chosen.

Dims: M = rows (of distributions), N = categories.   Paper: https://arxiv.org/abs/1611.01144
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.gumbel_softmax.noise import words


def reference(logits: torch.Tensor, tau: float, hard: bool, seed: int) -> torch.Tensor:
    """The definition. The harness runs it in fp64, and its autograd gives the true gradients."""
    u = (words(logits, seed).double() + 0.5) / 2**32
    z = (logits - torch.log(-torch.log1p(-u).to(logits.dtype))) / tau
    y = torch.softmax(z, -1)
    if not hard:
        return y
    chosen = torch.arange(z.shape[-1], device=z.device) == z.argmax(-1, keepdim=True)
    return chosen.to(y.dtype) + (y - y.detach())


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if not 0 < args["tau"] < 1e38:  # above this 1 / tau is 0 in fp32, and 0 times the -inf of a masked logit is NaN
        raise ArgumentError(f"gumbel_softmax: tau is {args['tau']}, expected a temperature above 0 and below 1e38")
    if not 0 <= args["seed"] < 2**63:
        raise ArgumentError(f"gumbel_softmax: seed is {args['seed']}, expected 0 to 2^63 - 1", hint="seed % 2**63")


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N = case.get("lead", (case.get("M", 1),)), case["N"]
    logits = case.get("spread", 1.0) * streams.normal("logits", *lead, N)
    if "plant" in case.params:
        logits[0, N // 2] = case["plant"]
    if "fill" in case.params:
        logits[0] = case["fill"]
    if case.get("banned", False):
        logits[..., ::2] = -torch.inf
    return {
        "logits": logits,
        "tau": case.get("tau", streams.choice("tau", 1.0, 1.8)),
        "hard": case.get("hard", False),
        "seed": case["seed"],
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Philox (20 integer operations per element), two logs, one exp, seven more; read once, written once."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=30 * M * N, bytes=2 * M * N * itemsize + 8 * M)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Generate the noise again, then six operations; logits and dy are read once, dlogits is written once."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=30 * M * N, bytes=3 * M * N * itemsize + 8 * M)


NAN, INF = float("nan"), float("inf")
SPEC = OpSpec(
    name="gumbel_softmax",
    signature="logits[*M, N], tau: float, hard: bool, seed: int -> y[*M, N]; top[*M]: acc, total[*M]: acc",
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    cost_backward=cost_backward,
    grads=("logits",),
    saves=("logits", "top", "total"),
    ulps=4,  # two logs and an exp: in fp32 z has an error of up to 3e-7, and y the same relative error (2.7 measured)
    independent=(),  # a row's noise depends on its index, so a slice alone has a different sample
    peers=True,
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", M=8, N=64, tau=0.7, seed=1),
        Case("ragged", "neither side is a multiple of a block nor of Philox's four words", M=5, N=123, tau=1.5, seed=2),
        Case("hard", "the one-hot of the sample, with the gradient of the soft one", M=9, N=50, hard=True, seed=3),
        Case("batched", "the leading dims are several, and rows are counted across them", lead=(2, 3), N=40, seed=4),
        Case("single", "there is no leading dim at all: row 0", lead=(), N=24, seed=5),
        Case("empty", "there is no row, and nothing is launched", M=0, N=24, seed=21),
        Case("alone", "a row fills a program by itself", M=3, N=5000, seed=21),
        Case("narrow", "rows are shorter than four words, and each starts a fresh four", M=67, N=3, seed=6),
        Case("point", "N = 1 makes y one and the gradient zero", M=64, N=1, seed=7),
        Case("long_seed", "a seed has 63 bits, and the upper half of the key counts too", M=4, N=31, seed=2**63 - 1),
        Case("cold", "a small tau makes y almost a one-hot", M=16, N=36, tau=0.1, seed=8),
        Case("loud", "exp overflows every dtype unless the maximum is taken off first", M=4, N=53, spread=1e3, seed=9),
        Case("banned", "a logit of -inf has y = 0 and no gradient", M=4, N=30, banned=True, seed=10),
        Case("banned_hard", "and is never the one chosen", M=4, N=30, banned=True, hard=True, seed=10),
        Case("nan", "a NaN spoils its own row and no other", M=3, N=33, plant=NAN, seed=11),
        Case("nan_hard", "a hard sample hides no NaN behind zeros and a one", M=3, N=33, plant=NAN, hard=True, seed=11),
        Case("inf_hard", "+inf gives inf - inf = NaN in its row", M=3, N=33, plant=INF, hard=True, seed=12),
        Case("void", "a row of -inf has nothing to choose and is NaN", M=3, N=33, fill=-INF, hard=True, seed=13),
        Case("tail", "a row in two blocks, 512 columns and 11", M=3, N=523, tau=0.7, seed=18),
        Case("tail_hard", "the largest may be in either block", M=9, N=640, hard=True, seed=19),
        Case("tail_nan", "a NaN in the first block spoils both", M=2, N=523, plant=NAN, hard=True, seed=20),
        Case("wide", "the row does not fit in registers, so it is read twice, in blocks", M=2, N=12401, seed=14),
        Case("wide_hard", "the first pass keeps the place of the largest too", M=5, N=12403, hard=True, seed=15),
        Case("wide_banned", "some lanes see only -inf", M=2, N=12402, banned=True, seed=16),
        Case("wide_nan", "a NaN survives both passes, hard", M=2, N=12401, plant=NAN, hard=True, seed=17),
        Case("rows_4k", "a codebook of 4,096 entries at 16k tokens", bench=True, M=16384, N=4096, seed=0),
        Case("rows_4k_hard", "the straight-through sample", bench=True, M=16384, N=4096, hard=True, seed=0),
        Case("odd_rows", "an odd N has no aligned rows", bench=True, M=16384, N=4095, seed=0),
        Case(
            "past", "an odd N one past a power of two: a block would be half empty", bench=True, M=16384, N=4097, seed=0
        ),
        Case("vocabulary", "one row does not fit a program's registers", bench=True, M=1024, N=131072, seed=0),
    ],
)
