"""nn.Softmax and F.softmax, and other pairs: the same bits, the same node of autograd; a module adds a Python call."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from bagu.lab.core import Claim, Row, Setting, Verdict, number
from bagu.lab.plot import Bars, Panel

PAIRS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": (nn.Softmax(-1), lambda x: F.softmax(x, -1)),
    "GELU": (nn.GELU(), F.gelu),
    "LayerNorm": (nn.LayerNorm(64, elementwise_affine=False), lambda x: F.layer_norm(x, (64,))),
    "ReLU": (nn.ReLU(), F.relu),
}


def host_us(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, calls: int) -> float:
    """CPU time of a call, the least of some rounds."""
    found = []
    for _ in range(5):
        start = time.thread_time()
        for _ in range(calls):
            call(x)
        found.append((time.thread_time() - start) / calls)
    return 1e6 * min(found)


def run(setting: Setting) -> Iterator[Row]:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for name, (module, function) in setting.track(list(PAIRS.items())):
        a, b = module(x), function(x)
        same_node = type(a.grad_fn) is type(b.grad_fn)
        times = [host_us(call, x, 200 if setting.quick else 5000) for call in (module, function)]
        yield {
            "name": name,
            "same_bits": torch.equal(a, b),
            "same_node": same_node,
            "module_us": times[0],
            "function_us": times[1],
        }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if any pair computes something else."""
    differ = [str(r["name"]) for r in rows if not (r["same_bits"] and r["same_node"])]
    extra = [number(r, "module_us") - number(r, "function_us") for r in rows]
    return Verdict.say(
        "held" if differ else "did not hold",
        "Bits and autograd's node differ in {count} of {all} pairs; a call of the module takes {low:.1f} to "
        "{high:.1f} µs more.",
        "{all} 对中有 {count} 对的比特或反向节点不同；调用模块多用 {low:.1f} 至 {high:.1f} µs。",
        count=len(differ),
        all=len(rows),
        low=min(extra),
        high=max(extra),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    bars = [Bars([number(r, f"{kind}_us") for r in rows], kind, text="{:.1f}") for kind in ("module", "function")]
    return [Panel(bars, "CPU time of a call", y="µs", xnames=[str(r["name"]) for r in rows])]


LAB = Claim(
    title_en="Module or function",
    title_zh="模块还是函数",
    claim_en="nn.Softmax and F.softmax compute differently: only the module takes part in training.",
    claim_zh="nn.Softmax 与 F.softmax 的计算不同：只有模块参与训练。",
    regime="Modules without parameters of their own, a tensor of 4 × 64 in fp32 on the CPU.",
    varies="The operation: softmax, GELU, LayerNorm without weights, ReLU.",
    measures="Whether the results have the same bits and the same node of autograd; CPU time of a call.",
)
