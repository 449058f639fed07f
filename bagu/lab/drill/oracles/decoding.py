"""The truth of attention modules, decoding with a cache, and sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bagu.lab.drill.answers import Answer, Reply
from bagu.lab.drill.core import Drill, Text
from bagu.lab.drill.oracles.values import value_trial
from bagu.lab.drill.trial import Trial, Wrong


def trials(drill: Drill, level: str, seed: int) -> Iterator[Trial]:
    makers = {
        "multi_head_attention": mha_trials,
        "kv_cache": cache_trials,
        "sampling": sampling_trials,
        "merge_attention": merge_trials,
        "int8_quantize": int8_trials,
    }
    yield from makers[drill.name](seed)


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mha(
    x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, wo: torch.Tensor, heads: int, groups: int,
    causal: bool, real: torch.Tensor | None, *, mistake: str = "",
) -> torch.Tensor:  # fmt: skip
    """The definition, head by head."""
    B, T, _ = x.shape
    D = wq.shape[0] // heads
    out = x.new_zeros(B, T, heads * D)
    for h in range(heads):
        g = h % groups if mistake == "order" else h // (heads // groups)
        q, k, v = x @ wq[h * D : (h + 1) * D].T, x @ wk[g * D : (g + 1) * D].T, x @ wv[g * D : (g + 1) * D].T
        s = q @ k.mT * (1.0 if mistake == "factor" else (heads * D) ** -0.5 if mistake == "factor:width" else D**-0.5)
        seen = torch.ones(B, T, T, dtype=torch.bool)
        if causal and mistake != "mask":
            seen &= torch.ones(T, T, dtype=torch.bool).tril(-1 if mistake == "off_by_one" else 0)
        if real is not None and mistake != "mask:padding":
            seen &= real[:, None, :]
        p = torch.softmax(s.masked_fill(~seen, -torch.inf), -1)
        out[..., h * D : (h + 1) * D] = (p if mistake == "special" else p.nan_to_num(0.0)) @ v
    return out if mistake == "ignored" and wo.shape[0] == out.shape[-1] else out @ wo.T


def mha_trials(seed: int) -> Iterator[Trial]:
    def trial(
        name: str, why: Text, B: int, T: int, heads: int, groups: int, D: int, causal: bool, pad: str, edge: bool
    ) -> Trial:
        C = 12
        sizes = ((B, T, C), (heads * D, C), (groups * D, C), (groups * D, C), (C, heads * D))
        x, wq, wk, wv, wo = (0.5 * _normal(seed + i, *s) for i, s in enumerate(sizes))
        real = None
        if pad:
            real = torch.ones(B, T, dtype=torch.bool)
            real[0, : T // 2] = pad != "left"
            real[0, T // 2 :] = pad != "right"
        args: list[Any] = [x, wq, wk, wv, wo, heads, groups, causal, real]
        names = ("factor", "factor:width", "mask", "mask:padding", "order", "ignored", "special", "off_by_one")
        suspects = {m: partial(mha, *args, mistake=m) for m in names}
        return value_trial(name, why, "multi_head_attention", args, mha(*args), edge=edge, suspects=suspects)

    yield trial("plain", Text("several heads, no mask", "多头，无掩码"), 2, 5, 3, 3, 4, False, "", False)
    yield trial("causal", Text("no token sees a later one", "看不到后面的词"), 2, 6, 2, 2, 8, True, "", False)
    yield trial(
        "gqa",
        Text("query heads share key heads: h reads h // (heads / kv_heads)", "GQA：查询头共享键头"),
        1,
        5,
        4,
        2,
        4,
        True,
        "",
        False,
    )
    yield trial("padding", Text("padding is never a key", "填充不作为 key"), 2, 6, 2, 1, 4, False, "right", True)
    yield trial(
        "both",
        Text(
            "padding in front and causal: some queries see nothing, and give 0",
            "左填充加因果：有的查询看不到任何 key，输出 0",
        ),
        2,
        6,
        2,
        2,
        4,
        True,
        "left",
        True,
    )
    yield trial("odd", Text("one head of an odd size", "一个奇数维的头"), 1, 4, 1, 1, 7, True, "", True)
    yield trial("token", Text("one token", "只有一个词"), 3, 1, 2, 1, 4, True, "", True)


def lm_logits(weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """The logits of the last position, without a cache."""
    x = weights["embed"][torch.tensor(tokens)] + weights["position"][: len(tokens)]
    q, k, v = (x @ weights[n] for n in ("wq", "wk", "wv"))
    s = (q[-1] @ k.T) * q.shape[1] ** -0.5
    return (x[-1] + torch.softmax(s, -1) @ v @ weights["wo"]) @ weights["embed"].T


def cache_trials(seed: int) -> Iterator[Trial]:
    V, C, most = 50, 16, 96
    shapes = {"embed": (V, C), "position": (most, C), "wq": (C, C), "wk": (C, C), "wv": (C, C), "wo": (C, C)}
    weights = {n: 0.5 * _normal(seed + i, *s) for i, (n, s) in enumerate(shapes.items())}

    def trial(
        name: str, why: Text, prompt: list[int], steps: int, edge: bool, cause: str = "", refuse: bool = False
    ) -> Trial:
        tokens, want = list(prompt), list[torch.Tensor]()
        script: list[list[Any]] = [["prefill", list(prompt)]]
        for _ in range(steps):
            want.append(lm_logits(weights, tokens))
            tokens.append(int(want[-1].argmax()))
            script.append(["step", tokens[-1]])
        want.append(lm_logits(weights, tokens))
        if refuse:
            script.append(["step", 1])
        n = len(prompt)  # a prompt may have all its scores and logits; a step has one row of each
        bound = int(1.2 * (n * (8 * C * C + 4 * C * n + 2 * C * V) + steps * (8 * C * C + 4 * C * most + 2 * C * V)))

        def extra(reply: Reply) -> None:
            if reply.flops > bound:
                raise Wrong(
                    f"case {name}: {reply.flops:,} FLOPs of products; with a cache {bound:,} are plenty: is everything"
                    " computed again at each step?",
                    cause="volume",
                )

        whole: list[Any] = [*want, {"raised": "ValueError"}] if refuse else list(want)
        return value_trial(
            name, why, "Decoder", [weights], whole, kind="script", steps=script, edge=edge, cause=cause, extra=extra
        )

    def drawn(n: int) -> list[int]:
        return torch.randint(0, V, (n,), generator=torch.Generator().manual_seed(seed + n)).tolist()

    yield trial("prompt", Text("the logits after a prompt", "提示之后的 logits"), drawn(6), 0, False)
    yield trial("greedy", Text("cached logits are the uncached ones", "带缓存与不带缓存一致"), drawn(6), 8, False)
    yield trial("long", Text("a step costs one token, not the whole text", "每步只算一个词元"), drawn(70), 24, False)
    yield trial("one", Text("a prompt of one token", "提示只有一个词"), drawn(1), 5, True, "edge")
    yield trial(
        "full",
        Text("past the last position a step raises ValueError", "超过最大长度时抛 ValueError"),
        drawn(most - 2),
        2,
        True,
        "edge",
        refuse=True,
    )
    why = Text("a second prefill begins anew", "再次 prefill 会重新开始")
    script: list[list[Any]] = [["prefill", drawn(5)], ["step", 3], ["prefill", drawn(4)]]
    truth = [lm_logits(weights, drawn(5)), lm_logits(weights, [*drawn(5), 3]), lm_logits(weights, drawn(4))]
    yield value_trial("again", why, "Decoder", [weights], truth, kind="script", steps=script, edge=True, cause="stale")


def law(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, *, mistake: str = "") -> torch.Tensor:
    """The exact distribution of the next token."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    p = torch.softmax((logits * temperature if mistake == "factor" else logits / temperature).double(), -1)
    keep = order[:top_k] if top_k and mistake != "ignored" else order
    whole = float(p[keep].sum()) if mistake != "normalize" else 1.0
    mass, kept = 0.0, list[int]()
    for i in keep:
        if kept and mass >= top_p - 1e-12 and top_p < 1:
            break
        mass += float(p[i]) / whole
        kept.append(i)
    if mistake == "off_by_one" and top_p < 1 and len(kept) > 1:
        kept = kept[:-1]
    if mistake == "ignored:top_p":
        kept = keep
    out = torch.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


