"""Pre-norm and post-norm to the end: the final loss of each with its own best learning rate.

The rate is chosen on a seed that does not count; then each placement trains with its best rate on the other seeds.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from bagu.data import evaluation_batches
from bagu.lab.core import Claim, Row, Setting, Verdict, listed, number, numbers_in, say, share_met, where
from bagu.lab.parts.against import against, dots, settled
from bagu.lab.parts.byte_models import VOCAB, LibraryBytes, read_bytes, rows_of
from bagu.lab.parts.more_steps import go_on, new
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel, Rule
from bagu.nn import ModelConfig, count
from bagu.nn.choices import NormConfig, Placement
from bagu.train import TrainingDiverged
from bagu.train.cross_entropy import held_out_loss

CONTEXT, ROWS, WIDTH = 64, 8, 48
DEPTHS = (3, 9)
RATES = (1e-3, 3e-3, 1e-2)
PLACEMENTS: tuple[Placement, ...] = ("pre", "post", "sandwich")
DIVERGED = 9.0  # nats of a run that was stopped: more than equal probabilities have


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    text = read_bytes(every=16 if quick else 4)
    seeds, steps, rates = ((1, 2), 2, RATES[1:2]) if quick else ((1, 2, 3), 150, RATES)
    for depth, placement in setting.track(list(product(DEPTHS[: 1 if quick else None], PLACEMENTS))):
        losses = {rate: trained(text, placement, depth, rate, 0, steps, setting) for rate in rates}
        best = min(losses, key=losses.__getitem__)
        found = [(0, rate, loss) for rate, loss in losses.items()]
        found += [(seed, best, trained(text, placement, depth, best, seed, steps, setting)) for seed in seeds]
        for seed, rate, loss in found:
            yield {
                "part": "chosen" if seed else "rate",
                "kind": placement,
                "layers": depth,
                "rate": rate,
                "seed": seed,
                "steps": steps,
                "parameters": count.parameters(shape(placement, depth)).total,
                "val_loss_nats": loss,
            }


def shape(placement: Placement, depth: int) -> ModelConfig:
    norm = NormConfig(kind="layer", placement=placement, eps=1e-5)
    return tiny(VOCAB, WIDTH, layers=depth, heads=4, ffn=3 * WIDTH, max_len=CONTEXT, norm=norm, tie_embeddings=True)


def trained(
    text: LibraryBytes, placement: Placement, depth: int, rate: float, seed: int, steps: int, setting: Setting
) -> float:
    """The loss on held-out modules after `steps` steps with a tenth of warm-up."""
    data = rows_of(CONTEXT, ROWS, seed)
    model = new(shape(placement, depth), seed, setting.device)
    try:
        go_on(model, text.train, data, steps=steps, seed=seed, lr=rate, kind="adamw", warmup=max(steps // 10, 1))
    except TrainingDiverged:
        return DIVERGED
    batches = partial(evaluation_batches, text.held, data, limit=2 if setting.quick else 60)
    return float(held_out_loss(batches)(model.eval())["val_loss_nats"])


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if post-norm ends below pre-norm at every depth, both with their best rate."""
    chosen = where(rows, part="chosen")
    found = {d: against(where(chosen, layers=d), "pre") for d in numbers_in(chosen, "layers")}
    rates = {(str(r["kind"]), r["layers"]): number(r, "rate") for r in chosen}
    told = [
        say(
            "{d:.0f} layers: post {post} (rate {rate:g}; pre {pre:g}), sandwich {sandwich}",
            "{d:.0f} 层：post {post}（学习率 {rate:g}；pre {pre:g}），sandwich {sandwich}",
            d=d,
            post=each["post"],
            sandwich=each["sandwich"],
            rate=rates["post", d],
            pre=rates["pre", d],
        )
        for d, each in found.items()
    ]
    said = Verdict.say(
        share_met(each["post"].high <= 0 for each in found.values()),
        "Final loss against pre-norm, each with its best learning rate. {told}.",
        "各取最佳学习率，最终损失与 pre-norm 相比。{told}。",
        told=listed(told, "; ", "；"),
    )
    return settled(said, [(each["post"], 0.0) for each in found.values()])


def plot(rows: Sequence[Row]) -> list[Panel]:
    depths, chosen = numbers_in(rows, "layers"), where(rows, part="chosen")
    panels = []
    for depth in depths:
        own = [r for r in where(rows, part="rate", layers=depth) if number(r, "val_loss_nats") < DIVERGED]
        lines = [Line.of(where(own, kind=kind), "rate", "val_loss_nats", kind) for kind in PLACEMENTS]
        panels.append(Panel(lines, f"{depth:.0f} layers, one seed", "learning rate", "loss, nats", xscale="log"))
    found = {
        f"{k} {d:.0f}": p for d in depths for k, p in against(where(chosen, layers=d), "pre").items() if k != "pre"
    }
    marks = [Rule(0, style="-"), dots(found)]
    return [*panels, Panel(marks, "Best rate, all seeds", "placement and layers", "against pre, %", xnames=list(found))]


LAB = Claim(
    title_en="The final loss of pre-norm and post-norm",
    title_zh="pre-norm 与 post-norm 的最终损失",
    claim_en="Pre-norm is easier to train, and post-norm ends with a lower loss.",
    claim_zh="pre-norm 更容易训练，而 post-norm 最终损失更低。",
    regime=f"LayerNorm, width {WIDTH}, on the bytes of the standard library in contexts of {CONTEXT}; AdamW with a "
    "tenth of warm-up and a linear decay to 0; held-out modules; 3 seeds beside the one that chooses the rate.",
    varies=f"The placement (pre, post, sandwich), {DEPTHS[0]} and {DEPTHS[-1]} layers, the learning rate "
    f"({', '.join(map(str, RATES))}).",
    measures="The loss on held-out modules at the end with the best rate, per seed relative to pre-norm.",
    evidence="training",
    published_en="DeepNet trains 1,000 layers of post-norm by scaled residuals and finds it better than pre-norm in "
    "translation (Wang et al. 2022, arXiv:2203.00555).",
    published_zh="DeepNet 用缩放残差训练 1,000 层 post-norm，在翻译上优于 pre-norm（Wang 等，2022，arXiv:2203.00555）"
    "。",
)
