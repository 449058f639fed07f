"""GroupNorm and BatchNorm where batches are small: accuracy of a convolutional classifier after as many pictures.

Four convolutions, each with a norm and a ReLU, name glyphs of 16 × 16 pixels. BatchNorm's statistics of a channel are
over batch · height · width values. So the strides vary too: the last map has 1, 4 or 16 positions a picture, and a
batch of 2 gives the last norm 2, 8 or 32 values.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean

import torch
from torch import nn

from bagu.data.pictures.glyphs import SANS, in_style, masks
from bagu.data.pictures.paint import turned
from bagu.lab.core import Claim, Row, Setting, Verdict, column, listed, numbers_in, say, share_met, where
from bagu.lab.parts.against import Percent
from bagu.lab.parts.confidence import interval
from bagu.lab.plot import Line, Panel
from bagu.lab.train.optimizers.descent import one_thread
from bagu.nn.drop_in.layers import BatchNorm2d, Conv2d, GroupNorm

NAMES, SIDE, NOISE = 40, 16, 0.3
WIDTHS, GROUPS = (16, 32, 64, 64), 8
STRIDES = {1: (2, 2, 2, 2), 2: (1, 2, 2, 2), 4: (1, 2, 2, 1)}  # by the side of the last map
KINDS = {"batch": "BatchNorm", "group": "GroupNorm"}
BATCHES = (2, 4, 8, 16, 64)
RATES = (0.05, 0.2)  # at a batch of 64; in proportion to the batch
PICTURES, SEEDS = 2400, 3
KEPT = 2.0  # points: an accuracy that falls by no more is kept


def draw(stock: torch.Tensor, count: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures [count, 1, SIDE, SIDE] of glyphs in random fonts and places, with noise; and their names."""
    stream = torch.Generator().manual_seed(seed)
    fonts, names, _, _ = stock.shape
    name, font = (torch.randint(n, (count,), generator=stream) for n in (names, fonts))
    x = turned(stock[font, name], SIDE, stream).unsqueeze(1)
    return (2 * x - 0.5 + NOISE * torch.randn(x.shape, generator=stream)).to(device), name.to(device)


