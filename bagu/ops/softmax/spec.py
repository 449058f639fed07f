"""Softmax: turn each row of scores into weights that are positive and sum to one.

    y[m, n] = exp(scale * x[m, n] - t[m]) / sum_k exp(scale * x[m, k] - t[m])        t[m] = max_k scale * x[m, k]

over the visible columns of row m: mask[m, n] is true and n < lengths[m]. The other columns have y = 0 and no gradient,
for any x. A row without visible columns is all zeros. A row whose visible columns are all -inf is NaN there (0 / 0, as
in PyTorch), and so is a row with a visible NaN or +inf. The gradient needs only y, and is 0 where y = 0:

    dx[m, n] = scale * y[m, n] * (dy[m, n] - sum_k dy[m, k] * y[m, k])

Dims: M = rows (of scores, of tokens), N = columns (keys, vocabulary).
Paper (the one-pass sum with a running maximum, used for wide rows): https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.contract.core import Case, Cost, OpSpec, Streams


def reference(x: torch.Tensor, scale: float, mask: torch.Tensor | None, lengths: torch.Tensor | None) -> torch.Tensor:
    """The definition. The harness runs it in fp64, and its autograd gives the true gradients."""
    N = x.shape[-1]
    keep = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    if lengths is not None:
        keep = keep & (torch.arange(N, device=x.device).expand(x.shape) < lengths[..., None])
    return torch.where(keep, torch.softmax(torch.where(keep, scale * x, -torch.inf), -1), 0.0)


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N = case.get("lead", (case.get("M", 1),)), case["N"]
    x = case.get("spread", 1.0) * streams.normal("x", *lead, N)
    x[..., 0] += case.get("lead_by", 0.0)
    if "edges" in case.params:
        x[..., 0] = x[..., -1] = case["edges"]
    if "plant" in case.params:
        x[0, N // 2] = case["plant"]
    if "fill" in case.params:
        x[0] = case["fill"]
    mask = lengths = None
    if case.get("mask", False):
        shape = case.get("mask_lead", lead)  # fewer rows than x: the mask of a bench case is broadcast, not copied
        mask = streams.uniform("mask", *shape, case.get("mask_columns", N)) < 0.6
        if case.get("blind", False):
            mask[0] = False
        mask = mask.expand(*lead, N)
    if case.get("lengths", False):
        lengths = streams.integers("lengths", 1, N + 1, *lead)
        if case.get("blind", False):
            lengths[-1], lengths[-2] = N + 5, 0  # shows if the last row is not computed
    return {"x": x, "scale": case.get("scale", streams.choice("scale", 1.0, 0.4)), "mask": mask, "lengths": lengths}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Scale, maximum, subtract, exp, add, divide per element; x is read once and y is written once."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=6 * M * N, bytes=2 * M * N * itemsize)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Two sums (three operations), subtract, multiply, scale per element; dy and y are read once, dx written once."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=6 * M * N, bytes=3 * M * N * itemsize)


NAN, INF = float("nan"), float("inf")
SPEC = OpSpec(
    name="softmax",
    signature="x[*M, N], scale: float, mask[*M, N]?: bool, lengths[*M]?: int -> y[*M, N]",
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x",),
    saves=("y",),
    ulps=2,  # the error of a GPU's exp2 is up to 2^-22 of its result, two spacings of fp32
    independent=("M",),
    peers=True,
    cases=[
        Case("masked", "a mask drops columns, and neither they nor their x may count", M=8, N=64, mask=True, scale=0.3),
        Case(
            "ragged", "neither side is a multiple of a block, mask and lengths both cut, two rows see nothing",
            M=7, N=123, mask=True, lengths=True, blind=True, scale=0.7,
        ),
        Case("even", "powers of two need no masks, so a failure here is the math", M=8, N=64),
        Case("odd", "the tail of an odd row must not enter the maximum or the sum", M=5, N=77, scale=0.5),
        Case("padded", "lengths alone: none, some, all and more than all columns", M=6, N=50, lengths=True, blind=True),
        Case("batched", "the leading dims are several, and are folded into rows", lead=(2, 3), N=40, mask=True),
        Case("shared", "one mask serves several batches, with stride 0", lead=(2, 1, 3), N=40, mask=True,
             mask_lead=(3,)),
        Case("whole_rows", "a mask with one value per row, with stride 0 along its columns", M=5, N=24, mask=True,
             mask_columns=1),
        Case("many_dims", "more non-contiguous leading dims than a kernel indexes", lead=(2, 2, 2, 3), N=20, mask=True),
        Case("single", "there is no leading dim at all: one row", lead=(), N=24),
        Case("empty", "there is no row, and nothing is launched", M=0, N=24),
        Case("alone", "a row fills a program by itself", M=3, N=5000),
        Case("narrow", "rows are short and many, so one program owns several of them", M=67, N=2),
        Case("point", "N = 1 makes y one and dx zero", M=64, N=1),
        Case("flipped", "a negative scale must not let hidden columns win", M=5, N=38, mask=True, scale=-2.0),
        Case("flat", "scale 0 forgets x, and 0 * -inf must stay in hidden columns", M=5, N=33, mask=True, scale=0.0),
        Case("flat_odd", "scale 0 with nothing hidden but the tail of the block", M=5, N=33, scale=0.0),
        Case("sharp", "one weight is almost 1, where a gradient from a rounded y cancels", M=64, N=32, lead_by=9.0),
        Case("loud", "exp overflows every dtype unless the maximum is taken off first", M=4, N=48, spread=1e3),
        Case("deep", "all scores are far below 0, where a maximum must not start", M=3, N=48, spread=1e-2, fill=-3e4),
        Case("nan", "a NaN spoils its own row of y and dx and no other", M=3, N=33, plant=NAN),
        Case("inf", "+inf gives inf - inf = NaN in its row", M=3, N=33, plant=INF),
        Case("minus_inf", "-inf is a weight of 0, and its neighbours do not notice", M=3, N=33, plant=-INF),
        Case("void", "-inf in every seen column is 0 / 0 = NaN there, 0 elsewhere", M=3, N=33, fill=-INF, mask=True),
        Case("nan_masked", "hidden columns of a NaN row keep y = 0 and dx = 0", M=3, N=33, fill=NAN, mask=True),
        Case(
            "tail", "a row in two blocks, 512 columns and 144: mask and lengths cut both, two rows see nothing",
            M=7, N=656, mask=True, lengths=True, blind=True, scale=0.7,
        ),
        Case("tail_flat", "scale 0 in both blocks, with something hidden", M=3, N=704, mask=True, scale=0.0),
        Case("tail_plain", "two aligned blocks, nothing hidden", M=3, N=1168, scale=0.3),
        Case("tail_nan", "hidden columns of a NaN row in two blocks", M=2, N=656, fill=NAN, mask=True),
        Case("tail_void", "-inf in every column of both blocks", M=2, N=1168, fill=-INF),
        Case("unaligned", "rows start at every alignment, so no load is wider than a value", M=19, N=1031),
        Case("unaligned_edges", "most of the weight is in the first and last columns", M=3, N=523, edges=9.0),
        Case("unaligned_flipped", "a negative scale of such rows", M=3, N=523, scale=-2.0),
        Case("unaligned_flat", "scale 0 of such rows, with -inf in one of them", M=9, N=523, scale=0.0, plant=-INF),
        Case("unaligned_nan", "a NaN in such a row stays in it", M=3, N=523, plant=NAN),
        Case("unaligned_hidden", "hidden columns of a NaN row that is not aligned", M=3, N=523, fill=NAN, mask=True),
        Case("unaligned_void", "-inf in every column of block and tail", M=2, N=523, fill=-INF),
        Case("wide", "the row does not fit in registers, so it is read twice, in blocks", M=2, N=70001),
        Case(
            "wide_masked",
            "both passes meet a mask, lengths, blocks and rows of nothing, and more rows than programs",
            M=3, N=40000, mask=True, lengths=True, blind=True, scale=2.0, sms=1,
        ),
        Case("wide_flipped", "a negative scale of a long row that is not aligned", M=3, N=16501, scale=-2.0),
        Case("wide_edges", "most of the weight is in its first and last columns", M=3, N=16501, edges=12.0),
        Case("wide_hidden", "hidden columns of such a row, all of it NaN", M=2, N=16501, fill=NAN, mask=True),
        Case("wide_flat", "scale 0 of a long row, where lanes begin at -inf", M=2, N=33333, scale=0.0),
        Case("wide_nan", "a NaN must survive the running maximum", M=2, N=33333, plant=NAN),
        Case("wide_void", "every block of a long row has a maximum of -inf", M=2, N=33333, fill=-INF),
        Case("per_batch", "a mask for each batch, shared by its heads: [B, 1, T, N]", lead=(2, 2, 3), N=40, mask=True,
             mask_lead=(2, 1, 3)),
        Case("wide_per_batch", "long rows with a mask for each batch, shared by its heads", lead=(2, 2, 2), N=16501,
             mask=True, mask_lead=(2, 1, 2)),
        Case("rows_2k", "attention scores of a 2k context", bench=True, M=16384, N=2048),
        Case("rows_4k", "attention scores of a 4k context", bench=True, M=16384, N=4096),
        Case("rows_8k", "attention scores of an 8k context", bench=True, M=16384, N=8192),
        Case("odd_rows", "an odd N has no aligned rows", bench=True, M=16384, N=4095),
        Case("past", "an odd N one past a power of two: a block would be half empty", bench=True, M=16384, N=4097),
        Case("past_8k", "one past 8,192, where a block twice as long spills", bench=True, M=16384, N=8193),
        Case(
            "shared_mask", "one mask serves every head and is read again from cache",
            bench=True, lead=(4, 8, 512), N=4096, mask=True, mask_lead=(512,), scale=0.125,
        ),
        Case("wide_odd", "one row does not fit a program's registers, and is not aligned", bench=True, M=2048, N=65537),
        Case("very_wide", "a vocabulary of 131,072", bench=True, M=1024, N=131072),
    ],
)  # fmt: skip
