"""Positions in linear attention: none, sinusoids, RoPE, and a decay with the distance as in RetNet.

RoPE     φ(q)ᵀ R(m − n) φ(k)        relative; the denominator keeps φ without rotation, because it could be 0
decay    φ(q)ᵀ φ(k) γ^(m − n)       relative; a state that is multiplied by γ at each token, still linear in time
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from bagu import ops
from bagu.data import evaluation_batches
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, where
from bagu.lab.parts.against import against, dots, settled
from bagu.lab.parts.byte_models import VOCAB, LibraryBytes, read_bytes, rows_of
from bagu.lab.parts.more_steps import go_on, new
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel, Rule
from bagu.nn.attention import Attention, Context
from bagu.nn.change import override
from bagu.nn.config import Positions, Rope, Sinusoidal
from bagu.nn.position_choices import NoPositions
from bagu.nn.positions import rope_speeds
from bagu.train.cross_entropy import held_out_loss

CONTEXT, ROWS, HEADS, HEAD_DIM = 128, 8, 4, 16
NONE, DECAY, ROPE = "none", "decay", "RoPE"
POSITIONS: dict[str, Positions] = {NONE: NoPositions(), "sinusoidal": Sinusoidal(), ROPE: Rope(), DECAY: NoPositions()}
HEAD_DIMS = (2, 4, 8, 16, 32, 64)
MARGIN = 1.0  # percent of the loss: less is no gain by the encoding


def decays(heads: int) -> torch.Tensor:
    """γ of each head, as RetNet has them: from half a token's weight to nearly all of it."""
    return 1 - 2.0 ** (-1 - torch.arange(heads))


def decayed(
    attention: Attention, gamma: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context
) -> torch.Tensor:
    """Linear attention whose weights fall by γ[h] a token in head h, by its definition: all pairs."""
    T = context.max_len
    q, k = ops.positive_features(q.reshape(len(q), -1, attention.head_dim)), ops.positive_features(k)
    q, k, v = (x.unflatten(0, (-1, T)).transpose(1, 2) for x in (q, k, v))  # [N, H, T, D]
    at = torch.arange(T, device=q.device)
    decay = (gamma.to(q.device)[:, None, None] ** (at[:, None] - at).clamp(min=0)).tril()
    weights = q @ k.transpose(2, 3) * decay
    return (weights @ v / weights.sum(-1, keepdim=True)).transpose(1, 2).flatten(0, 1)


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    text = read_bytes(every=16 if quick else 4)
    seeds, steps = ((1, 2), 2) if quick else ((1, 2, 3), 250)
    yield from ({"part": "divisor", **signs(dim)} for dim in HEAD_DIMS)
    for seed, kind in setting.track(list(product(seeds, POSITIONS))):
        yield {"part": "loss", "kind": kind, "seed": seed, "steps": steps, **trained(text, kind, seed, steps, setting)}


def trained(text: LibraryBytes, kind: str, seed: int, steps: int, setting: Setting) -> dict[str, Any]:
    config = tiny(
        VOCAB,
        HEADS * HEAD_DIM,
        heads=HEADS,
        ffn=176,
        max_len=CONTEXT,
        attention="linear",
        positions=POSITIONS[kind],
        tie_embeddings=True,
    )
    data = rows_of(CONTEXT, ROWS, seed)
    model = new(config, seed, setting.device)
    for block in model.blocks if kind == DECAY else ():
        assert isinstance(block.attention, Attention)
        override(block.attention, linear=partial(decayed, block.attention, decays(HEADS)))
    go_on(model, text.train, data, steps=steps, seed=seed)
    batches = partial(evaluation_batches, text.held, data, limit=2 if setting.quick else 60)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "val_loss_nats": held_out_loss(batches)(model.eval())["val_loss_nats"],
    }


