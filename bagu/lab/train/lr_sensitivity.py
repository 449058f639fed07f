"""How exact must the learning rate be? Decades of rates whose final loss is near the best, by optimizer.

Each optimizer begins at the rate that is usual for it and goes up and down by √10 until the loss is out of reach of its
own best; one rate more halves each of the two last steps. The ends of the range are interpolated between rates.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise, product
from statistics import fmean

import torch

from bagu import ops
from bagu.lab.core import Claim, Row, Setting, Verdict, listed, names_in, number, numbers_in, share_met, where
from bagu.lab.model.positions.lengths import cut, losses
from bagu.lab.parts.byte_models import VOCAB, read_bytes
from bagu.lab.parts.confidence import Interval, interval
from bagu.lab.parts.more_steps import hidden, new
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Bars, Line, Panel
from bagu.lab.train.optimizers.descent import one_thread
from bagu.nn import ModelConfig, count
from bagu.train.memory.flat import FlatParameters
from bagu.train.optim import Optimizer, OptimizerConfig
from bagu.train.optim.config import Kind as Rule

LENGTH, ROWS, STEPS, WIDTH = 32, 8, 200, 32
SEEDS = (1, 2, 3, 4, 5)
NEAR = 1.05  # times the best loss of the same optimizer and seed
LOST = math.log(VOCAB)  # nats of equal probabilities: the loss of a run that diverges
MORE = 0.5  # decades: the step of a coarse search, 1, 3, 10
FAR = 8  # half decades: no search goes further
# torch's defaults; SGD as in the training of ResNets (torch: 0.001), Muon as its author
USUAL: dict[str, tuple[Rule, float]] = {
    "SGD": ("sgd", 0.1),
    "momentum": ("momentum", 0.1),
    "Adagrad": ("adagrad", 0.01),
    "RMSProp": ("rmsprop", 0.01),
    "Adadelta": ("adadelta", 1.0),
    "Adam": ("adam", 0.001),
    "Muon": ("muon", 0.02),
}
ADAPTIVE, PLAIN = ("Adagrad", "RMSProp", "Adadelta", "Adam"), "SGD"


def searched(loss_at: Callable[[float], float], start: float, far: int = FAR) -> dict[float, float]:
    """Rates with their losses, until the two ends are out of reach of the best."""
    found = {start: loss_at(start)}
    for outermost, factor in ((max, 10**0.5), (min, 10**-0.5)):
        for _ in range(far):
            end = outermost(found)
            if found[end] > NEAR * min(found.values()):
                break
            found[end * factor] = loss_at(end * factor)
    near = NEAR * min(found.values())
    crossed = [(a, b) for a, b in pairwise(sorted(found)) if (found[a] > near) != (found[b] > near)]
    for low, high in {*crossed[:1], *crossed[-1:]}:
        rate = math.sqrt(low * high)
        found[rate] = loss_at(rate)
    return found


def decades(found: dict[float, float], limit: float) -> float:
    """How many powers of ten of rates have a loss below the limit, the loss interpolated over their logarithm."""
    total = 0.0
    for a, b in pairwise(sorted(found)):
        least, most = sorted((found[a], found[b]))
        if least <= limit:
            total += math.log10(b / a) * (1.0 if most <= limit else (limit - least) / (most - least))
    return total


def trained(
    config: ModelConfig, train: torch.Tensor, held: torch.Tensor, rule: Rule, seed: int, steps: int, lr: float
) -> float:
    """The held-out loss after `steps` steps, with a tenth of warm-up, a linear decay to 0 and no weight decay."""
    model, generator = new(config, seed, str(train.device)), torch.Generator().manual_seed(seed)
    flat = FlatParameters(model)
    optimizer = Optimizer(OptimizerConfig(kind=rule, lr=lr, weight_decay=0.0), flat)
    for step in range(1, steps + 1):
        pieces = train[torch.randint(len(train), (ROWS,), generator=generator)]
        logit, lse = ops.linear_cross_entropy(hidden(model, pieces[:, :-1]), model.head_weight, pieces[:, 1:].flatten())
        loss = (lse - logit).mean()
        if not loss.item() < 4 * LOST:  # also if it is not a number
            break
        flat.begin()
        loss.backward()
        flat.finish()
        optimizer.update(lr=lr * min(10 * step / steps, 1) * (1 - (step - 1) / steps), step=step)
    flat.release()
    final = float(losses(model, held).mean())
    return min(final, LOST) if math.isfinite(final) else LOST


def run(setting: Setting) -> Iterator[Row]:
    quick, device = setting.quick, setting.device
    text = read_bytes(every=16 if quick else 4)
    train = torch.stack(list(islice(cut(text.train, LENGTH + 1), 200 if quick else 20_000))).to(device)
    held = torch.stack(list(islice(cut(text.held, LENGTH + 1), 8 if quick else 128))).to(device)
    config = tiny(VOCAB, WIDTH, layers=1, heads=2, ffn=3 * WIDTH, max_len=LENGTH)
    steps, far, seeds = (2, 2, (1, 2)) if quick else (STEPS, FAR, SEEDS)
    with one_thread():
        for name, seed in setting.track(list(product(USUAL, seeds))):
            rule, usual = USUAL[name]
            loss_at = partial(trained, config, train, held, rule, seed, steps)
            found = searched(loss_at, usual, far)
            same: Row = {"optimizer": name, "seed": seed, "steps": steps, "parameters": count.parameters(config).total}
            yield from ({**same, "rate": rate, "val_loss_nats": loss} for rate, loss in found.items())


def by_rate(rows: Sequence[Row], name: str, seed: float) -> dict[float, float]:
    own = where(rows, optimizer=name, seed=seed)
    return dict(sorted((number(row, "rate"), number(row, "val_loss_nats")) for row in own))


def widths(rows: Sequence[Row], name: str, base: str | None = None) -> list[float]:
    """Decades near the optimizer's own best, or where it is at least as good as the best of `base`; by seed."""
    each = []
    for seed in numbers_in(rows, "seed"):
        best = min(by_rate(rows, base or name, seed).values())
        each.append(decades(by_rate(rows, name, seed), best if base else NEAR * best))
    return each


