"""Calls of Triton kernels as a program makes them, each with one thing changed. Without a GPU they are for sm_90 and
end before the launch, once Triton has the kernel."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from bagu.lab.core import Text
from bagu.ops.catalogue import spec
from bagu.ops.contract.core import Case
from bagu.ops.inspect.offline import Launch, launches

FIRST = "first call"
SIDE = 4096  # rows and columns of rms_norm
CHANGES = {
    "size 32": Text("another multiple of 16", "另一个 16 的倍数"),
    "size 3": Text("a size of 3", "大小为 3"),
    "size 1": Text("a size of 1", "大小为 1"),
    "constexpr": Text("a constexpr", "constexpr"),
    "warps": Text("the warps", "warp 数"),
    "dtype": Text("the dtype", "dtype"),
}


class NoGpu:
    """As much of Triton's driver as a call needs to find its kernel: an H100 that is not there."""

    @staticmethod
    def get_current_target() -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    @staticmethod
    def get_current_device() -> int:
        return 0

    @staticmethod
    def get_current_stream(device: int) -> int:
        return 0


def asked(device: str) -> dict[str, dict[str, Callable[[], object]]]:
    """The first call of each kernel, and calls with one thing changed."""
    from bagu.lab.parts import tile_matmul

    place = device if device == "cuda" else "meta"
    x, y = torch.zeros(1 << 14, device=place), torch.zeros(1 << 14, device=place)
    h = torch.zeros(1 << 14, device=place, dtype=torch.float16)  # longer than a product of any size here reads
    args: dict[str, Any] = {"x": x, "y": y, "rounds": 16, "SIZE": 1024}
    product = {"a": h, "b": h, "c": h, "M": 64, "N": 64, "K": 64, "BM": 64, "BN": 64, "BK": 32}
    product |= {"GROUP": 8, "TMA": False, "SPECIALIZE": False}
    return {
        "rms_norm": {FIRST: norm(device)},
        "sum": changes(tile_matmul.sums, args, device, size="rounds", SIZE=512, x=x.half()),
        "matmul": changes(tile_matmul.tiles, product, device, size="K", BK=64, **dict.fromkeys("abc", h.bfloat16())),
    }


def norm(device: str) -> Callable[[], object]:
    if device != "cuda":
        (launch,) = launches(spec("rms_norm"), Case("square", "", M=SIDE, N=SIDE), torch.bfloat16, only="forward")
        return call_of(launch, device)
    x, w = (torch.ones(size, device=device, dtype=torch.bfloat16) for size in ((SIDE, SIDE), (SIDE,)))
    return lambda: spec("rms_norm").module("triton").forward(x, w, 1e-6)


def changes(
    fn: Any, args: Mapping[str, Any], device: str, *, size: str, **other: Any
) -> dict[str, Callable[[], object]]:
    """The call with these arguments, then each change; `other` are a constexpr and tensors of another dtype."""
    constants, tensors = ({k: v for k, v in other.items() if isinstance(v, kind)} for kind in (int, torch.Tensor))
    first = Launch(step="forward", fn=fn, args=args, options={"num_warps": 4}, grid=(1,))
    steps = {FIRST: first, "warps": replace(first, options={"num_warps": 8})}
    named = {f"size {n}": {size: n} for n in (32, 3, 1)} | {"constexpr": constants, "dtype": tensors}
    steps |= {step: replace(first, args={**args, **change}) for step, change in named.items()}
    return {step: call_of(steps[step], device) for step in (FIRST, *CHANGES)}


def call_of(one: Launch, device: str) -> Callable[[], object]:
    """A call through Triton's ordinary entry; without a GPU it ends before the launch."""
    args = [one.args.get(p.name, p.default) for p in one.fn.params]
    return lambda: one.fn.run(*args, grid=one.grid, warmup=device != "cuda", **one.options)
