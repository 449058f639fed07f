"""Training in fp8: the loss beside full precision, and where rounding to 8 bits hurts.

    plain      weights as they are initialized
    outliers   some features of the FFN's inner layer 16,384 times larger, and their columns of `down` as much smaller:
               the same function, but one scale for the tensor leaves few bits for the others
    layers     the relative error of each rounded input: first and last blocks, attention, up, down

e4m3 has a mantissa of 3 bits, an error of about 2.6 % for any size, and nothing below 2⁻⁹ of its unit: a tensor whose
largest number is 10⁵ times the usual one loses the usual ones. On a CPU the same numbers are multiplied in fp32.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch

from bagu.data import DataConfig, evaluation_batches
from bagu.lab.core import Claim, Row, Setting, Verdict, listed, names_in, number, numbers_in, say, share_met, where
from bagu.lab.parts.against import Percent, against, settled
from bagu.lab.parts.byte_models import VOCAB, LibraryBytes, read_bytes, rows_of
from bagu.lab.parts.more_steps import go_on, new
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Bars, Line, Panel, Rule
from bagu.nn import Transformer
from bagu.nn.change import around
from bagu.nn.ffn import FFN
from bagu.nn.fp8 import rounded
from bagu.nn.linear import Linear
from bagu.train.cross_entropy import held_out_loss

CONTEXT, ROWS, LAYERS = 64, 12, 3
WIDTHS = (32, 64, 128)
TIMES, FEATURES = 2.0**14, 2  # of an outlier; how many of them in each FFN
MARGIN = 0.5  # percent of the loss
FULL, FP8 = "full", "fp8"


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    text = read_bytes(every=16 if quick else 4)
    widths, seeds, steps = (WIDTHS[:1], (1, 2), 2) if quick else (WIDTHS, (1, 2, 3), 150)
    for width, start, seed in setting.track(list(product(widths, ("plain", "outliers"), seeds))):
        data = rows_of(CONTEXT, ROWS, seed)
        config = tiny(VOCAB, width, layers=LAYERS, heads=2, ffn=3 * width, max_len=CONTEXT, tie_embeddings=True)
        first = new(config, seed, setting.device)
        for kind in (FULL, FP8):
            model = copy.deepcopy(first)
            if start == "outliers":
                planted(model)
            go_on(
                model,
                text.train,
                data,
                steps=steps,
                seed=seed,
                kind="adamw",
                lr=3e-3,
                precision="fp8" if kind == FP8 else None,
            )
            yield {
                "part": "loss",
                "kind": kind,
                "start": start,
                "width": width,
                "seed": seed,
                "steps": steps,
                "parameters": sum(p.numel() for p in model.parameters()),
                "val_loss_nats": loss_of(model, text, data, quick),
            }
            if kind == FULL and seed == seeds[0]:
                yield from errors(model, text, data, start, width)


@torch.no_grad()
def planted(model: Transformer) -> None:
    """Some features of `up` times larger and their columns of `down` as much smaller: the same function. These columns
    stay as they are: a step of the optimizer would be thousands of times their size."""

    def still(gradient: torch.Tensor) -> torch.Tensor:
        return torch.cat((torch.zeros_like(gradient[:, :FEATURES]), gradient[:, FEATURES:]), 1)

    for ffn in (m for m in model.modules() if isinstance(m, FFN)):
        F = ffn.down.weight.shape[1]
        ffn.gate_up.weight[F : F + FEATURES] *= TIMES
        ffn.down.weight[:, :FEATURES] /= TIMES
        ffn.down.weight.register_hook(still)


def loss_of(model: Transformer, text: LibraryBytes, data: DataConfig, quick: bool) -> float:
    batches = partial(evaluation_batches, text.held, data, limit=2 if quick else 60)
    return float(held_out_loss(batches)(model.eval())["val_loss_nats"])


def errors(model: Transformer, text: LibraryBytes, data: DataConfig, start: str, width: int) -> list[Row]:
    """The relative error of the rounded input of each linear layer, and the share of it that becomes 0. The error is
    the median over features, so that a few large ones do not hide the others."""
    inputs: dict[str, torch.Tensor] = {}

    def keep(name: str, _: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs[name] = args[0].detach()

    handles = []
    for name, module in model.blocks.named_modules():
        if isinstance(module, Linear):
            handles += around(module, before=partial(keep, name))
    loss_of(model, text, data, quick=True)
    for handle in handles:
        handle.remove()
    rows: list[Row] = []
    for name, x in inputs.items():
        q, _, scale = rounded(x)
        back = q.float() * scale
        off = (back - x).norm(dim=0) / x.norm(dim=0).clamp(min=1e-12)
        rows.append(
            {
                "part": "error",
                "layer": name,
                "start": start,
                "width": width,
                "error_percent": 100 * float(off.median()),
                "zeros_percent": 100 * float(((back == 0) & (x != 0)).float().mean()),
            }
        )
    return rows


def costs(rows: Sequence[Row]) -> dict[tuple[str, float], Percent]:
    """fp8's loss above full precision's by start and width."""
    own = where(rows, part="loss")
    return {
        (start, width): against(where(own, start=start, width=width), FULL)[FP8]
        for start, width in product(names_in(own, "start"), numbers_in(own, "width"))
    }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if fp8 is within the margin at every width, with and without planted outliers."""
    found = costs(rows)
    told = [
        say(
            "{start}, width {w:.0f} {p}",
            "{start}，宽 {w:.0f} {p}",
            w=w,
            p=p,
            start=say("plain", "普通") if start == "plain" else say("outliers in down", "down 有离群值"),
        )
        for (start, w), p in found.items()
    ]
    worst = max(where(rows, part="error"), key=lambda r: number(r, "error_percent"))
    usual = sorted(number(r, "error_percent") for r in where(rows, part="error", start="plain"))
    said = Verdict.say(
        share_met(p.high <= MARGIN for p in found.values()),
        "Loss of fp8 against full precision: {told}. Rounding changes the input of a layer by {low:.1f} to {high:.1f} "
        "% (plain), most in {layer}: {most:.0f} %.",
        "fp8 与全精度相比的损失：{told}。舍入使一层的输入改变 {low:.1f} 至 {high:.1f} %（普通），最多的是 {layer}："
        "{most:.0f} %。",
        told=listed(told),
        low=usual[0],
        high=usual[-1],
        layer=worst["layer"],
        most=number(worst, "error_percent"),
    )
    return settled(said, [(p, MARGIN) for p in found.values()])


