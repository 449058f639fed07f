"""Loss spikes: planted causes and the usual remedies, one against the other.

causes      bad batch (random targets, three steps) · rate (× 30 for three steps) · start (the full rate at step 1)
remedies    clip the gradient's norm · skip steps that `bagu.train`'s guard refuses · warm-up · z-loss · QK norm
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from statistics import fmean

import torch

from bagu import ops
from bagu.lab.core import Claim, Row, Setting, Text, Verdict, listed, names_in, number, say, share_met, where
from bagu.lab.model.positions.lengths import cut, losses
from bagu.lab.parts.byte_models import VOCAB, read_bytes
from bagu.lab.parts.more_steps import hidden, new
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Heat, Line, Panel
from bagu.nn import ModelConfig, count
from bagu.train.stability import Guard, StabilityConfig

LENGTH, ROWS, STEPS, AT, LASTS = 64, 8, 110, 60, 3
RATE, TOO_MUCH, TOO_FAST = 5e-3, 30.0, 3.0
CAUSES = {"none": "无", "bad batch": "坏批", "rate": "学习率", "start": "起步"}
REMEDIES = ("nothing", "clip", "skip", "warm-up", "z-loss", "QK norm")
CLAIMED = (("bad batch", "clip"), ("bad batch", "skip"), ("rate", "clip"), ("rate", "skip"), ("start", "warm-up"))
STOPPED = 0.25  # of the damage without a remedy


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    text = read_bytes(every=16 if quick else 4)
    train = torch.stack(list(islice(cut(text.train, LENGTH + 1), 200 if quick else 20_000))).to(setting.device)
    held = torch.stack(list(islice(cut(text.held, LENGTH + 1), 8 if quick else 64))).to(setting.device)
    seeds, steps = ((1,), 5) if quick else ((1, 2, 3), STEPS)
    for seed, cause, remedy in setting.track(list(product(seeds, CAUSES, REMEDIES))):
        config = tiny(VOCAB, 48, heads=2, ffn=144, max_len=LENGTH, tie_embeddings=True, qk_norm=remedy == "QK norm")
        damage = trained(config, train, held, cause, remedy, seed, steps, setting.device)
        size = {"steps": steps, "parameters": count.parameters(config).total}
        yield {"cause": cause, "remedy": remedy, "seed": seed, **size, "loss_sum_nats": damage}


def trained(
    config: ModelConfig,
    train: torch.Tensor,
    held: torch.Tensor,
    cause: str,
    remedy: str,
    seed: int,
    steps: int,
    device: str,
) -> float:
    """The sum over the evaluations, every fifth step, of the held-out loss, each at most 20 nats."""
    model, generator = new(config, seed, device), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    guard, at = Guard(StabilityConfig(min_history=min(16, max(steps // 3, 2)), window=64)), min(AT, steps // 2)
    warm = 1 if cause == "start" and remedy != "warm-up" else max(steps // 6, 1)
    found = []
    for step in range(steps):
        hit = at <= step < at + LASTS
        wrong = TOO_MUCH if cause == "rate" and hit else TOO_FAST if cause == "start" else 1.0
        for group in optimizer.param_groups:
            group["lr"] = RATE * wrong * min((step + 1) / warm, 1)
        pieces = train[torch.randint(len(train), (ROWS,), generator=generator)]
        if cause == "bad batch" and hit:
            pieces = torch.randint(VOCAB, pieces.shape, generator=generator).to(device)
        logit, lse = ops.linear_cross_entropy(hidden(model, pieces[:, :-1]), model.head_weight, pieces[:, 1:].flatten())
        loss = (lse - logit).mean()
        optimizer.zero_grad()
        (loss + 1e-3 * lse.square().mean() if remedy == "z-loss" else loss).backward()
        most = 0.5 if remedy == "clip" else torch.inf
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), most))
        if guard.judge(float(loss), norm) is None or remedy != "skip":
            optimizer.step()
        if step % 5 == 4:
            found.append(min(float(losses(model, held).mean().nan_to_num(20.0)), 20.0))
    return sum(found)


def damage(rows: Sequence[Row], cause: str, remedy: str) -> float:
    """What the cause adds to the sum of losses beyond the same remedy without it, the mean over seeds."""
    with_, without = (
        fmean([number(r, "loss_sum_nats") for r in where(rows, cause=c, remedy=remedy)]) for c in (cause, "none")
    )
    return with_ - without


def left(rows: Sequence[Row], cause: str, remedy: str) -> float:
    """The share of the damage that the remedy leaves."""
    return max(damage(rows, cause, remedy), 0.0) / max(damage(rows, cause, "nothing"), 1e-9)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if each claimed remedy leaves at most STOPPED of the damage of its cause, where the cause does any."""
    hurt = [cause for cause in list(CAUSES)[1:] if damage(rows, cause, "nothing") > 0]
    claimed = [(cause, remedy) for cause, remedy in CLAIMED if cause in hurt]

    def told(pairs: Iterable[tuple[str, str]]) -> Text:
        return listed(
            say(
                "{remedy} of {cause} {left:.0%}",
                "{cause}：{remedy} 剩 {left:.0%}",
                remedy=remedy,
                cause=Text(cause, CAUSES[cause]),
                left=left(rows, cause, remedy),
            )
            for cause, remedy in pairs
        )

    harmless = [Text(cause, zh) for cause, zh in list(CAUSES.items())[1:] if cause not in hurt]
    said = Verdict.say(
        share_met(left(rows, cause, remedy) <= STOPPED for cause, remedy in claimed),
        "Left of the damage: {told}. Not claimed: {others}. Causes without damage: {harmless}.",
        "损害所剩：{told}。未声称的：{others}。没有造成损害的原因：{harmless}。",
        told=told(claimed),
        others=told(product(hurt, ("z-loss", "QK norm"))),
        harmless=listed(harmless or [Text("none", "无")]),
    )
    if hurt:
        return said
    return said.undecided("a cause that does damage: none did.", "确实造成损害的原因：现在都没有。")


