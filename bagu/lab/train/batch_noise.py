"""The critical batch: steps and tokens to one loss against the size of the batch, and the noise scale of the gradient.

    noise scale   B = tr(Σ) / |G|²        the batch whose noise is as large as the gradient (McCandlish et al. 2018)
    estimated     |G|² and tr(Σ) from the squared norms of gradients of small and of large batches

Below it a batch of twice the size needs half the steps; above, hardly fewer. Each size has the best of three rates.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, product
from statistics import fmean

import torch

from bagu import ops
from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in, share_met, where
from bagu.lab.model.positions.lengths import cut, losses
from bagu.lab.parts.byte_models import VOCAB, read_bytes
from bagu.lab.parts.more_steps import hidden, new
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Mark, Panel, Rule
from bagu.nn import Transformer, count

LENGTH = 32
BATCHES = (1, 4, 16, 64, 256)  # sequences of LENGTH tokens
RATES = (0.5, 1.0, 2.0)  # times a rate that grows with the root of the batch
TARGET, BUDGET = 3.1, 4000  # nats; the most steps of one sequence, the root of that for larger batches
SMALL, LARGE = 4, 256
NEAR = 4.0  # times: the noise scale predicts the critical batch if it is not further off


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    text = read_bytes(every=16 if quick else 4)
    train = torch.stack(list(cut(text.train, LENGTH + 1))).to(setting.device)
    held = torch.stack(list(islice(cut(text.held, LENGTH + 1), 32 if quick else 128))).to(setting.device)
    batches, rates, seeds = (BATCHES[:3], RATES[1:2], (1,)) if quick else (BATCHES, RATES, (1, 2, 3))
    target = 5.3 if quick else TARGET
    config = tiny(VOCAB, 32, layers=1, heads=2, ffn=96, max_len=LENGTH, tie_embeddings=True)
    parameters = count.parameters(config).total
    for batch, seed, rate in setting.track(list(product(batches, seeds, rates))):
        model = new(config, seed, setting.device)
        budget = 20 if quick else int(BUDGET / batch**0.5)
        steps = to_target(model, train, held, batch, 3e-3 * rate * (batch / 16) ** 0.5, seed, budget, target)
        noise = noise_scale(model, train, seed, 1 if quick else 8) if batch == 16 and rate == 1.0 else None
        yield {
            "batch": batch,
            "seed": seed,
            "rate": rate,
            "steps_to_loss": steps,
            "noise_scale": noise,
            "steps": budget,
            "parameters": parameters,
        }


def to_target(
    model: Transformer,
    train: torch.Tensor,
    held: torch.Tensor,
    batch: int,
    lr: float,
    seed: int,
    budget: int,
    target: float,
) -> int | None:
    """The steps until the held-out loss is below the target; None if the budget ends before."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98))
    for step in range(1, budget + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(step / 10, 1)
        optimizer.zero_grad()
        mean_loss(model, train[torch.randint(len(train), (batch,), generator=generator)]).backward()
        optimizer.step()
        every = max(2, 64 // batch)  # evaluations cost as much as steps of a large batch
        if step % every == 0 and losses(model, held).mean() < target:
            return step
    return None


def mean_loss(model: Transformer, pieces: torch.Tensor) -> torch.Tensor:
    logit, lse = ops.linear_cross_entropy(hidden(model, pieces[:, :-1]), model.head_weight, pieces[:, 1:].flatten())
    return (lse - logit).mean()


def noise_scale(model: Transformer, train: torch.Tensor, seed: int, rounds: int) -> float:
    """tr(Σ) / |G|² in sequences, at the model's weights."""
    generator, squares = torch.Generator().manual_seed(seed), {SMALL: 0.0, LARGE: 0.0}
    for size, draws in ((SMALL, 8 * rounds), (LARGE, rounds)):
        for _ in range(draws):
            model.zero_grad()
            mean_loss(model, train[torch.randint(len(train), (size,), generator=generator)]).backward()
            squares[size] += sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) / draws
    trace = (squares[SMALL] - squares[LARGE]) / (1 / SMALL - 1 / LARGE)
    squared = (LARGE * squares[LARGE] - SMALL * squares[SMALL]) / (LARGE - SMALL)
    return max(trace, 0.0) / max(squared, 1e-12)


def steps_of(rows: Sequence[Row], batch: float) -> float | None:
    """The mean over seeds of the steps with the best rate; None if a seed never arrives."""
    found = []
    for seed in numbers_in(rows, "seed"):
        own = [r for r in where(rows, batch=batch, seed=seed) if r["steps_to_loss"] is not None]
        if not own:
            return None
        found.append(min(number(r, "steps_to_loss") for r in own))
    return fmean(found)


def critical(steps: dict[float, float]) -> float:
    """The first batch that takes twice the sequences of the thriftiest; the last one if none does."""
    used = {batch: batch * n for batch, n in steps.items()}
    least = min(used, key=used.__getitem__)
    return next((b for b in used if b > least and used[b] >= 2 * used[least]), max(used))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if fourfold batches save more than half of the perfect factor at the small end and less at the large end,
    and the noise scale is within a factor NEAR of the critical batch."""
    steps = {b: n for b in numbers_in(rows, "batch") if (n := steps_of(rows, b)) is not None}
    if len(steps) < 3:
        said = Verdict.say(
            "did not hold", "Only {n} batch sizes reach the loss.", "只有 {n} 种批大小达到目标损失。", n=len(steps)
        )
        return said.undecided("more steps, or a higher loss as the target.", "更多步数，或更高的目标损失。")
    sizes = list(steps)
    noise = fmean([number(r, "noise_scale") for r in rows if r.get("noise_scale") is not None])
    first, last = steps[sizes[0]] / steps[sizes[1]], steps[sizes[-2]] / steps[sizes[-1]]
    perfect = sizes[1] / sizes[0], sizes[-1] / sizes[-2]
    at = critical(steps)
    return Verdict.say(
        share_met([first > perfect[0] / 2, last < perfect[1] / 2, 1 / NEAR <= noise / at <= NEAR]),
        "From {a:.0f} to {b:.0f} sequences the steps fall by ×{first:.1f}, from {c:.0f} to {d:.0f} by ×{last:.1f}; "
        "twice the sequences of the thriftiest batch are needed from {at:.0f} on. The gradient's noise scale is "
        "{noise:.0f} sequences.",
        "批从 {a:.0f} 到 {b:.0f} 条序列，步数减为 1/{first:.1f}；从 {c:.0f} 到 {d:.0f} 减为 1/{last:.1f}；从 {at:.0f} "
        "起所需序列是最省时的两倍。梯度的噪声尺度为 {noise:.0f} 条序列。",
        a=sizes[0],
        b=sizes[1],
        c=sizes[-2],
        d=sizes[-1],
        first=first,
        last=last,
        at=at,
        noise=noise,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    steps = {b: n for b in numbers_in(rows, "batch") if (n := steps_of(rows, b)) is not None}
    noise = [number(r, "noise_scale") for r in rows if r.get("noise_scale") is not None]
    x = list(steps)
    rule: list[Mark] = [Rule(fmean(noise), "noise scale", axis="x")] if noise else []
    perfect = [steps[x[0]] * x[0] / b for b in x] if x else []
    lines: list[Mark] = [
        Line(x, list(steps.values()), "measured"),
        Line(x, perfect, "half the steps for twice the batch", ":"),
    ]
    used = Line(x, [b * n for b, n in steps.items()])
    names = "batch, sequences"
    return [
        Panel([*rule, *lines], "Steps to the loss", names, "steps", "log", "log"),
        Panel([*rule, used], "Sequences to the loss", names, "sequences", "log", "log"),
    ]


LAB = Claim(
    title_en="The critical batch",
    title_zh="临界批大小",
    claim_en="A larger batch needs fewer steps in proportion, up to a critical size that the gradient's noise "
    "predicts.",
    claim_zh="批越大，步数按比例减少，直到临界批大小；梯度噪声能预测它。",
    regime=f"A model of 1 layer, width 32, on sequences of {LENGTH} bytes of the standard library; Adam; held-out loss "
    f"of {TARGET} nats; 3 seeds.",
    varies=f"The batch, {BATCHES[0]} to {BATCHES[-1]} sequences; three learning rates around one that grows with its "
    "root, the best counts.",
    measures=f"Steps to the loss; tr(Σ) / |G|² from gradients of {SMALL} and {LARGE} sequences. The critical batch "
    f"takes twice the sequences of the thriftiest; the prediction may be off by ×{NEAR:g}.",
    evidence="training",
    published_en="The noise scale predicts the largest useful batch within an order of magnitude, from digits to a "
    "game of Dota (McCandlish et al. 2018, arXiv:1812.06162).",
    published_zh="从手写数字到 Dota，噪声尺度在一个数量级内预测了最大的有用批大小（McCandlish 等，2018，"
    "arXiv:1812.06162）。",
)