def signs(dim: int, length: int = 512) -> Row:
    """How many weights of rotated random features are negative, and how many of their sums: a divisor that may be 0."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.arange(length)[:, None] * rope_speeds(Rope(), dim)[0].float()
    q, k = (
        ops.rope(ops.positive_features(torch.randn(length, 1, dim, generator=generator)), angle.cos(), angle.sin())[
            :, 0
        ]
        for _ in range(2)
    )
    weights = (q @ k.T).tril()
    pairs = length * (length + 1) / 2
    return {
        "head_dim": dim,
        "negative_weights_percent": 100 * int((weights < 0).sum()) / pairs,
        "negative_sums_percent": 100 * int((weights.sum(-1) < 0).sum()) / length,
    }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if RoPE lowers the loss of linear attention and a decay does not; holds only where, if both do and RoPE
    more; did not hold if a decay does as well."""
    found = against(where(rows, part="loss"), NONE)
    rope, decay = found[ROPE], found[DECAY]
    kind: Kind = "did not hold"
    if rope.high <= -MARGIN and decay.high > -MARGIN:
        kind = "held"
    elif rope.high < decay.low:
        kind = "holds only where"
    few, many = (where(rows, part="divisor", head_dim=dim)[0] for dim in (HEAD_DIMS[1], HEAD_DIM))
    said = Verdict.say(
        kind,
        "Loss of linear attention against no positions: RoPE {rope}, a decay with the distance {decay}, sinusoids "
        "{sinusoidal}. Rotated, {many:.0f} % of the weights are negative in heads of {dim}; in heads of {small} so are "
        "{few:.0f} % of their sums, which is why the divisor is not rotated.",
        "线性注意力的损失，与无位置编码相比：RoPE {rope}，随距离衰减 {decay}，正弦 {sinusoidal}。旋转之后，{dim} "
        "维的头有 {many:.0f} % 的权重为负；{small} 维的头连和也有 {few:.0f} % 为负，所以分母不旋转。",
        rope=rope,
        decay=decay,
        sinusoidal=found["sinusoidal"],
        many=number(many, "negative_weights_percent"),
        few=number(few, "negative_sums_percent"),
        dim=HEAD_DIM,
        small=HEAD_DIMS[1],
    )
    return settled(said, [(rope, -MARGIN), (decay, -MARGIN)])


def plot(rows: Sequence[Row]) -> list[Panel]:
    found = {k: p for k, p in against(where(rows, part="loss"), NONE).items() if k != NONE}
    own = where(rows, part="divisor")
    lines = [Line.of(own, "head_dim", f"negative_{what}_percent", what) for what in ("weights", "sums")]
    marks = [Rule(0, style="-"), Rule(-MARGIN), dots(found)]
    return [
        Panel(marks, "Linear attention", y="loss against no positions, %", xnames=list(found), width=1.4),
        Panel(lines, "Rotated features", "head dim", "negative, %", xscale="log2"),
    ]


LAB = Claim(
    title_en="Positions in linear attention",
    title_zh="线性注意力中的位置",
    claim_en="RoPE is the only relative encoding that linear attention can have.",
    claim_zh="RoPE 是线性注意力唯一可用的相对位置编码。",
    regime=f"A model of 2 layers, width 64, {HEADS} heads of linear attention with φ = elu + 1, on the bytes of the "
    f"standard library in contexts of {CONTEXT}; held-out modules; 3 seeds. Signs: random features, 512 tokens.",
    varies="The encoding: none, sinusoids, RoPE in the numerator, a decay γ^(m − n) with a γ for each head.",
    measures=f"Loss per seed relative to no positions; {MARGIN:g} % less counts as a gain. The share of "
    "weights and of their sums that are negative when the features are rotated.",
    evidence="training",
    published_en="RetNet decays with the distance and rotates as well, in a form that is linear in the length (Sun et "
    "al. 2023, arXiv:2307.08621).",
    published_zh="RetNet 既随距离衰减也旋转，形式上与长度成线性（Sun 等，2023，arXiv:2307.08621）。",
)
