"""SwiGLU and GELU at equal parameters: the loss of models that differ in the FFN only.

GELU      down(gelu(up x))              2 d f weights
SwiGLU    down(silu(gate x) · up x)     3 d f weights, so f is two thirds
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from bagu.data import evaluation_batches
from bagu.lab.core import Claim, Row, Setting, Verdict, listed, numbers_in, say, share_met, where
from bagu.lab.model.attention_kinds import widened
from bagu.lab.parts.against import against, dots, settled
from bagu.lab.parts.byte_models import VOCAB, read_bytes, rows_of, train_on_bytes
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Panel, Rule
from bagu.nn import count
from bagu.nn.config import FFNKind
from bagu.train.cross_entropy import held_out_loss

CONTEXT, ROWS = 128, 8
WIDTHS = (32, 64)
KINDS: tuple[FFNKind, ...] = ("gelu", "relu2", "geglu", "swiglu")
MARGIN = 0.3  # percent of the loss: less is no gain worth a third matrix


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    text = read_bytes(every=16 if quick else 4)
    seeds, steps = ((1, 2), 2) if quick else ((1, 2, 3, 4), 200)
    for width, seed, kind in setting.track(list(product(WIDTHS, seeds, KINDS))):
        gelu = replace(tiny(VOCAB, width, heads=4, ffn=4 * width, max_len=CONTEXT, tie_embeddings=True), ffn="gelu")
        config, data = widened(replace(gelu, ffn=kind), count.parameters(gelu).total), rows_of(CONTEXT, ROWS, seed)
        model = train_on_bytes(config, text.train, data, steps=steps, seed=seed, device=setting.device).eval()
        batches = partial(evaluation_batches, text.held, data, limit=2 if quick else 60)
        yield {
            "kind": kind,
            "width": width,
            "seed": seed,
            "steps": steps,
            "features": config.intermediate_size,
            "parameters": count.parameters(config).total,
            "val_loss_nats": held_out_loss(batches)(model)["val_loss_nats"],
        }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if SwiGLU's loss is below GELU's by the margin at every width."""
    found = {w: against(where(rows, width=w), "gelu") for w in numbers_in(rows, "width")}
    told = [
        say(
            "width {w:.0f}: SwiGLU {swiglu}, GEGLU {geglu}, squared ReLU {relu2}",
            "宽 {w:.0f}：SwiGLU {swiglu}，GEGLU {geglu}，平方 ReLU {relu2}",
            w=w,
            **each,
        )
        for w, each in found.items()
    ]
    said = Verdict.say(
        share_met(each["swiglu"].high <= -MARGIN for each in found.values()),
        "Loss against GELU at equal parameters. {told}.",
        "参数量相同时与 GELU 相比的损失。{told}。",
        told=listed(told, "; ", "；"),
    )
    return settled(said, [(each["swiglu"], -MARGIN) for each in found.values()])


def plot(rows: Sequence[Row]) -> list[Panel]:
    panels = []
    for width in numbers_in(rows, "width"):
        found = {n: p for n, p in against(where(rows, width=width), "gelu").items() if n != "gelu"}
        marks = [Rule(0, style="-"), Rule(-MARGIN), dots(found)]
        panels.append(Panel(marks, f"Width {width:.0f}", y="loss against GELU, %", xnames=list(found)))
    return panels


LAB = Claim(
    title_en="SwiGLU",
    title_zh="SwiGLU",
    claim_en="At equal parameters a model with SwiGLU has a lower loss than one with GELU.",
    claim_zh="参数量相同时，SwiGLU 模型的损失低于 GELU 模型。",
    regime=f"Models of 2 layers on the bytes of the standard library in contexts of {CONTEXT}; an FFN of 4 times the "
    "width with GELU, others as wide as equal parameters allow; one learning rate; held-out modules; 4 seeds.",
    varies=f"The FFN (GELU, squared ReLU, GEGLU, SwiGLU); width {WIDTHS[0]} and {WIDTHS[-1]}.",
    measures=f"Loss on held-out modules, per seed relative to GELU; {MARGIN:g} % less counts as lower.",
    evidence="training",
    published_en="T5 at equal parameters and work: GEGLU and SwiGLU have the lowest perplexities of eight FFNs "
    "(Shazeer 2020, arXiv:2002.05202).",
    published_zh="参数与计算量相同的 T5：八种 FFN 中 GEGLU 与 SwiGLU 的困惑度最低（Shazeer，2020，arXiv:2002.05202）。",
)
