"""Flash attention, forward."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

TORCH = '''import torch

BLOCK = 64


def one(q, k, v, causal, window, scale):
    """One segment: q[n, H, D], k[n, H, D], v[n, H, E], by blocks of keys."""
    n, H, E = q.shape[0], q.shape[1], v.shape[2]
    out, lse = torch.zeros(n, H, E), torch.full((n, H), -torch.inf)
    for i in range(0, n, BLOCK):
        rows = torch.arange(i, min(i + BLOCK, n))
        top = torch.full((len(rows), H), -torch.inf)
        total, mixed = torch.zeros(len(rows), H), torch.zeros(len(rows), H, E)
        for j in range(0, n, BLOCK):
            columns = torch.arange(j, min(j + BLOCK, n))
            s = (q[rows][:, None] * k[columns][None]).sum(-1) * scale  # [rows, columns, H]
            distance = rows[:, None] - columns[None]
            seen = torch.ones(distance.shape, dtype=torch.bool)
            if causal:
                seen = seen & (distance >= 0)
            if window is not None:
                seen = seen & (distance.abs() < window)
            s = torch.where(seen[..., None], s, -torch.inf)
            new = torch.maximum(top, s.amax(1))
            safe = torch.where(new == -torch.inf, 0.0, new)
            e = torch.exp(s - safe[:, None])
            keep = torch.exp(top - safe)
            total = total * keep + e.sum(1)
            mixed = mixed * keep[..., None] + (e[..., None] * v[columns][None]).sum(1)
            top = new
        out[rows] = torch.where(total[..., None] > 0, mixed / total[..., None], 0.0)
        lse[rows] = torch.where(total > 0, top + total.log(), -torch.inf)
    return out, lse


def forward(q, k, v, cu_seqlens, max_len, causal, window, scale):
    T, H, D = q.shape
    scale = D**-0.5 if scale is None else scale
    out, lse = torch.zeros(T, H, v.shape[2]), torch.zeros(T, H)
    bounds = cu_seqlens.tolist()
    for a, b in zip(bounds, bounds[1:]):
        for h in range(H):
            g = h // (H // k.shape[1])
            o, l = one(
                q[a:b, h : h + 1].float(), k[a:b, g : g + 1].float(), v[a:b, g : g + 1].float(), causal, window, scale
            )
            out[a:b, h : h + 1], lse[a:b, h : h + 1] = o, l
    return out.to(q.dtype), lse
'''
TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(q, k, v, cu, out, lse, scale, window, H, G, D, E, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    segment, head = tl.program_id(1), tl.program_id(2)
    group = head // (H // G)
    begin = tl.load(cu + segment).to(tl.int64)
    n = tl.load(cu + segment + 1).to(tl.int64) - begin
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    here = i < n
    rows = tl.load(q + ((begin + i)[:, None] * H + head) * D + d[None, :],
                   mask=here[:, None] & (d[None, :] < D), other=0.0).to(tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, BE), tl.float32)
    if tl.program_id(0) * BM < n:
        for start in range(0, n, BN):
            j = start + tl.arange(0, BN)
            there = j < n
            at = (begin + j) * G + group
            keys = tl.load(k + at[None, :] * D + d[:, None], mask=there[None, :] & (d[:, None] < D), other=0.0)
            s = tl.dot(rows, keys.to(tl.float32), input_precision="ieee") * scale
            far = i[:, None] - j[None, :]
            seen = here[:, None] & there[None, :]
            if CAUSAL:
                seen = seen & (far >= 0)
            if WINDOW:
                seen = seen & (tl.abs(far) < window)
            s = tl.where(seen, s, -float("inf"))
            new = tl.maximum(top, tl.max(s, 1))
            safe = tl.where(new == -float("inf"), 0.0, new)
            p = tl.exp(s - safe[:, None])
            keep = tl.exp(top - safe)
            values = tl.load(v + at[:, None] * E + e[None, :], mask=there[:, None] & (e[None, :] < E), other=0.0)
            total = total * keep + tl.sum(p, 1)
            mixed = mixed * keep[:, None] + tl.dot(p, values.to(tl.float32), input_precision="ieee")
            top = new
        some = total > 0
        safe_total = tl.where(some, total, 1.0)
        y = tl.where(some[:, None], mixed / safe_total[:, None], 0.0)
        l = tl.where(some, top + tl.log(safe_total), -float("inf"))
        place = (begin + i) * H + head
        tl.store(out + place[:, None] * E + e[None, :], y.to(out.dtype.element_ty), mask=here[:, None] & (e[None, :] < E))
        tl.store(lse + place, l, mask=here)


def forward(q, k, v, cu_seqlens, max_len, causal, window, scale):
    q, k, v, cu = q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens.contiguous()
    T, H, D = q.shape
    G, E = k.shape[1], v.shape[2]
    out, lse = torch.empty((T, H, E), dtype=q.dtype, device=q.device), torch.empty((T, H), dtype=torch.float32, device=q.device)
    if T:
        grid = (triton.cdiv(max_len, 32), cu.numel() - 1, H)
        kernel[grid](
            q, k, v, cu, out, lse, D**-0.5 if scale is None else scale, 0 if window is None else window, H, G, D, E,
            causal, window is not None, 32, 32, max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(E)),
        )
    return out, lse
"""

