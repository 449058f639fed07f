"""Batch-invariant arithmetic: the bits of a row's result do not depend on the rest of the batch.

>>> with bagu.ops.invariant():  # the same logprobs in training, prefill, chunked prefill and decode
...     hidden = model(ids, positions, cu_seqlens, max_len).hidden

Fast kernels choose the order of a sum by the number of rows: a GEMM of 3 rows sums in a different order than one of
300, and a decode in a different order than a prefill. In this mode the order of a sum does not depend on the batch.
On a CPU:

    products       each output adds its own numbers in order (invariant_rows.cpp). Without the C++: 16 rows at a time
                   (`in_blocks`), the last block padded with zeros, which is one GEMM shape for each weight
    attention      each query by itself (invariant_rows.cpp). With slopes, a bias, sinks or a cap, and without the C++:
                   attention/tiles.py, keys in tiles of 64, in order, for 16 queries
    row by row     norms, rope, softmax: PyTorch already sums each row separately (ROW_BY_ROW)
    gates          one formula for every element (`times_sigmoid`, `sigmoid`); PyTorch's kernels have two
    long rows      `at_least_two_rows`: PyTorch splits a single sum of 32768 or more numbers among threads

On a GPU, by Triton (docs/decisions/016):

    products       matmul and grouped_matmul: K is not split, and its tile depends on the weight's shape
    attention      the kernel of paged_attention for training, prefill and decode, with a tile of keys by head size
    row by row     norms, softmax: the tile depends on the length of a row; gates, rope: one formula for every element
    logprobs       one program per row, whatever the number of rows (linear_cross_entropy, cross_entropy)

Bits are equal on one machine with one number of threads. The backward is not batch-invariant: no token's probability
depends on it. A backend may have an `invariant_backward`, if its backward computes a part of the forward again.
Compiled code fuses and rounds differently, so it raises an error. So do ops whose kernels are not batch-invariant.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from bagu.errors import BackendError
from bagu.ops.call import scope
from bagu.ops.call.eager import constant
from bagu.ops.contract.core import OpSpec

ROWS = 16  # per block. MKL has other kernels below 16 rows; on AVX-512 and AMX, fp32 and bf16, any fixed number works

# Ops whose normal forward sums each row separately, so this mode uses it unchanged, unless the backend has an
# `invariant_forward`. tests/ops/test_invariant.py and test_invariant_triton.py check them.
ROW_BY_ROW = frozenset({
    "add_rms_norm", "dequantize_int8", "kv_write", "layer_norm", "relu_squared", "rms_norm", "rope", "scale_norm",
    "softmax", "transpose",
})  # fmt: skip
ELEMENTWISE_ON_GPU = frozenset({"geglu", "gelu", "swiglu"})  # a GPU has one formula for every element; see `sigmoid`


class invariant:
    """`with bagu.ops.invariant():` runs every op inside so that a row's bits do not depend on its batch."""

    def __init__(self) -> None:
        self._entered: list[scope.Choice] = []  # one instance may be entered several times

    def __enter__(self) -> None:
        self._entered.append(scope.enter(invariant=True))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        scope.leave(self._entered.pop())


def active() -> bool:
    """Whether the current code runs inside `invariant()`."""
    return scope.current().invariant


def backend_of(spec: OpSpec, asked: str | None, first: torch.Tensor) -> str:
    """The backend with the batch-invariant kernels of an op; raises if there are none. `asked` is the requested one."""
    if torch.compiler.is_compiling():
        _refuse_compiler(spec.name)
    on = first.device.type
    if spec.composed and on in ("cpu", "cuda"):
        return "torch"
    wanted = "triton" if on == "cuda" and "triton" in spec.backends else "torch"
    interpreted = on == "cpu" and asked == "triton"
    if on not in ("cpu", "cuda") or (asked not in (None, wanted) and not interpreted):
        raise BackendError(
            f"{spec.name}: invariant mode has the torch backend on a CPU and the triton backend on a GPU, and"
            f" {asked or 'torch'} on {on} was asked for",
            hint="leave backend= out, or leave bagu.ops.invariant()",
        )
    return asked or wanted


def forward_of(spec: OpSpec, backend: str, first: torch.Tensor) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The batch-invariant forward of a backend; raises if it has none."""
    module: Any = spec.module(backend)
    own = getattr(module, "invariant_forward", None)
    if spec.name in ELEMENTWISE_ON_GPU and (first.is_cuda or backend == "triton"):
        own = module.forward
    elif first.is_cuda and backend == "torch" and not spec.composed:
        own = None  # a torch backend's own form is for a CPU
    if own is None and spec.name not in ROW_BY_ROW:
        raise BackendError(
            f"{spec.name} has no invariant form{' on a GPU' if first.is_cuda else ''}: its results depend on the batch",
            hint="leave bagu.ops.invariant() for this model",
        )
    return own or module.forward


@constant  # runs, and so raises, while the compiler traces the call
def _refuse_compiler(op: str) -> None:
    raise BackendError(
        f"{op}: invariant mode was asked for inside torch.compile, which rounds where it likes",
        hint="run the model eagerly inside bagu.ops.invariant()",
    )


def in_blocks(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply `product`, which maps rows to rows, to x[M, K] in blocks of 16 rows, the last one padded with zeros."""
    M = x.shape[0]
    if M == 0:
        return product(x)
    if M % ROWS:
        x = torch.nn.functional.pad(x, (0, 0, 0, -M % ROWS))
    parts = [product(block) for block in x.contiguous().split(ROWS)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:M]


def times_sigmoid(g: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """g * sigmoid(z), without an autograd graph.

    PyTorch divides the elements of a tensor into spans, one per thread, and computes up to 31 elements at the end of a
    span, or all of a strided one, by a scalar formula. In silu, sigmoid and gelu that formula rounds differently from
    the vector code (4 % of fp32 values differ), so a row's bits depend on its position and on the number of threads.
    exp, erf and tanh have one formula; sums, products and quotients are correctly rounded in both.
    """
    below = z.neg().exp_().add_(1)
    return torch.div(g, below, out=below)


def sigmoid(z: torch.Tensor) -> torch.Tensor:
    """sigmoid(z), with an autograd graph. In invariant mode it uses the formula of `times_sigmoid` for the same reason.
    Its slope is then 0 below -80, where the value is 1e-35: exp overflows at 88, and a backward through inf gives NaN.
    """
    return (z.neg().clamp(max=80.0).exp() + 1.0).reciprocal() if active() else z.sigmoid()


def at_least_two_rows(x: torch.Tensor) -> torch.Tensor:
    """x[*M, N] as at least two rows: a single row is repeated, and the caller keeps the first M of the sums."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.expand(2, -1) if rows.shape[0] == 1 else rows
