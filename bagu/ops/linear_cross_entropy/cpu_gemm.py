"""bf16 products summed in fp32 on a CPU, where `torch.mm` has no `out_dtype` (torch 2.13).

A oneDNN setting allows fp32 matrix products in bf16: the operands are rounded to bf16, and the sums are fp32. If the
fp32 values are exact in bf16, the rounding changes nothing, and fp32 sums are the desired result. At 4096 x 256 x 4096
on two cores with AMX: 6.7 ms against 26.6 ms in fp32. A CPU without bf16 units computes in fp32, which is also correct.
"""

from types import TracebackType

import torch
from torch.utils.flop_counter import register_flop_formula


class _Bf16Products:
    """Allows oneDNN to multiply fp32 matrices in bf16 inside the block. The setting is global to the process: an fp32
    product that another thread starts inside the block is rounded too, so the block contains only one product.
    """

    def __enter__(self) -> None:
        self.before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        torch.backends.mkldnn.matmul.fp32_precision = self.before  # type: ignore[attr-defined]


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp32; a and b are bf16, or fp32 that may be rounded to bf16."""
    return torch.ops.bagu.bf16_mm(a, b) if torch.compiler.is_compiling() else _mm(a, b)


def addmm_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b with the same operands; `total` is fp32."""
    with _Bf16Products():
        total.addmm_(a.float(), b.float())


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with _Bf16Products():
        return torch.mm(a.float(), b.float())


# A graph cannot change the setting, so in a compiled call the product is a separate node.
_op = torch.library.custom_op("bagu::bf16_mm", _mm, mutates_args=())


@_op.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


@register_flop_formula(torch.ops.bagu.bf16_mm)
def _flops(a: torch.Size, b: torch.Size, **_: object) -> int:
    return 2 * a[0] * a[1] * b[1]