DRILL = Drill.of(
    "attention",
    name="flash_attention",
    difficulty=5,
    title=Text("flash attention, forward", "flash attention 前向"),
    task_zh="打包序列上的注意力：按 cu_seqlens 分段，支持 causal、window、GQA；返回 out 与 lse。峰值内存是正确性的一部分：不得存下整个分数矩阵。",
    fixed={"slopes": None, "bias": None, "sinks": None, "softcap": None},
    forbidden=("_softmax", "_safe_softmax", "scaled_dot_product_attention", "logsumexp", "_scaled_dot_product_flash_attention_for_cpu",
               "_scaled_dot_product_attention_math", "torch.nn.functional.scaled_dot_product_attention"),
    solutions={"torch": TORCH, "triton": TRITON},
    hints=(
        Text("softmax needs the maximum of the whole row. Does it need it at once?", "softmax 需要整行的最大值，但需要一次拿到吗？"),
        Text("Keep maximum, sum and mixed values of the blocks so far; when the maximum grows, scale the sums by exp(old - new).", "保留到目前为止的最大值、和、加权值；最大值变大时，用 exp(旧-新) 缩放它们。"),
        Text("A row that sees nothing has maximum -inf: exp(-inf - -inf) is NaN. Use 0 in place of -inf there; out = 0, lse = -inf.", "看不到任何 key 的行最大值为 -inf：exp(-inf - -inf) 是 NaN。此处用 0 代替；out = 0，lse = -inf。"),
    ),
    questions=(
        Question("What does it save: FLOPs, bytes, or both?", "它节省的是 FLOP、字节，还是两者？", "bagu ops show attention"),
        Question("Why does it return lse?", "为什么要返回 lse？", "bagu lab list --theme parallel"),
    ),
    planted=(
        Planted("torch", "distance >= 0", "distance > 0", "mask|off_by_one|special|formula"),
        Planted("torch", "if causal:", "if False:", "mask"),
        Planted("torch", "(distance.abs() < window)", "(distance.abs() <= window)", "off_by_one|mask"),
        Planted("torch", "if window is not None:", "if False:", "mask|ignored"),
        Planted("torch", "mixed = mixed * keep[..., None] + ", "mixed = mixed + ", "formula|rows|factor"),
        Planted("torch", "total = total * keep + e.sum(1)", "total = total + e.sum(1)", "formula|rows|factor"),
        Planted("torch", "scale = D**-0.5 if scale is None else scale", "scale = 1.0 if scale is None else scale", "factor|ignored"),
        Planted("torch", "scale = D**-0.5 if scale is None else scale", "scale = D**-0.5", "ignored"),
        Planted("torch", "g = h // (H // k.shape[1])", "g = h % k.shape[1]", "formula|order"),
        Planted("torch", "torch.where(total > 0, top + total.log(), -torch.inf)", "top", "formula"),
        Planted("torch", "safe = torch.where(new == -torch.inf, 0.0, new)", "safe = new", "special|mask|overflow|unwritten"),
        Planted("torch", "BLOCK = 64", "BLOCK = 4096", "memory"),
        Planted("torch", "return out.to(q.dtype), lse", "return out.to(q.dtype)", "type"),
        Planted("torch", "for a, b in zip(bounds, bounds[1:]):", "for a, b in [(0, T)]:", "mask|formula|ignored"),
        Planted("torch", "e = torch.exp(s - safe[:, None])\n            keep = torch.exp(top - safe)", "e = torch.exp(s)\n            keep = torch.ones_like(top)", "overflow|special|formula"),
        Planted("triton", "there = j < n", "there = j < n - 1", "tail|mask|formula|special"),
    ),
)  # fmt: skip