def plot(rows: Sequence[Row]) -> list[Panel]:
    causes, remedies = list(CAUSES)[1:], names_in(rows, "remedy")
    grid = [[min(100 * left(rows, cause, remedy), 100.0) for remedy in remedies] for cause in causes]
    sums = [
        Line(list(range(len(remedies))), [damage(rows, cause, remedy) for remedy in remedies], cause, "o")
        for cause in causes
    ]
    return [
        Panel([Heat(grid)], "Left of the damage, %", xnames=remedies, ynames=causes),
        Panel(sums, "Damage", y="sum of losses above the run without the cause, nats", xnames=remedies),
    ]


LAB = Claim(
    title_en="Loss spikes",
    title_zh="损失尖峰",
    claim_en="Clipping, skipping bad steps and warm-up stop loss spikes.",
    claim_zh="梯度裁剪、跳过坏步和预热能消除损失尖峰。",
    regime=f"A model of 2 layers, width 48, on the bytes of the standard library, {STEPS} steps of {ROWS} × {LENGTH} "
    "bytes with AdamW; causes are planted in the middle, or from the first step; 3 seeds.",
    varies=f"The cause: random text for {LASTS} steps, a rate {TOO_MUCH:g} times too high for {LASTS} steps, "
    f"{TOO_FAST:g} times the rate without warm-up. The remedy: none, clip at 0.5, skip, warm-up, z-loss, QK norm.",
    measures=f"The sum of held-out losses above that of the same remedy without the cause; {STOPPED:.0%} of the damage "
    "without a remedy counts as stopped.",
    evidence="training",
    published_en="PaLM 540B had about 20 spikes in spite of clipping; going back 100 steps and leaving out 200 to 500 "
    "batches stopped them (Chowdhery et al. 2022, arXiv:2204.02311).",
    published_zh="PaLM 540B 尽管做了裁剪仍出现约 20 次尖峰；回退约 100 步并跳过 200 到 500 个批后消失"
    "（Chowdhery 等，2022，arXiv:2204.02311）。",
)
