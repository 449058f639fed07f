"""A guess of the cause of a failure, as a key of CAUSES.

A trial that tests one thing names its cause. For the others, wrong numbers are compared with what typical mistakes give
(`suspects`: the reference with one thing wrong), and then with patterns: where are the wrong values?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bagu.lab.drill.core import Text

CAUSES: Mapping[str, Text] = {
    "raises": Text("the answer raises an exception", "答案抛出了异常"),
    "dies": Text("the answer ends its process", "答案结束了自己的进程"),
    "hangs": Text("a loop does not end, or is far too slow", "循环不结束，或慢得多"),
    "deadlock": Text("ranks wait for each other", "各 rank 互相等待"),
    "name": Text("the function has another name", "函数名不对"),
    "protocol": Text("the answer writes to the grader's channel", "答案写入了评分通道"),
    "type": Text("the result has another type, shape or dtype", "结果的类型、形状或 dtype 不对"),
    "forbidden": Text("the library does the work", "由库函数完成了工作"),
    "changes_input": Text("the answer writes to its inputs", "答案修改了输入"),
    "state": Text("the answer changes global state", "答案改变了全局状态"),
    "stale": Text("a result depends on an earlier call", "结果依赖之前的调用"),
    "random": Text("the same call gives other bits", "同样的调用得到不同的结果"),
    "memory": Text("the whole score matrix is stored", "存下了整个分数矩阵"),
    "overflow": Text("exp overflows: subtract the row's maximum first", "exp 溢出：先减去行最大值"),
    "precision": Text("sums or squares are in 16 bits: accumulate in fp32", "求和或平方用了 16 位：应以 fp32 累加"),
    "tail": Text("the last columns are lost, or more than exist count", "最后几列丢失或多算：末块的 mask"),
    "rows": Text("only the first rows are right: the row index or the stride", "只有前面的行正确：行号或步长"),
    "stride": Text("the answer assumes contiguous memory", "答案假设内存连续"),
    "ignored": Text("an argument is ignored", "忽略了某个参数"),
    "factor": Text("all values are off by one factor", "所有值差同一个因子"),
    "sign": Text("a sign is wrong", "符号错误"),
    "eps": Text("eps is missing or in the wrong place", "eps 缺失或位置不对"),
    "mask": Text("hidden positions count", "被遮住的位置也参与了计算"),
    "special": Text("NaN, an infinity or an empty row is treated like a number", "把 NaN、无穷或空行当作普通数处理"),
    "empty": Text("an empty input is not handled", "没有处理空输入"),
    "formula": Text("the formula itself is wrong", "公式本身有误"),
    "unwritten": Text("part of the result is never written", "部分结果从未写入"),
    "order": Text("the order is wrong", "顺序不对"),
    "off_by_one": Text("an index or a count is off by one", "下标或计数差一"),
    "ties": Text("ties are broken otherwise", "并列时的取舍不同"),
    "edge": Text("an edge case is missing", "缺少边界情况"),
    "volume": Text("more bytes are sent than a ring needs", "发送的字节多于环所需"),
    "recursion": Text("recursion is as deep as the tree", "递归深度等于树深"),
    "share": Text("shared blocks are treated as owned", "把共享块当作独占块"),
    "leak": Text("blocks are not returned", "块没有归还"),
    "bias": Text("the bias correction is missing or wrong", "偏差修正缺失或有误"),
    "decay": Text("weight decay enters the moments, or misses the learning rate", "权重衰减进入了动量，或漏乘学习率"),
    "normalize": Text("the normalisation is another one", "归一化方式不同"),
    "padding": Text("padding or alignment is wrong", "填充或对齐有误"),
    "mass": Text("tokens outside of the kept set are drawn, or the law is another", "抽到保留集合之外的词，或分布不同"),
}

Suspects = Mapping[str, Callable[[], Any]]


def same(a: Any, b: Any) -> bool:
    """Whether two results agree as far as fp16 would show it."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or not a.numel():
            return False
        a, b = a.double(), b.double()
        return torch.allclose(a, b, rtol=2e-3, atol=2e-3 * float(b[b.isfinite()].abs().mean() or 1e-9), equal_nan=True)
    return bool(a == b)


def guess(got: Any, want: Any, suspects: Suspects, *, usual: str = "formula") -> str:
    """The key of the likely cause of a wrong result."""
    for cause, make in suspects.items():
        try:
            mistaken = make()
            if same(got, mistaken) and not same(want, mistaken):
                return cause
        except (ValueError, RuntimeError, IndexError, TypeError):  # this mistake cannot be made with these inputs
            continue
    if not (isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)):
        return usual
    if got.shape != want.shape:
        return "type"
    return pattern(got.double(), want.double(), usual)


def pattern(got: torch.Tensor, want: torch.Tensor, usual: str) -> str:
    """By where the wrong values are, and which."""
    if not want.numel() or not want.ndim:
        return usual
    good = torch.isclose(got, want, rtol=1e-2, atol=1e-2 * float(want[want.isfinite()].abs().mean().nan_to_num(1.0)))
    good |= got.isnan() & want.isnan() | (got == want)
    bad = ~good
    if not bad.any():
        return "precision"
    if (~want.isfinite())[bad].any():
        return "special"
    width = bad.shape[-1] if bad.ndim > 1 else 1
    by_row = bad.reshape(-1, width)
    rows, columns = by_row.any(-1), by_row.any(0)
    lost = got.isnan() & ~want.isnan()
    gone = lost.reshape(-1, width).any(0)
    if gone.any() and gone.numel() > 4 and not gone[: gone.numel() // 2].any():
        return "tail"
    if lost.any() and not (bad & ~lost).any():
        return "unwritten" if not rows.all() or not columns.all() else "overflow"
    if columns.numel() > 4 and not columns[: columns.numel() // 2].any():
        return "tail"
    if rows.numel() > 1 and not rows[0] and rows[-1]:
        return "rows"
    if bool(((got + want).abs()[bad] <= 1e-3 * want.abs()[bad]).all()):
        return "sign"
    ratio = (got / want)[bad & (want.abs() > 1e-6) & got.isfinite()]
    if ratio.numel() > 3 and float(ratio.std()) < 1e-3 * float(ratio.mean().abs()):
        return "factor"
    return usual