def new_net(kind: str, side: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, width, stride in zip((1, *WIDTHS), WIDTHS, STRIDES[side], strict=False):
        norm = BatchNorm2d(width) if kind == "batch" else GroupNorm(GROUPS, width)
        layers += [Conv2d(before, width, 3, stride, 1, bias=False), norm, nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(WIDTHS[-1] * side**2, NAMES))


def train(net: nn.Sequential, x: torch.Tensor, names: torch.Tensor, batch: int, rate: float, seed: int) -> int:
    """One pass in batches, the rate in proportion to their size; returns the steps."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    optimizer, steps = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, fused=True), len(x) // batch
    for step, chosen in enumerate(order[: steps * batch].view(steps, batch)):
        optimizer.param_groups[0]["lr"] = rate * batch / 64 * min((step + 1) / (0.1 * steps), 1) * (1 - step / steps)
        loss = nn.functional.cross_entropy(net(x[chosen]), names[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return steps


@torch.no_grad()
def right(net: nn.Sequential, x: torch.Tensor, names: torch.Tensor) -> float:
    """The share named right, with the running statistics."""
    return float((net.eval()(x).argmax(1) == names).double().mean())


@torch.no_grad()
def measure_statistics(net: nn.Sequential, x: torch.Tensor) -> None:
    """Replace the running averages by the statistics of many pictures at once."""
    for norm in (module for module in net.modules() if isinstance(module, BatchNorm2d)):
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean
    net.train()(x)


def run(setting: Setting) -> Iterator[Row]:
    quick, every = setting.quick, in_style(SANS[0])
    glyphs = [concept.char for concept in every[:: len(every) // NAMES][:NAMES]]
    stock = torch.stack([masks(glyphs, style) for style in SANS])
    device, counts = setting.device, (64, 200) if quick else (PICTURES, 2000)
    (x, names), (x_held, names_held) = (draw(stock, n, seed, device) for seed, n in enumerate(counts, 1))
    batches, rates, seeds = (BATCHES[::4], RATES[1:], range(2)) if quick else (BATCHES, RATES, range(SEEDS))
    with one_thread():
        for side, kind, batch in setting.track(list(product(STRIDES, KINDS, batches))):
            found: dict[float, float] = {}
            for seed, rate in [(0, rate) for rate in rates] + [(seed, None) for seed in seeds[1:]]:
                lr = max(found, key=found.__getitem__) if rate is None else rate  # the first seed chooses it
                net = new_net(kind, side, seed).to(device)
                steps = train(net, x, names, batch, lr, seed)
                share = right(net, x_held, names_held)
                measure_statistics(net, x)
                found.setdefault(lr, share)
                yield {
                    "kind": kind,
                    "map_side": side,
                    "batch": batch,
                    "learning_rate": lr,
                    "seed": seed,
                    "right_share": share,
                    "exact_share": right(net, x_held, names_held),
                    "steps": steps,
                    "parameters": sum(p.numel() for p in net.parameters()),
                }


def best(rows: Sequence[Row], kind: str, side: float, batch: float) -> list[Row]:
    """The rows of a batch size at its better learning rate, which is that of the last seed."""
    own = where(rows, kind=kind, map_side=side, batch=batch)
    return where(own, learning_rate=own[-1]["learning_rate"])


def mean(rows: Sequence[Row], key: str = "right_share") -> float:
    return fmean(column(rows, key))


def changes(rows: Sequence[Row], kind: str, side: float) -> Percent:
    """Points from the best larger batch to the smallest one."""
    small, *larger = (best(rows, kind, side, batch) for batch in numbers_in(rows, "batch"))
    top = column(max(larger, key=mean), "right_share")
    return Percent(*interval([100 * (b - a) for a, b in zip(top, column(small, "right_share"), strict=True)]))


def verdict(rows: Sequence[Row]) -> Verdict:
    """A part for each size of the last map: at the smallest batch GroupNorm keeps its accuracy and BatchNorm does not.
    A clear yes and a clear no decide, also if the seeds leave another one open."""
    clear, told, small = [], [], numbers_in(rows, "batch")[0]
    sides = numbers_in(rows, "map_side")
    for side in sides:
        batch, group = (changes(rows, kind, side) for kind in KINDS)
        met = batch.high < -KEPT <= group.low
        if met or batch.low >= -KEPT or group.high < -KEPT:
            clear.append(met)
        told.append(
            say(
                "{values:.0f}: BatchNorm {b.mean:+.1f} ± {b.half:.1f} points to {bt:.1f} % ({exact:.1f} % with exact "
                "statistics), GroupNorm {g.mean:+.1f} ± {g.half:.1f} to {gt:.1f} %",
                "{values:.0f} 个值：BatchNorm {b.mean:+.1f} ± {b.half:.1f} 个百分点，到 {bt:.1f} %（用精确统计量为 "
                "{exact:.1f} %），GroupNorm {g.mean:+.1f} ± {g.half:.1f}，到 {gt:.1f} %",
                values=small * side**2,
                b=batch,
                g=group,
                exact=100 * mean(best(rows, "batch", side, small), "exact_share"),
                bt=100 * mean(best(rows, "batch", side, small)),
                gt=100 * mean(best(rows, "group", side, small)),
            )
        )
    said = Verdict.say(
        share_met(clear or [False]),
        "From the best larger batch to {small:.0f}, by the values of a channel in the last norm: {told}.",
        "从最好的较大批到批大小 {small:.0f}，按最后一个归一化层每个通道的数值个数：{told}。",
        small=small,
        told=listed(told, "; ", "；"),
    )
    if len(clear) == len(sides) or len(set(clear)) == 2:
        return said
    return said.undecided(
        f"more seeds, until each interval is on one side of {KEPT:g} points.",
        f"更多种子，直到各区间都落在 {KEPT:g} 个百分点的一侧。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    batches, x, y, panels = numbers_in(rows, "batch"), "pictures of a batch", "named right, %", []
    for side in numbers_in(rows, "map_side"):
        shares = {name: [100 * mean(best(rows, kind, side, b)) for b in batches] for kind, name in KINDS.items()}
        lines = [Line(batches, share, name) for name, share in shares.items()]
        panels.append(Panel(lines, f"Last map {side:.0f} × {side:.0f}", x, y, "log2", share_y=True))
    return panels


LAB = Claim(
    title_en="GroupNorm and BatchNorm in small batches",
    title_zh="小批量下的 GroupNorm 与 BatchNorm",
    claim_en="GroupNorm keeps its accuracy where BatchNorm's batch is small.",
    claim_zh="批很小时 GroupNorm 保持精度，而 BatchNorm 不行。",
    regime=f"Four convolutions of {', '.join(map(str, WIDTHS))} channels on glyphs of {SIDE} × {SIDE} pixels with "
    f"noise, {NAMES} names, {PICTURES:,} pictures in all; SGD with momentum, warm-up and linear decay; {SEEDS} seeds; "
    f"held-out pictures of the same glyphs. GroupNorm has {GROUPS} groups; BatchNorm is evaluated with its running "
    "statistics.",
    varies=f"Pictures of a batch, {BATCHES[0]} to {BATCHES[-1]}; the strides, so that the last map has 1, 4 or 16 "
    "positions; the better of two learning rates, in proportion to the batch, for the first seed.",
    measures="The share of pictures named right, and with BatchNorm's statistics measured over all training pictures. "
    f"Kept: at a batch of {BATCHES[0]} at most {KEPT:g} points below the best larger batch; met for a map if GroupNorm "
    "keeps it and BatchNorm does not.",
    evidence="training",
    published_en="ResNet-50 on ImageNet, two pictures on each GPU: an error of 24.1 % with GroupNorm and 34.7 % with "
    "BatchNorm, 10.6 points more; with 32 pictures 24.1 % and 23.6 % (Wu and He 2018, arXiv:1803.08494).",
    published_zh="ImageNet 上的 ResNet-50，每个 GPU 两张图：GroupNorm 的错误率 24.1 %，BatchNorm 34.7 %，高 10.6 个"
    "百分点；32 张图时为 24.1 % 与 23.6 %（Wu 与 He，2018，arXiv:1803.08494）。",
)
