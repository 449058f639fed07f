"""LayerNorm's Jacobian: what a norm on the residual stream does to the gradient of the identity path.

    post   x ← LN(x + f(x))        d = J_LN(x + f(x)) d        J_LN = (I − 11ᵀ/D − x̂x̂ᵀ/D) / σ
    pre    x ← x + f(LN(x))        d = d

At initialization f(x) is as large as x and independent of it, so that σ = √2: each layer of post-norm divides the
gradient of the identity path by √2. f is a random matrix here; its own path is cut.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from bagu import ops
from bagu.lab.core import Claim, Row, Setting, Verdict, column, numbers_in, share_met, where
from bagu.lab.plot import Line, Panel

CLOSE = 0.02  # of a rate
RATE = 1 / math.sqrt(2)
PLACES = ("post", "pre")


def run(setting: Setting) -> Iterator[Row]:
    width, depth, seeds = (64, 8, 2) if setting.quick else (512, 32, 5)
    for seed in setting.track(range(seeds)):
        for place in PLACES:
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(16, width, generator=generator, dtype=torch.float64, requires_grad=True)
            gain, stream, norms = x.new_ones(width), ops.layer_norm(x, x.new_ones(width)), []
            probe = torch.randn(16, width, generator=generator, dtype=torch.float64)
            for _ in range(depth):
                weight = torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5
                branch = (ops.layer_norm(stream, gain) @ weight.T).detach()
                stream = ops.layer_norm(stream + branch, gain) if place == "post" else stream + branch
                norms.append(torch.autograd.grad(stream, x, probe, retain_graph=True)[0].norm().item())
            for layer, norm in enumerate(norms, 1):
                yield {"place": place, "seed": seed, "width": width, "layer": layer, "gradient": norm / norms[0]}


def rate(rows: Sequence[Row], place: str) -> float:
    """The factor of the gradient for one more layer: the geometric mean over layers and seeds."""
    own = where(rows, place=place)
    last = numbers_in(own, "layer")[-1]
    logs = [math.log(v) for v in column(where(own, layer=last), "gradient")]
    return math.exp(sum(logs) / len(logs) / (last - 1))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if post-norm's factor is 1/√2 and pre-norm's is 1, both within CLOSE."""
    post, pre = (rate(rows, place) for place in PLACES)
    depth = f"{numbers_in(rows, 'layer')[-1]:g}"
    return Verdict.say(
        share_met((abs(post - RATE) <= CLOSE, abs(pre - 1) <= CLOSE)),
        "A layer multiplies the gradient of the identity path by {post:.3f} with post-norm (1/√2 = {rate:.3f}) and by "
        "{pre:.3f} with pre-norm: over {depth} layers to {left:.1e} and {kept:.1e} of it.",
        "每层使恒等路径的梯度乘以：post-norm {post:.3f}（1/√2 = {rate:.3f}），pre-norm {pre:.3f}；"
        "经过 {depth} 层剩下 {left:.1e} 与 {kept:.1e}。",
        post=post,
        pre=pre,
        rate=RATE,
        depth=depth,
        left=post ** int(depth),
        kept=pre ** int(depth),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = [Line.of(where(rows, place=p, seed=0), "layer", "gradient", f"{p}-norm") for p in PLACES]
    layers = column(where(rows, place="post", seed=0), "layer")
    law = Line(layers, [RATE ** (n - 1) for n in layers], "2^(−L/2)", ":", "grey")
    return [Panel([*lines, law], "Gradient of the identity path", "layers", "of that after one layer", yscale="log")]


LAB = Claim(
    title_en="LayerNorm's Jacobian",
    title_zh="LayerNorm 的雅可比",
    claim_en="At initialization each layer of post-norm shrinks the gradient of the identity path by √2; pre-norm's "
    "does not shrink it.",
    claim_zh="初始化时，post-norm 每层使恒等路径的梯度缩小 √2 倍，pre-norm 则不缩小。",
    regime="bagu.ops.layer_norm in fp64, width 512 and 32 layers (quick: 64 and 8), branches that are random matrices "
    "and as large as the stream.",
    varies="Placement of the norm, depth, seed.",
    measures=f"Norm of the gradient that reaches the input through the identity path alone. Met within {CLOSE}.",
)
