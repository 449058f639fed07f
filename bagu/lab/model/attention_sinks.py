"""Attention sinks: what a model loses when its first tokens leave the window, and what four of them give back.

all          every earlier token
window       the last w tokens; their keys still come from the whole text
+ k first    the window and the first k tokens
cut          the last w tokens as a text of their own: what a recomputed window would give
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.nn import functional as F

from bagu.lab.core import Claim, Row, Setting, Verdict, share_met, where
from bagu.lab.model.positions.lengths import cut, losses
from bagu.lab.parts.against import against, dots, settled
from bagu.lab.parts.byte_models import VOCAB, read_bytes, rows_of, train_on_bytes
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Bars, Panel, Rule
from bagu.lab.rows import number
from bagu.nn import Transformer
from bagu.nn.attention import Attention, Context, Softmax
from bagu.nn.change import running_as

LENGTH, WINDOW, ROWS = 192, 48, 6
CLAIMED = 4
FIRST = (0, 1, CLAIMED, 16)
BREAKS, MENDED = 5.0, 1.0  # percent of the loss of a recomputed window


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    length = 64 if quick else LENGTH
    text = read_bytes(every=16 if quick else 4)
    pieces = torch.stack(list(islice(cut(text.held, length + 1), 20 if quick else 800))).to(setting.device)
    config = tiny(VOCAB, 64, layers=4, heads=4, ffn=176, max_len=length, tie_embeddings=True)
    seeds, steps = ((1, 2), 2) if quick else ((1, 2, 3), 400)
    for seed in setting.track(seeds):
        data = rows_of(length, ROWS, seed)
        model = train_on_bytes(config, text.train, data, steps=steps, seed=seed, device=setting.device).eval()
        size = {"seed": seed, "steps": steps, "parameters": sum(p.numel() for p in model.parameters())}
        ways: dict[str, torch.Tensor] = {
            "cut": losses(model, pieces[:, -WINDOW - 1 :])[:, -1],
            "all": losses(model, pieces)[:, -1],
        }
        weights: list[torch.Tensor] = []
        for first in FIRST:
            with seeing(model, WINDOW, first):
                ways["window" if first == 0 else f"+ {first} first"] = losses(model, pieces)[:, -1]
        with seeing(model, length, 0, weights):
            losses(model, pieces[:64])
        share = torch.stack(weights).mean(0)  # of the last token's weights, over layers and heads
        for way, loss in ways.items():
            yield {**size, "part": "loss", "way": way, "val_loss_nats": loss.mean().item()}
        yield {
            **size,
            "part": "weight",
            "first_percent": 100 * share[:CLAIMED].sum().item(),
            "equal_percent": 100 * CLAIMED / length,
        }


def seeing(model: Transformer, window: int, first: int, weights: list[torch.Tensor] | None = None) -> ExitStack:
    """Inside, a token attends to the `window` last tokens and the `first` ones. `weights` gets those of the last
    token of each text, the mean over texts and heads, for each layer."""
    stack = ExitStack()
    for block in model.blocks:
        assert isinstance(block.attention, Attention) and block.attention.softmax is not None
        softmax = block.attention.softmax
        stack.enter_context(running_as(softmax, partial(masked, softmax, window, first, weights)))
    return stack


def masked(
    softmax: Softmax,
    window: int,
    first: int,
    weights: list[torch.Tensor] | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: Context,
    **_: Any,
) -> torch.Tensor:
    T = context.max_len
    q, k, v = (x.unflatten(0, (-1, T)).transpose(1, 2) for x in (q, k, v))  # [N, H, T, D]
    at = torch.arange(T, device=q.device)
    back = at[:, None] - at
    mask = (back >= 0) & ((back < window) | (at < first))
    if weights is not None:
        scores = (q[:, :, -1:] @ k.transpose(2, 3) * softmax.scale).masked_fill(~mask[-1:], -torch.inf)
        weights.append(scores.softmax(-1).mean((0, 1, 2)))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax.scale)
    return out.transpose(1, 2).flatten(0, 1)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the window alone is worse than a recomputed one by BREAKS percent, and with four first tokens by at most
    MENDED; the first alone is a part of the claim."""
    found = against(where(rows, part="loss"), "cut", by="way")
    window, kept = found["window"], found[f"+ {CLAIMED} first"]
    weights = where(rows, part="weight")
    heavy, equal = (sum(number(r, f"{of}_percent") for r in weights) / len(weights) for of in ("first", "equal"))
    said = Verdict.say(
        share_met([window.low > BREAKS, window.low > BREAKS and kept.high <= MENDED]),
        "Loss against a recomputed window of {w} tokens: all tokens {all}, the window without its first tokens "
        "{window}, with the first {n} {kept}. In dense attention the first {n} of {length:.0f} tokens get "
        "{heavy:.0f} % of the last one's weight, {equal:.0f} % would be equal.",
        "与重新计算的 {w} token 窗口相比的损失：全部 token {all}，丢掉最初 token 的窗口 {window}，保留最初 {n} 个 "
        "{kept}。稠密注意力中，{length:.0f} 个 token 里最初 {n} 个得到末尾 token {heavy:.0f} % 的权重，均分则为 "
        "{equal:.0f} %。",
        w=WINDOW,
        all=found["all"],
        window=window,
        n=CLAIMED,
        kept=kept,
        length=100 * CLAIMED / equal,
        heavy=heavy,
        equal=equal,
    )
    return settled(said, [(window, BREAKS), *([(kept, MENDED)] if window.low > BREAKS else [])])


def plot(rows: Sequence[Row]) -> list[Panel]:
    found = {way: p for way, p in against(where(rows, part="loss"), "cut", by="way").items() if way != "cut"}
    own, marks = where(rows, part="weight"), [Rule(0, style="-"), Rule(BREAKS), dots(found)]
    share = Bars([number(r, "first_percent") for r in own], "first four tokens", text="{:.0f}")
    equal = Rule(number(own[0], "equal_percent"), "equal weights")
    return [
        Panel(marks, f"Window of {WINDOW}", y="loss above a recomputed window, %", xnames=list(found), width=1.4),
        Panel([share, equal], "Where the last token looks", "seed", "weight, %", xnames=[str(r["seed"]) for r in own]),
    ]


LAB = Claim(
    title_en="Attention sinks",
    title_zh="注意力汇",
    claim_en="A model that slides a window over its text breaks when the first tokens leave it; keeping four of them "
    "mends it.",
    claim_zh="在文本上滑动窗口的模型，最初的 token 移出窗口就会崩溃；保留其中四个就能恢复。",
    regime="A model of 4 layers, width 64, trained dense on the bytes of the standard library in contexts of "
    f"{LENGTH}; a window of {WINDOW} only when it is read; held-out modules; 3 seeds.",
    varies="What the last token may attend to: all, the window, the window and the first 1, 4 or 16 tokens.",
    measures=f"The loss of the last token, per seed relative to the same window as a text of its own; more than "
    f"{BREAKS:g} % is broken, up to {MENDED:g} % mended. The weight of the first tokens in dense attention.",
    evidence="training",
    published_en="Llama 2, MPT, Falcon and Pythia with a window fail when the first tokens leave it; with four of them "
    "kept they read millions of tokens, up to 22 times faster than by recomputation (Xiao et al. 2023, "
    "arXiv:2309.17453).",
    published_zh="Llama 2、MPT、Falcon 与 Pythia 在最初的 token 移出窗口后失效；保留其中四个则能读数百万 token，"
    "比重新计算快至多 22 倍（Xiao 等，2023，arXiv:2309.17453）。",
)
