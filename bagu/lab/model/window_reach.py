"""How far back a stack of windows reaches: by construction layers · (window − 1) tokens, and what training makes of it.

relay   the first token is a value, noise follows, and every later token must say the value
text    bytes of the standard library: how much text before a token the loss still notices
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, listed, names_in, number, numbers_in, say, share_met, where
from bagu.lab.model.positions.lengths import cut, losses
from bagu.lab.parts.byte_models import VOCAB, LibraryBytes, read_bytes, rows_of, train_on_bytes
from bagu.lab.parts.more_steps import IGNORE, new, right, train_on_draws
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel, Rule
from bagu.nn import count

WINDOW, DEPTHS, LENGTH = 8, (1, 2, 4), 48
VALUES, NOISE = 8, 16
CONTEXTS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48)
REACHED = 0.8  # of layers · (window − 1)
NOTICED = 1.0  # percent of the loss: with less than this to gain, the text further back is not noticed


def bound(layers: float) -> float:
    return layers * (WINDOW - 1)


def relayed(generator: torch.Generator, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """A value, then noise; the target is the value everywhere."""
    ids = VALUES + torch.randint(NOISE, (rows, LENGTH), generator=generator)
    ids[:, 0] = torch.randint(VALUES, (rows,), generator=generator)
    return ids, ids[:, :1].expand(-1, LENGTH).contiguous()


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    text = read_bytes(every=16 if quick else 4)
    pieces = torch.stack(list(islice(cut(text.held, LENGTH + 1), 40 if quick else 1500))).to(setting.device)
    points = [
        partial(measure, setting, layers, seed)
        for layers in DEPTHS[: 2 if quick else None]
        for seed in (1, 2, 3)[: 2 if quick else None]
        for measure in (partial(relay, steps=4 if quick else 400), partial(read, text, pieces, 2 if quick else 250))
    ]
    for point in setting.track(points):
        yield from point()


def relay(setting: Setting, layers: int, seed: int, steps: int) -> list[Row]:
    """The share of right answers by the distance to the value; 1 / VALUES is chance."""
    config = tiny(VALUES + NOISE, 64, layers=layers, heads=2, ffn=128, max_len=LENGTH, windows=(WINDOW,))
    model = train_on_draws(new(config, seed, setting.device), relayed, steps=steps, seed=seed, lr=3e-3)
    ids, targets = (x.to(setting.device) for x in relayed(torch.Generator().manual_seed(99), 512))
    share = right(model, ids, torch.where(ids < VALUES, IGNORE, targets)).mean(0)
    known = [(float(s) - 1 / VALUES) / (1 - 1 / VALUES) for s in share[1:]]
    return [
        {
            "task": "relay",
            "layers": layers,
            "seed": seed,
            "steps": steps,
            "parameters": count.parameters(config).total,
            "distance_tokens": d,
            "known": k,
        }
        for d, k in enumerate(known, 1)
    ]


def read(text: LibraryBytes, pieces: torch.Tensor, steps: int, setting: Setting, layers: int, seed: int) -> list[Row]:
    """The loss of the last byte of each piece with only so much of the text before it."""
    config = tiny(VOCAB, 64, layers=layers, heads=4, ffn=176, max_len=LENGTH, windows=(WINDOW,), tie_embeddings=True)
    data = rows_of(LENGTH, 24, seed)
    model = train_on_bytes(config, text.train, data, steps=steps, seed=seed, device=setting.device).eval()
    found = {c: losses(model, pieces[:, -c - 1 :])[:, -1].mean().item() for c in CONTEXTS}
    whole = found[LENGTH]
    return [
        {
            "task": "text",
            "layers": layers,
            "seed": seed,
            "steps": steps,
            "parameters": count.parameters(config).total,
            "distance_tokens": c,
            "gain_left_percent": 100 * (loss / whole - 1),
            "loss_nats": loss,
        }
        for c, loss in found.items()
    ]


def reach(rows: Sequence[Row], task: str, layers: float) -> float:
    """The furthest distance that counts, the mean over seeds: at which the relay knows half of what it could, and from
    which on more text changes the loss by less than NOTICED."""
    found = []
    for seed in numbers_in(rows, "seed"):
        own = where(rows, task=task, layers=layers, seed=seed)
        if task == "relay":
            known = [number(r, "distance_tokens") for r in own if number(r, "known") >= 0.5]
            found.append(max(known, default=0.0))
        else:
            open_ = [number(r, "distance_tokens") for r in own if number(r, "gain_left_percent") > NOTICED]
            found.append(min((d for d in CONTEXTS if d > max(open_, default=0)), default=LENGTH))
    return sum(found) / len(found)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if both tasks reach REACHED of layers · (window − 1) at every depth of more than one layer."""
    depths = [d for d in numbers_in(rows, "layers") if d > 1]
    shares = {t: [reach(rows, t, d) / bound(d) for d in depths] for t in names_in(rows, "task")}
    told = [
        say(
            "{d:.0f} layers: at most {most:.0f}, relay {relay:.0f}, text {text:.0f}",
            "{d:.0f} 层：至多 {most:.0f}，传递 {relay:.0f}，文本 {text:.0f}",
            d=d,
            most=bound(d),
            relay=reach(rows, "relay", d),
            text=reach(rows, "text", d),
        )
        for d in depths
    ]
    said = Verdict.say(
        share_met(min(own) >= REACHED for own in shares.values()),
        "Windows of {w}, tokens back that count. {told}.",
        "窗口 {w}，起作用的最远距离（token）。{told}。",
        w=WINDOW,
        told=listed(told, "; ", "；"),
    )
    if all(reach(rows, "relay", d) >= WINDOW - 1 for d in depths):
        return said
    return said.undecided(
        "more steps: a relay has not even learned the distance that one layer sees.",
        "更多步数：传递任务连一层能看到的距离都还没有学会。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    def mean(task: str, layers: float, key: str) -> Line:
        own = where(rows, task=task, layers=layers)
        at = numbers_in(own, "distance_tokens")
        each = [[number(r, key) for r in own if r["distance_tokens"] == d] for d in at]
        return Line(at, [sum(v) / len(v) for v in each], f"layers: {layers:.0f}", ".-")

    depths = numbers_in(rows, "layers")
    bounds = [Rule(bound(d), axis="x", colour=i) for i, d in enumerate(depths)]
    x = "distance, tokens (dotted: layers · (window − 1))"
    return [
        Panel([*bounds, *(mean("relay", d, "known") for d in depths)], "Relay a value", x, "share known beyond chance"),
        Panel(
            [*bounds, *(mean("text", d, "gain_left_percent") for d in depths)],
            "Text",
            "text before the byte, tokens",
            "loss above that of all text, %",
            ylim=(-1, 30),
        ),
    ]


LAB = Claim(
    title_en="The reach of windows",
    title_zh="滑动窗口看多远",
    claim_en="L layers of attention with a window of w see L · w tokens back.",
    claim_zh="L 层窗口为 w 的注意力能看到 L · w 个 token 之前。",
    regime=f"Models of width 64 with windows of {WINDOW} in all layers; a task that needs the distance ({LENGTH} "
    "tokens, every token must say the first one), and bytes of the standard library; 3 seeds.",
    varies=f"Layers ({', '.join(map(str, DEPTHS))}); the distance.",
    measures=f"The furthest distance at which the relay knows half of the values, and from which on more text changes "
    f"the loss by less than {NOTICED:g} %; {REACHED:.0%} of layers · (window − 1) counts as reached.",
    evidence="training",
    published_en="Mistral 7B, 32 layers of windows of 4,096, states a theoretical attention span of about 131K tokens "
    "(Jiang et al. 2023, arXiv:2310.06825); what the model uses of it is not measured there.",
    published_zh="Mistral 7B 有 32 层、窗口 4,096，论文称理论上的注意范围约 13.1 万 token（Jiang 等，2023，"
    "arXiv:2310.06825）；模型实际用到多少，文中没有测量。",
)
