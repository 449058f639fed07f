"""Deep pre-norm: how the residual stream grows with depth at initialization, and how little a late layer changes it.

x_{l+1} = x_l + f(norm(x_l)): branches of equal size add variance 1 a layer, so |x_l| grows as √l and
an update is 1/√l of it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from bagu.data.random_batches import random_batches
from bagu.lab.core import Claim, Row, Setting, Verdict, listed, number, numbers_in, say, share_met, where
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel
from bagu.nn import Transformer, init_weights

GROWS, KEPT = 1.5, 0.5  # the stream grows by this; a layer that changes less than half of what the first does is idle


@torch.no_grad()
def run(setting: Setting) -> Iterator[Row]:
    depths, width = ((8, 16), 64) if setting.quick else ((8, 16, 32, 64), 128)
    for depth in setting.track(depths):
        model = init_weights(Transformer(tiny(512, width, layers=depth, heads=4, ffn=3 * width, max_len=64)), 0)
        for name, p in model.named_parameters():  # plain initialization: outputs of branches as large as their inputs
            if p.dim() == 2 and "embed" not in name:
                p.normal_(0, p.shape[1] ** -0.5, generator=torch.Generator().manual_seed(len(name)))
        seen: list[torch.Tensor] = []
        hooks = [
            block.register_forward_hook(lambda _, args, out, seen=seen: seen.append(first(out)))
            for block in model.blocks
        ]
        (batch,) = random_batches(512, [64], device=torch.device("cpu"))
        model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len)
        for hook in hooks:
            hook.remove()
        for layer, (before, after) in enumerate(pairwise(seen), 2):
            size = float(before.square().mean().sqrt())
            change = float((after - before).square().mean().sqrt())
            yield {"depth": depth, "layer": layer, "stream": size, "change": change / size}


def first(out: object) -> torch.Tensor:
    found = out[0] if isinstance(out, tuple) else out
    assert isinstance(found, torch.Tensor)
    return found.detach().clone()


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if neither the stream grows nor the late layers' share of change falls, at every depth."""
    ends = {int(d): (where(rows, depth=d)[0], where(rows, depth=d)[-1]) for d in numbers_in(rows, "depth")}
    grown = {d: number(b, "stream") / number(a, "stream") for d, (a, b) in ends.items()}
    left = {d: number(b, "change") / number(a, "change") for d, (a, b) in ends.items()}
    return Verdict.say(
        share_met([max(grown.values()) < GROWS, min(left.values()) > KEPT]),
        "From the first layer to the last the stream grows by {grown}, and the share that a layer changes falls "
        "to {left} of "
        "the first's.",
        "从第一层到最后一层，残差流增大到 {grown}，而一层改变的份额降到第一层的 {left}。",
        grown=listed(say("×{g:.1f} ({d} layers)", "×{g:.1f}（{d} 层）", g=g, d=d) for d, g in grown.items()),
        left=", ".join(f"{share:.0%}" for share in left.values()),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    depths = numbers_in(rows, "depth")
    panels = []
    for key, title in (("stream", "Size of the stream"), ("change", "Change by a layer, relative")):
        lines = [Line.of(where(rows, depth=d), "layer", key, f"{d:g} layers", "-") for d in depths]
        panels.append(Panel(lines, title, "layer", xscale="log2", yscale="log"))
    return panels


LAB = Claim(
    title_en="Deep pre-norm",
    title_zh="很深的 pre-norm",
    claim_en="With pre-norm nothing explodes or vanishes, so that hundreds of layers all do their work.",
    claim_zh="用 pre-norm 既不爆炸也不消失，上百层都能各尽其用。",
    regime="A Llama with random weights of variance 1/fan-in, width 128 (quick: 64), 64 random tokens, before "
    "any training.",
    varies="Depth, 8 to 64 layers (quick: 16).",
    measures=f"Size of the residual stream after each layer, and the change by a layer relative to it. As "
    f"claimed: growth below "
    f"×{GROWS}, and the last layer changes more than {KEPT:.0%} of what the first does.",
)