def wider(rows: Sequence[Row], name: str) -> Interval:
    """How many decades wider the range is than that of plain SGD."""
    mean, half = interval([a - b for a, b in zip(widths(rows, name), widths(rows, PLAIN), strict=True)])
    return Interval(mean, mean - half, mean + half)


def excess(rows: Sequence[Row], name: str) -> float:
    """Percent by which the loss at the usual rate is above the best, the mean over seeds."""
    losses_of = [by_rate(rows, name, seed) for seed in numbers_in(rows, "seed")]
    return fmean(100 * (found[USUAL[name][1]] / min(found.values()) - 1) for found in losses_of)


def verdict(rows: Sequence[Row]) -> Verdict:
    """A part for each adaptive optimizer: yes if its range is surely wider than SGD's, no if it is surely not wider by
    MORE. A clear yes and a clear no decide, also if the seeds leave another part open."""
    gains = {name: wider(rows, name) for name in ADAPTIVE}
    clear = [gain.low > 0 for gain in gains.values() if gain.low > 0 or gain.high <= MORE]
    said = Verdict.say(
        share_met(clear or [False]),
        "Decades of learning rates within {near:.0%} of the own best: {all}. More than SGD: {gains}. At least as good "
        "as the best SGD: {reach}. At the usual rate the loss is above the best by {excess}.",
        "与自身最好损失相差 {near:.0%} 以内的学习率跨度（数量级）：{all}。比 SGD 多：{gains}。不差于最好的 SGD 的跨度："
        "{reach}。用惯用学习率时，损失比最好的高 {excess}。",
        near=NEAR - 1,
        all=listed(f"{name} {fmean(widths(rows, name)):.1f}" for name in USUAL),
        gains=listed(f"{name} {g.mean:+.1f} ± {g.high - g.mean:.1f}" for name, g in gains.items()),
        reach=listed(f"{name} {fmean(widths(rows, name, PLAIN)):.1f}" for name in USUAL if name != PLAIN),
        excess=listed(f"{name} {excess(rows, name):.0f} %" for name in USUAL),
    )
    if len(clear) == len(gains) or len(set(clear)) == 2:
        return said
    return said.undecided(
        f"more seeds, until each interval is above 0 or below {MORE:g} decades.",
        f"更多种子，直到各区间高于 0 或低于 {MORE:g} 个数量级。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    seeds, names = numbers_in(rows, "seed"), names_in(rows, "optimizer")
    curves = []
    for name in names:
        found = by_rate(rows, name, seeds[0])
        curves.append(Line(list(found), list(found.values()), name, "o--" if name == "Muon" else "o-"))
    bars = []
    for label, base in ((f"within {NEAR - 1:.0%} of the own best", None), ("as good as the best SGD", PLAIN)):
        spans = [widths(rows, name, base) for name in names]
        bars.append(Bars([fmean(s) for s in spans], label, ends=[(min(s), max(s)) for s in spans]))
    top = min(min(line.y) for line in curves) * 1.3
    return [
        Panel(curves, "One seed", "learning rate", "loss, nats", "log", ylim=(None, top), legend="below", width=1.4),
        Panel(bars, "Good learning rates", y="decades", xnames=names, legend="below", width=1.4),
    ]


LAB = Claim(
    title_en="Tuning the learning rate",
    title_zh="学习率要调到多准",
    claim_en="Adaptive optimizers hardly need tuning: more learning rates are good for them than for SGD.",
    claim_zh="自适应优化器几乎不需要调参：可用的学习率范围比 SGD 宽。",
    regime=f"A model of 1 layer, width {WIDTH}, on {ROWS} × {LENGTH} bytes of the standard library a step, {STEPS} "
    "steps with a tenth of warm-up and a linear decay to 0, without weight decay or clipping; held-out modules; "
    f"{len(SEEDS)} seeds.",
    varies="The optimizer (bagu.train.optim, other options at their defaults) and the learning rate: from the usual "
    "one by √10 up and down until the loss is more than 5 % above the best, then a quarter decade at both ends.",
    measures="Decades of rates whose loss is at most 5 % above the optimizer's own best, interpolated. Met for an "
    "adaptive one with more than SGD, by more than the 95 % interval over the seeds; not met if it cannot have "
    f"{MORE:g} decades more. Decades searched that are as good as the best SGD. The loss at the usual rate: torch's "
    "default; 0.1 for SGD and momentum, 0.02 for Muon.",
    evidence="training",
    published_en="Tuning Adam's rate and decay improved on its defaults in all of four tasks, from CIFAR-10 to parsing "
    "(Wilson et al. 2017, arXiv:1705.08292).",
    published_zh="从 CIFAR-10 到句法分析的四个任务上，调节 Adam 的学习率与衰减都优于默认值（Wilson 等，2017，"
    "arXiv:1705.08292）。",
)
