"""Cross-entropy of each token."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text
from bagu.lab.drill.snippets import BLOCK_REDUCE

TORCH = """import torch


def forward(logits, targets, ignore_index):
    kept = targets != ignore_index
    x = torch.where(kept.unsqueeze(-1), logits.float(), 0.0)
    V = x.shape[-1]
    top = x.amax(-1, keepdim=True)
    top = torch.where(top.isinf(), 0.0, top)
    lse = (x - top).exp().sum(-1).log() + top.squeeze(-1)
    inside = (targets >= 0) & (targets < V)
    word = torch.where(inside, targets, 0).long()
    target = torch.where(inside, x.gather(-1, word.unsqueeze(-1)).squeeze(-1), torch.nan)
    return torch.where(kept, lse - target, 0.0)
"""
TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(logits, targets, losses, V, ignore_index, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < V
    if target == ignore_index:
        tl.store(losses + row, 0.0)
    else:
        x = tl.load(logits + row * V + column, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 0)
        top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        lse = tl.log(tl.sum(tl.exp(x - top), 0)) + top
        nan = tl.sum(tl.where(inside & (x != x), 1, 0), 0) > 0
        at = tl.sum(tl.where(column == target, x, 0.0), 0)
        loss = tl.where(nan | (target < 0) | (target >= V), float("nan"), lse - at)
        tl.store(losses + row, loss)


def forward(logits, targets, ignore_index):
    logits, targets = logits.contiguous(), targets.contiguous()
    V = logits.shape[-1]
    losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    if targets.numel():
        kernel[(targets.numel(),)](logits, targets, losses, V, ignore_index, triton.next_power_of_2(V))
    return losses
"""

TRITON_GRAD = (
    TRITON
    + """

@triton.jit
def slope(dlosses, logits, targets, dlogits, V, ignore_index, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < V
    d = tl.zeros([BLOCK], tl.float32)
    if target != ignore_index:
        x = tl.load(logits + row * V + column, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 0)
        e = tl.exp(x - tl.where(tl.abs(top) == float("inf"), 0.0, top))
        p = e / tl.sum(e, 0)
        d = tl.load(dlosses + row) * (p - tl.where(column == target, 1.0, 0.0))
    tl.store(dlogits + row * V + column, d.to(dlogits.dtype.element_ty), mask=inside)


def backward(dlosses, logits, targets, ignore_index):
    dlosses, logits, targets = dlosses.contiguous(), logits.contiguous(), targets.contiguous()
    dlogits, V = torch.empty_like(logits), logits.shape[-1]
    if targets.numel():
        slope[(targets.numel(),)](dlosses, logits, targets, dlogits, V, ignore_index, triton.next_power_of_2(V))
    return dlogits
"""
)
CUDA = (
    "// launch: M, 256"
    + BLOCK_REDUCE
    + """
extern "C" __global__ void kernel(
    const float* logits, const long long* targets, long long ignore_index, float* losses, long long M, long long N) {
    long long row = blockIdx.x, target = targets[row];
    logits += row * N;
    float top = -3.402823466e38f, total = 0.0f;
    for (long long i = threadIdx.x; i < N; i += blockDim.x) top = fmaxf(top, logits[i]);
    top = reduced(top, true);
    top = top > 3.402823466e38f ? 0.0f : top;  // inf - inf is NaN
    for (long long i = threadIdx.x; i < N; i += blockDim.x) total += expf(logits[i] - top);
    total = reduced(total, false);
    if (threadIdx.x) return;
    bool known = target >= 0 && target < N;
    losses[row] = target == ignore_index ? 0.0f : known ? logf(total) + (top - logits[target]) : nanf("");
}
"""
)