def plot(rows: Sequence[Row]) -> list[Panel]:
    found, lines = costs(rows), []
    for start in names_in(where(rows, part="loss"), "start"):
        own = {w: p for (s, w), p in found.items() if s == start}
        lines.append(
            Line(list(own), [p.mean for p in own.values()], start, "o-", ends=[(p.low, p.high) for p in own.values()])
        )
    widest = max(numbers_in(where(rows, part="error"), "width"))
    bars = [
        Bars([number(r, "error_percent") for r in where(rows, part="error", start=start, width=widest)], start)
        for start in names_in(where(rows, part="error"), "start")
    ]
    names = [
        str(r["layer"]).replace(".", "\n", 1).replace("attention.", "").replace("ffn.", "")
        for r in where(rows, part="error", start="plain", width=widest)
    ]
    return [
        Panel([Rule(0, style="-"), Rule(MARGIN), *lines], "Loss", "width", "above full precision, %", xscale="log2"),
        Panel(
            bars,
            f"Error of a rounded input, width {widest:.0f}",
            "block and layer",
            "%",
            yscale="log",
            xnames=names,
            width=2.0,
        ),
    ]


LAB = Claim(
    title_en="Training in fp8",
    title_zh="fp8 训练",
    claim_en="Rounding the operands of linear layers to fp8 with one scale a tensor does not change the loss.",
    claim_zh="线性层的操作数以每张量一个缩放因子舍入到 fp8，不影响损失。",
    regime=f"Models of {LAYERS} layers on the bytes of the standard library, AdamW; inputs, weights and gradients of "
    "all linear layers in the blocks in e4m3, sums in fp32, as `train.precision=fp8` has it; 3 seeds.",
    varies=f"Width ({', '.join(map(str, WIDTHS))}); plain weights, or {FEATURES} features of each FFN {TIMES:g} times "
    "larger before `down`, with the same function.",
    measures=f"Loss on held-out modules, per seed relative to fp32; up to {MARGIN:g} % counts as the same. The "
    "relative error of each layer's rounded input, the median over features.",
    evidence="training",
    published_en="bagu on one H200, gpt2_124m on source code, against bf16: +0.54 % after 100M tokens of seed 0, −0.63 "
    "% and −0.99 % after 50M of seeds 1 and 2; two bf16 runs of one seed differ by 0.31 % (docs/journal/013).",
    published_zh="bagu 在一块 H200 上，gpt2_124m 训练源代码，与 bf16 相比：种子 0 在 100M token 后 +0.54 %，种子 1、2 "
    "在 50M 后 −0.63 % 与 −0.99 %；同一种子的两次 bf16 相差 0.31 %（docs/journal/013）。",
)
