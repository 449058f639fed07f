"""A head's logits in chunks of tokens: the loop that both backends and both ops share.

    forward, per chunk     logits = hidden @ weight.T      score: target's logit and logsumexp of each row
    backward, per chunk    logits again                    slope: the gradient of each logit, over the logits' memory
                           dhidden = dlogits @ weight      dweight += dlogits.T @ hidden

A backend provides `logits`, `score` and `slope`; the products use cuBLAS or the CPU's BLAS. On CUDA, 16-bit operands
stay 16-bit and logits are fp32, the dtype of their sums. On a CPU the weight is widened once per call, and so are fp16
activations; cpu_gemm.py computes products with a bf16 operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from bagu.ops.contract.signature import accumulator
from bagu.ops.linear_cross_entropy import cpu_gemm
from bagu.ops.linear_cross_entropy.losses import token_losses
from bagu.ops.linear_cross_entropy.spec import Args

EVERY: Mapping[str, bool] = MappingProxyType({"hidden": True, "weight": True})  # which gradients are needed
Scores = tuple[torch.Tensor, torch.Tensor]  # target_logit[m], lse[m]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The functions of a backend for the logits [m, V] of one chunk.

    `logits(hidden, weight)` computes them in the accumulator's dtype. `score(logits, targets, ignore_index)` reads
    them. `slope(logits, targets, lse, dtarget_logit, dlse, ignore_index, dtype)` returns their gradient, in `dtype` or
    in the logits' dtype, and may overwrite them. `pad(weight)` may add rows of zeros to the weight, for a GEMM size
    that is fast; then `logits` has as many additional columns, and `slope` returns zeros there.
    """

    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    score: Callable[[torch.Tensor, torch.Tensor, int], Scores]
    slope: Callable[..., torch.Tensor]
    pad: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight

    def score_and_slope(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        z_loss: float,
        ignore_index: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """target_logit, lse, and the gradient of the weighted loss by the logits, for the one-pass loss."""
        target_logit, lse = self.score(logits, targets, ignore_index)
        dlse = weights * (1 + 2 * z_loss * lse) if z_loss else weights
        return target_logit, lse, self.slope(logits, targets, lse, -weights, dlse, ignore_index, dtype)

    def slope_itemsize(self, hidden: torch.Tensor, weight: torch.Tensor) -> int:
        """The bytes of memory per logit of the two functions that follow."""
        return accumulator(hidden.dtype).itemsize

    def product_slope(
        self, hidden: torch.Tensor, weight: torch.Tensor, V: int, targets: torch.Tensor, lse: torch.Tensor,
        dtarget_logit: torch.Tensor, dlse: torch.Tensor, ignore_index: int, dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """`slope` from the operands; the weight has V real rows."""
        logits = self.logits(hidden, weight)[:, :V]
        return self.slope(logits, targets, lse, dtarget_logit, dlse, ignore_index, dtype)

    def loss_and_slope(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        V: int,
        targets: torch.Tensor,
        weights: torch.Tensor,
        z_loss: float,
        ignore_index: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """target_logit, lse, the loss of the chunk, and its gradient by the logits; the weight has V real rows."""
        logits = self.logits(hidden, weight)[:, :V]
        target_logit, lse, slope = self.score_and_slope(logits, targets, weights, z_loss, ignore_index, dtype)
        return target_logit, lse, self.loss(target_logit, lse, weights, targets, z_loss, ignore_index), slope

    def loss(
        self,
        target_logit: torch.Tensor,
        lse: torch.Tensor,
        weights: torch.Tensor,
        targets: torch.Tensor,
        z_loss: float,
        ignore_index: int,
    ) -> torch.Tensor:
        """The sum of the tokens' weighted losses. An ignored token may have any weight, also NaN."""
        losses = weights * token_losses(target_logit, lse, z_loss).loss
        return torch.where(targets != ignore_index, losses, 0.0).sum()

    def mean_weights(self, targets: torch.Tensor, ignore_index: int, dtype: torch.dtype) -> torch.Tensor:
        """1 / the number of tokens that are not ignored, for each token."""
        count = (targets != ignore_index).sum().clamp(min=1)
        return (1 / count.to(dtype)).expand(targets.shape)


def chunks(M: int, V: int, itemsize: int, memory: int | None, device: torch.device) -> list[tuple[int, int]]:
    """The start and end of each chunk of the M tokens, if `memory` bytes hold the logits of a chunk.

    All chunks have the same size, except that the last may be shorter. If the budget allows, the size is a multiple of
    128, the rows of a GEMM tile. A budget below one row means one row.

    The default is 2 GiB on an accelerator; on a CPU it is 16 MiB, and at least 512 rows. On a CPU, every malloc of more
    than 32 MiB is fresh memory, and its page faults take longer than a GEMM: a softmax of 4096 x 4096 logits takes 25
    ms in one piece and 6 ms in chunks of 16 MiB.
    """
    row = max(1, V * itemsize)
    budget = memory if memory is not None else max(2**24, 512 * row) if device.type == "cpu" else 2**31
    most = max(1, budget // row)
    rows = -(-M // max(1, -(-M // most)))
    tiles = -(-rows // 128) * 128
    rows = tiles if tiles <= most else rows
    return [(at, min(at + rows, M)) for at in range(0, M, max(1, rows))]


def operand(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in the dtype of a GEMM operand for tensors of `dtype`."""
    return x.to(dtype if x.is_cuda else accumulator(dtype))


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b of two operands, accumulated in the accumulator's dtype and rounded once to `dtype`."""
    if a.is_cuda and dtype != a.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    if not a.is_cuda and torch.bfloat16 in (a.dtype, b.dtype, dtype):
        return cpu_gemm.mm(a, b).to(dtype)
    return torch.mm(a, b).to(dtype)


class Gradients:
    """Accumulates dhidden and dweight chunk by chunk.

    dweight is a sum over chunks. Two 16-bit roundings cost at most 1 ulp, so up to two chunks are summed in the
    weight's dtype. More chunks are summed in fp32, at 4 bytes per weight, because every rounding to 16 bits drops
    everything below half a spacing of the sum so far.
    """

    def __init__(
        self, weight: torch.Tensor, V: int, dtype: torch.dtype, count: int, *, of_hidden: bool, of_weight: bool
    ) -> None:
        """`weight` is an operand with V real rows, `dtype` the gradients' dtype, `count` the number of chunks."""
        self.weight, self.V, self.dtype, self.of_hidden, self.of_weight = weight, V, dtype, of_hidden, of_weight
        self.total_dtype = weight.dtype if count <= 2 else accumulator(dtype)
        self.parts: list[torch.Tensor] = []
        self.total: torch.Tensor | None = None

    def add(self, dlogits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add one chunk; `dlogits` and `hidden` are operands."""
        dlogits = dlogits[:, : len(self.weight)]
        if self.of_hidden:
            self.parts.append(product(dlogits, self.weight, self.dtype))
        if not self.of_weight:
            return
        if self.total is None:
            self.total = product(dlogits.T, hidden, self.total_dtype)
        elif self.total.dtype == dlogits.dtype == hidden.dtype:
            self.total.addmm_(dlogits.T, hidden)
        elif torch.compiler.is_compiling():  # addmm with out_dtype cannot be traced: pytorch issue 163880
            self.total += product(dlogits.T, hidden, self.total.dtype)
        elif not dlogits.is_cuda:
            cpu_gemm.addmm_(self.total, dlogits.T, hidden)
        else:
            torch.addmm(self.total, dlogits.T, hidden, out_dtype=self.total.dtype, out=self.total)

    def dhidden(self, shape: torch.Size) -> torch.Tensor:
        return joined(self.parts, shape, self.weight, self.dtype)

    def dweight(self) -> torch.Tensor:
        return (torch.zeros_like(self.weight) if self.total is None else self.total)[: self.V].to(self.dtype)


def operands(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    memory: int | None,
    kernels: Kernels,
    itemsize: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """The operands [M, D] and [V or more, D], the targets [M], and the chunks of M for logits of `itemsize` bytes (by
    default the accumulator's)."""
    dtype = hidden.dtype
    h, t = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    h = h if dtype == torch.bfloat16 else operand(h, dtype)  # a bf16 operand allows a CPU product in bf16
    spans = chunks(h.shape[0], weight.shape[0], itemsize or accumulator(dtype).itemsize, memory, hidden.device)
    return h, kernels.pad(operand(weight, dtype)), t, spans


def part(x: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    """The rows of x in `span`; x itself if the span covers all rows."""
    return x if span == (0, x.shape[0]) else x[span[0] : span[1]]


def joined(parts: list[torch.Tensor], shape: torch.Size, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The chunks' results as one tensor; without chunks, an empty tensor on the device of `like`."""
    if not parts:
        return like.new_zeros(shape, dtype=dtype)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(shape)


def forward(a: Args, kernels: Kernels) -> Scores:
    """target_logit and lse of every token."""
    h, w, t, spans = operands(a.hidden, a.weight, a.targets, a.memory, kernels)
    V = a.weight.shape[0]
    scores = [kernels.score(kernels.logits(part(h, s), w)[:, :V], part(t, s), a.ignore_index) for s in spans]
    join = lambda parts: joined(parts, a.targets.shape, a.hidden, accumulator(a.hidden.dtype))  # noqa: E731
    return join([target_logit for target_logit, _ in scores]), join([lse for _, lse in scores])


def backward(
    a: Args,
    dtarget_logit: torch.Tensor,
    dlse: torch.Tensor,
    lse: torch.Tensor,
    needs: Mapping[str, bool],
    kernels: Kernels,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dhidden and dweight, each None if it is not needed; without dweight one of the three products is skipped."""
    hidden = a.hidden
    h, w, t, spans = operands(hidden, a.weight, a.targets, a.memory, kernels, kernels.slope_itemsize(hidden, a.weight))
    V = a.weight.shape[0]
    rows = [x.reshape(-1) for x in (lse, dtarget_logit, dlse)]
    grads = Gradients(w, V, hidden.dtype, len(spans), of_hidden=needs["hidden"], of_weight=needs["weight"])
    for s in spans:
        own_lse, dt, dl = (part(x, s) for x in rows)
        dlogits = kernels.product_slope(part(h, s), w, V, part(t, s), own_lse, dt, dl, a.ignore_index, hidden.dtype)
        grads.add(operand(dlogits, hidden.dtype), part(h, s))
        del dlogits  # before the next chunk's logits are computed, or two would exist
    return (
        grads.dhidden(hidden.shape) if needs["hidden"] else None,
        grads.dweight() if needs["weight"] else None,
    )