def sampling_trials(seed: int) -> Iterator[Trial]:
    inf = float("-inf")
    plain = 1.5 * _normal(seed, 12)
    peaked = torch.tensor([0.0, 40.0, inf, 0.0], dtype=torch.float64)
    ties = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0], dtype=torch.float64)
    cases: list[tuple[str, Text, torch.Tensor, float, int, float, bool, str]] = [
        ("plain", Text("temperature alone", "只有温度"), plain, 0.7, 0, 1.0, False, ""),
        ("top_k", Text("the k most likely tokens", "概率最大的 k 个"), plain, 1.0, 3, 1.0, False, ""),
        ("top_p", Text("the smallest set with at least this mass", "质量达到 p 的最小集合"), plain, 1.3, 0, 0.8, False, ""),
        ("both", Text("top-p counts the mass of what top-k left", "top-p 作用于 top-k 之后的分布"), plain, 1.0, 6, 0.7, False, "normalize"),
        ("greedy", Text("temperature 0 is the argmax", "温度 0 即 argmax"), plain, 0.0, 0, 1.0, True, "edge"),
        ("nothing", Text("p = 0 keeps the most likely token", "p = 0 保留最可能的一个"), plain, 1.0, 0, 0.0, True, "edge"),
        ("ties", Text("of equal tokens the first come first", "相同概率按序号取"), ties, 1.0, 2, 1.0, True, "ties"),
        ("certain", Text("one token has all the mass, one is -inf", "一个词占全部质量，一个为 -inf"), peaked, 1.0, 0, 0.9, True, "special"),
        ("more", Text("k is more than there are tokens", "k 大于词表"), plain, 1.0, 99, 1.0, True, "edge"),
    ]  # fmt: skip
    for name, why, logits, temperature, top_k, top_p, edge, cause in cases:
        args: list[Any] = [logits, temperature, top_k, top_p]
        names = ("factor", "ignored", "ignored:top_p", "normalize", "off_by_one")
        suspects = {} if temperature == 0 else {m: partial(law, *args, mistake=m) for m in names}
        yield value_trial(name, why, "distribution", args, law(*args), edge=edge, cause=cause, suspects=suspects)
    for i, (name, why, logits, temperature, top_k, top_p, edge, _) in enumerate(cases[:3] + cases[7:8]):
        yield _draws(f"draw_{name}", why, [logits, temperature, top_k, top_p], seed + i, edge)


