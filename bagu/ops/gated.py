"""Code shared by `swiglu` and `geglu`: y = act(gate) * up, where act(g) = g * s(g) and the step s goes from 0 to 1.

gate and up are packed in one tensor [*M, 2N] (gate first, the output of one matmul), or are two tensors [*M, N].
Dims: M = rows (tokens), N = features of one half, K = last dim of the first tensor: 2N packed, N separate.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.cases import ROW_CASES
from bagu.ops.contract.core import Case, Cost, Streams
from bagu.ops.contract.signature import Dims


def halves(x: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up), as views."""
    if up is not None:
        return x, up
    N = x.shape[-1] // 2
    return x[..., :N], x[..., N:]


def join(dgate: torch.Tensor, dup: torch.Tensor, packed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of the two halves as gradients of the arguments (x, up)."""
    return (torch.cat((dgate, dup), -1), None) if packed else (dgate, dup)


class GateBackward(NamedTuple):
    """A backward in which `up` has its gradient, and the gate does not yet."""

    dx: torch.Tensor
    dup: torch.Tensor | None
    gate: torch.Tensor
    into_gate: torch.Tensor  # where the gate's gradient belongs: a view of dx
    dact: torch.Tensor  # the gradient of act = activation(gate)


def begin_backward(dy: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, act: torch.Tensor) -> GateBackward:
    """Write the gradient of `up`. Each gradient has its place in the output, so a packed x gets one contiguous dx."""
    gate, u = halves(x, up)
    dx, dup = torch.empty_like(x), None if up is None else torch.empty_like(up)
    into_gate, into_up = halves(dx, dup)
    dyw = dy.to(act.dtype)
    torch.mul(dyw, act, out=into_up)
    return GateBackward(dx, dup, gate, into_gate, dyw * u.to(act.dtype))


def width(op: str, args: Mapping[str, Any], dims: Dims) -> Dims:
    """`derive` of `op`: computes N, which is the size of no input when gate and up are packed."""
    K = dims["K"]
    if args["up"] is not None:
        return {"N": K}
    if K % 2:
        raise ArgumentError(
            f"{op}: x has shape {list(args['x'].shape)} and there is no up, and packed they make an even last dim",
            hint="pass up= if x is the gate alone",
        )
    return {"N": K // 2}


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N = case.get("lead", (case.get("M", 1),)), case["N"]
    gate, up = case.get("scale", 1.0) * streams.normal("gate", *lead, N), streams.normal("up", *lead, N)
    for row, value in enumerate(case.get("plant", ())):
        gate[row, N // 2] = value
    if case.get("plant_up", None) is not None:
        up[-1, N // 2] = case["plant_up"]
    if case.get("separate", False):
        return {"x": gate, "up": up}
    return {"x": torch.cat((gate, up), -1), "up": None}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Negate, exp, add, divide, two products per feature; gate and up are read, y is written."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=6 * M * N, bytes=3 * M * N * itemsize)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Recompute s, its slope, two products for each gradient; read dy, gate and up, write dgate and dup."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=13 * M * N, bytes=5 * M * N * itemsize)


INF, NAN = float("inf"), float("nan")
CASES = [
    *ROW_CASES,
    Case("separate", "gate and up are two tensors, each taken as one long row", M=6, N=70, separate=True),
    Case("separate_odd", "the long row ends inside a block", M=3, N=37, separate=True),
    Case("narrow", "rows are short and many, so one program owns several of them", M=1500, N=2),
    Case("point", "N = 1: the halves are neighbours", M=64, N=1),
    Case("wide", "a row is several blocks long and the last one is not full", M=2, N=9001),
    Case("unaligned", "odd packed rows move one value at a time, in smaller tiles", M=8, N=1031),
    Case("blocks", "a row is two blocks to the last feature", M=2, N=4096),
    Case("faint", "a small gate stands where s is steepest, about 1/2", M=4, N=50, scale=1e-3),
    Case("loud", "exp(-gate) is past fp32's largest value, where the step is flat", M=4, N=52, scale=1e3),
    Case("nan", "a NaN in gate or up spoils its own place and no other", M=3, N=33, plant=[NAN], plant_up=NAN),
    Case("inf", "gate = inf passes; gate = -inf is -inf * 0 = NaN", M=3, N=33, plant=[INF, -INF]),
    Case(
        "inf_separate", "the same, where gradients of gate and up are two tensors", M=3, N=9, plant=[INF], separate=True
    ),
    Case("packed", "what a fused gate_up projection hands over at 16k tokens", bench=True, M=16384, N=8192),
    Case("two", "gate and up from two projections", bench=True, M=16384, N=8192, separate=True),
    Case("llama_8b", "the feed-forward size of an 8B model, no power of two", bench=True, M=16384, N=14336),
    Case("odd", "an odd N leaves no row aligned", bench=True, M=16384, N=8191),
    Case("past", "one past a power of two", bench=True, M=16384, N=4097),
]