DRILL = Drill.of(
    "cross_entropy",
    difficulty=3,
    title=Text("cross-entropy of tokens", "逐词交叉熵"),
    task_zh="每个词元的交叉熵：loss = logsumexp(x) - x[target]；target 为 ignore_index 的行为 0，即使该行有 NaN。",
    fixed={"label_smoothing": 0.0, "z_loss": 0.0},
    forbidden=("_log_softmax", "_softmax", "logsumexp", "nll_loss_forward", "torch.nn.functional.cross_entropy", "log_softmax"),
    solutions={"torch": TORCH, "triton": TRITON, "triton_grad": TRITON_GRAD, "cuda": CUDA},
    hints=(
        Text("Which of the V probabilities does the loss need?", "V 个概率中，损失需要哪一个？"),
        Text("loss = lse - x[target]; take the maximum off inside the log-sum-exp and put it back.", "loss = lse - x[target]；在 log-sum-exp 里减去最大值再加回来。"),
        Text("Replace ignored rows by zeros before anything else: NaN * 0 is NaN. A target outside of the vocabulary gives NaN.",
             "先把被忽略的行换成零：NaN*0 仍是 NaN。越界的 target 得 NaN。"),
    ),
    questions=(
        Question("Why do frameworks fuse the last linear layer with it?", "为什么要把最后的线性层与它融合？", "bagu ops show linear_cross_entropy_loss"),
        Question("What does the z-loss hold down?", "z-loss 约束了什么？", "bagu ops show cross_entropy"),
    ),
    planted=(
        Planted("torch", "(x - top).exp()", "x.exp()", "overflow|formula"),
        Planted("torch", "+ top.squeeze(-1)", "", "formula"),
        Planted("torch", "lse - target", "target - lse", "sign"),
        Planted("torch", "return torch.where(kept, lse - target, 0.0)", "return lse - target", "mask|special|ignored|formula|unwritten"),
        Planted("torch", "torch.where(kept, lse - target, 0.0)", "(lse - target) * kept", "special|mask|unwritten"),
        Planted("torch", "return torch.where(kept, lse - target, 0.0)", "return torch.where(kept, lse - target, 0.0) / targets.numel()", "factor"),
        Planted("torch", "targets != ignore_index", "targets != -100", "ignored|mask|special|unwritten"),
        Planted("torch", "logits.float()", "logits", "precision|type"),
        Planted("torch", ", torch.nan)", ", 0.0)", "special|edge"),
        Planted("torch", "top = torch.where(top.isinf(), 0.0, top)", "top = top", "special"),
        Planted("torch", "(targets < V)", "(targets <= V)", "raises"),
        Planted("torch", "torch.where(inside, targets, 0).long()", "(torch.where(inside, targets, 0).long() - 1) % V", "off_by_one|formula"),
        Planted("torch", "return torch.where(kept, lse - target, 0.0)", "return torch.where(kept, lse - target, 0.0).mean()", "type"),
        Planted("triton", "other=-float(\"inf\")", "other=0.0", "tail|formula|factor"),
        Planted("triton", "inside = column < V", "inside = column < V - 1", "tail|off_by_one"),
        Planted("triton", "logits + row * V", "logits + row * BLOCK", "stride|dies|rows|formula"),
        Planted("cuda", "target == ignore_index ? 0.0f : known", "known", "mask|special|ignored|formula|unwritten"),
        Planted("cuda", "(top - logits[target])", "logits[target] - top", "sign|formula"),
        Planted("cuda", "expf(logits[i] - top)", "expf(logits[i])", "overflow|formula|special"),
        Planted("cuda", "known ? logf(total)", "true ? logf(total)", "dies|special"),
        Planted("cuda", "logits += row * N;", "", "rows|formula"),
        Planted("triton_grad", "(p - tl.where(column == target, 1.0, 0.0))", "p", "formula"),
        Planted("triton_grad", "tl.load(dlosses + row) * (p", "(p", "ignored|factor|formula"),
        Planted("triton_grad", "(p - tl.where(column == target, 1.0, 0.0))", "(tl.where(column == target, 1.0, 0.0) - p)", "sign"),
        Planted("triton_grad", "if target != ignore_index:", "if target == target:", "mask|formula|special"),
        Planted("triton_grad", "tl.load(dlosses + row) * (p", "tl.load(dlosses + row) / V * (p", "factor"),
        Planted("triton_grad", "tl.load(dlosses + row)", "tl.load(dlosses)", "formula|rows"),
    ),
)  # fmt: skip