def _draws(name: str, why: Text, args: list[Any], seed: int, edge: bool) -> Trial:
    """10^5 draws: never a token without mass, and chi-squared below the value that 1 of 10,000 passes, for one of three
    seeds (a right answer fails all three once in 10^12)."""
    count, want = 100_000, law(*args)
    replies: list[Reply] = []

    def ask(answer: Answer) -> Reply:
        replies[:] = [answer.call("draw", [*args, count], rng=seed + k, draws=True) for k in range(3)]
        return replies[0]

    def judge(reply: Reply) -> None:
        far = []
        for one in replies:
            got = one.value
            if not isinstance(got, torch.Tensor) or got.shape != (count,) or got.dtype != torch.int64:
                raise Wrong(
                    f"draw returned {getattr(got, 'type_name', type(got).__name__)}, expected int64 [{count}]",
                    cause="type",
                )
            if int(got.min()) < 0 or int(got.max()) >= len(want):
                raise Wrong("draw returned a token outside of the vocabulary", cause="mass")
            seen = torch.bincount(got, minlength=len(want)).double()
            if bool((seen[want == 0] > 0).any()):
                token = int(((want == 0) & (seen > 0)).nonzero()[0])
                raise Wrong(
                    f"case {name}: token {token} has probability 0 and was drawn {int(seen[token])} times", cause="mass"
                )
            some = want > 0
            square = float(((seen - count * want)[some].square() / (count * want[some])).sum())
            freedom = int(some.sum()) - 1
            far.append(square > freedom + 3.72 * math.sqrt(2 * freedom) + 10)  # past the 0.9999 quantile
        if all(far):
            raise Wrong(
                f"case {name}: the frequencies of {count:,} draws are not those of the distribution", cause="mass"
            )

    return Trial(name=name, why=why, ask=ask, judge=judge, edge=edge, draws=True)


def merge(o1: Any, l1: Any, o2: Any, l2: Any, *, mistake: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(l1, l2)
    w1, w2 = ((l - lse).exp().nan_to_num(0.0)[..., None] for l in (l1, l2))
    if mistake == "normalize":
        return (o1 + o2) / 2, lse
    if mistake == "special":
        w1, w2 = ((l - lse).exp()[..., None] for l in (l1, l2))
    return w1 * o1 + w2 * o2, torch.maximum(l1, l2) if mistake == "formula" else lse


def merge_trials(seed: int) -> Iterator[Trial]:
    inf = float("-inf")

    def trial(name: str, why: Text, shift: float, edge: bool, cause: str, holes: tuple[int, ...] = ()) -> Trial:
        o1, o2 = _normal(seed, 5, 3), _normal(seed + 1, 5, 3)
        l1, l2 = _normal(seed + 2, 5) + shift, _normal(seed + 3, 5) - shift
        for which in holes:
            ((l1, o1), (l2, o2))[which][0][1] = inf
            ((l1, o1), (l2, o2))[which][1][1] = 0.0
        args = [o1, l1, o2, l2]
        suspects = {m: partial(merge, *args, mistake=m) for m in ("normalize", "special")}
        return value_trial(name, why, "merge", args, merge(*args), edge=edge, cause=cause, suspects=suspects)

    yield trial("plain", Text("two parts of a row's keys", "一行键的两部分"), 0.0, False, "")
    yield trial("far", Text("exp of a large lse overflows", "大的 lse 取 exp 会溢出"), 2000.0, True, "overflow")
    yield trial("far_right", Text("the second part is the larger one", "第二段更大"), -2000.0, True, "overflow")
    yield trial("left", Text("the first part saw no key", "第一部分没有 key"), 0.0, True, "special", (0,))
    yield trial("right", Text("the second part saw no key", "第二部分没有 key"), 0.0, True, "special", (1,))
    yield trial(
        "neither",
        Text("no part saw a key: 0 and -inf, not NaN", "都没有 key：0 与 -inf，而不是 NaN"),
        0.0,
        True,
        "special",
        (0, 1),
    )
    empty = [torch.zeros(0, 3).double(), torch.zeros(0).double()] * 2
    yield value_trial("empty", Text("no row", "没有行"), "merge", empty, tuple(empty[:2]), edge=True, cause="empty")


def int8(x: torch.Tensor, *, mistake: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    most = x.amax(-1) if mistake == "sign" else x.abs().amax(-1)
    most = x.abs().amax().expand(x.shape[:-1]) if mistake == "rows" and x.numel() else most
    scale = most / (128 if mistake == "factor" else 127)
    scale = torch.where(scale == 0, 1.0, scale)
    y = x / scale[..., None]
    q = y.trunc() if mistake == "formula" else torch.floor(y + 0.5) if mistake == "ties" else y.round()
    return q.clamp(-127, 127).to(torch.int8), scale


def int8_trials(seed: int) -> Iterator[Trial]:
    def trial(name: str, why: Text, x: torch.Tensor, edge: bool, cause: str = "") -> Trial:
        names = ("sign", "rows", "factor", "formula", "ties")
        suspects = {m: partial(int8, x, mistake=m) for m in names} if x.numel() else {}
        return value_trial(name, why, "quantize", [x], int8(x), edge=edge, cause=cause, suspects=suspects)

    x = _normal(seed, 6, 40)
    yield trial(
        "plain",
        Text("each row has its own scale", "每行一个 scale"),
        x * torch.arange(1.0, 7.0).double()[:, None],
        False,
    )
    yield trial("negative", Text("the largest magnitude is negative", "绝对值最大的是负数"), -x.abs(), False)
    yield trial(
        "halves",
        Text("halves are rounded to even", "恰好一半时取偶"),
        torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]).double(),
        True,
        "ties",
    )
    yield trial(
        "zero", Text("a row of zeros has scale 1", "全零行的 scale 为 1"), torch.zeros(2, 5).double(), True, "special"
    )
    yield trial("one", Text("one column", "一列"), _normal(seed + 1, 4, 1), True, "edge")
    yield trial("large", Text("values near the largest of fp64's square root", "很大的值"), 1e150 * x, True, "overflow")
    yield trial("none", Text("no row", "没有行"), torch.zeros(0, 5).double(), True, "empty")
