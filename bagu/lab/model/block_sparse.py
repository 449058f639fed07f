"""Block-sparse attention: the loss against the share of the keys that a query reads, trained dense or sparse.

chosen    its own block, the one before, the first, and the `top` others by the query's product with the mean key
nearest   as many blocks, the last ones: a window with a sink
trained   with 4 chosen blocks in training too
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in, share_met, where
from bagu.lab.model.positions.lengths import cut, losses
from bagu.lab.parts.against import against, settled
from bagu.lab.parts.byte_models import VOCAB, read_bytes, rows_of, train_on_bytes
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel, Rule
from bagu.nn import ModelConfig, Transformer
from bagu.nn.choices import BlockChoice

SIZE, LENGTH, ROWS = 16, 512, 2
TOPS = (0, 1, 2, 4, 8)
TRAINED_TOP = 4
MARGIN = 0.5  # percent of the loss


def read_as(config: ModelConfig, top: int, near: int) -> ModelConfig:
    return replace(config, attention="blocks", blocks=BlockChoice(size=SIZE, top=top, near=near, dense_below=0))


def share(top: int, near: int, length: int) -> float:
    """The share of earlier keys that a token reads, the mean over the second half of the text."""
    read = [min(2 + near + top, at // SIZE + 1) / (at // SIZE + 1) for at in range(length // 2, length)]
    return sum(read) / len(read)


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    length = 128 if quick else LENGTH
    text = read_bytes(every=16 if quick else 4)
    pieces = torch.stack(list(islice(cut(text.held, length + 1), 4 if quick else 60))).to(setting.device)
    dense = tiny(VOCAB, 64, heads=4, kv_heads=2, ffn=176, max_len=length, tie_embeddings=True)
    seeds, steps, tops = ((1, 2), 2, TOPS[1::2]) if quick else ((1, 2, 3), 250, TOPS)
    ways = {f"chosen {top}": ("chosen", top, 1) for top in tops} | {
        f"nearest {top}": ("nearest", 0, 1 + top) for top in tops
    }
    for seed in setting.track(seeds):
        data = rows_of(length, ROWS, seed)
        for config, trained in ((dense, "dense"), (read_as(dense, TRAINED_TOP, 1), "sparse")):
            model = train_on_bytes(config, text.train, data, steps=steps, seed=seed, device=setting.device).eval()
            reads: dict[str, tuple[str, int, int]] = {"dense": ("dense", 0, 0)} | ways
            if trained == "sparse":
                reads = {"trained": ("trained", TRAINED_TOP, 1)}
            for name, (way, top, near) in reads.items():
                reader = Transformer(dense if way == "dense" else read_as(dense, top, near), device=setting.device)
                reader.load_state_dict(model.state_dict())
                yield {
                    "name": name,
                    "way": way,
                    "top": top if way != "nearest" else near - 1,
                    "seed": seed,
                    "steps": steps,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "read_percent": 100.0 if way == "dense" else 100 * share(top, near, length),
                    "val_loss_nats": losses(reader, pieces)[:, length // 2 :].mean().item(),
                }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if four chosen blocks are within the margin of dense attention, both read only and trained."""
    found = against(rows, "dense", by="name")
    name = f"chosen {TRAINED_TOP}"
    chosen, trained = found[name], found["trained"]
    said = Verdict.say(
        share_met([chosen.high <= MARGIN, trained.high <= MARGIN]),
        "With {top} chosen blocks a query reads {percent:.0f} % of the keys. Loss against dense attention: trained "
        "dense and read sparse {chosen} (as many nearest blocks {near}), trained sparse {trained}.",
        "选 {top} 块时，一个 query 读 {percent:.0f} % 的 key。与稠密注意力相比的损失：稠密训练、稀疏读取 {chosen}"
        "（同样多的最近块 {near}），稀疏训练 {trained}。",
        top=TRAINED_TOP,
        percent=number(where(rows, name=name)[0], "read_percent"),
        chosen=chosen,
        trained=trained,
        near=found[f"nearest {TRAINED_TOP}"],
    )
    return settled(said, [(chosen, MARGIN), (trained, MARGIN)])


def plot(rows: Sequence[Row]) -> list[Panel]:
    found, marks = against(rows, "dense", by="name"), [Rule(0, style="-"), Rule(MARGIN)]
    lines = []
    labels = {
        "chosen": "trained dense, chosen blocks",
        "nearest": "trained dense, nearest",
        "trained": "trained sparse",
    }
    for way, label in labels.items():
        tops = numbers_in(where(rows, way=way), "top")
        own = [where(rows, way=way, top=top)[0] for top in tops]
        each = [found[str(row["name"])] for row in own]
        ends = [(p.low, p.high) for p in each]
        x = [number(row, "read_percent") for row in own]
        lines.append(Line(x, [p.mean for p in each], label, "o-", ends=ends))
    title, y = f"Blocks of {SIZE} in {LENGTH} tokens", "loss above dense attention, %"
    return [Panel([*marks, *lines], title, "keys that a query reads, %", y)]


LAB = Claim(
    title_en="Block-sparse attention",
    title_zh="块稀疏注意力",
    claim_en="A query needs few blocks of keys, chosen by their mean key: the loss stays that of dense attention.",
    claim_zh="query 只需按平均 key 选出的少数几块：损失与稠密注意力相同。",
    regime="A model of 2 layers, width 64, 4 heads on 2 key heads, on the bytes of the standard library in contexts "
    f"of {LENGTH}, blocks of {SIZE}; tokens of the second half; held-out modules; 3 seeds.",
    varies="The number of chosen blocks (0 to 8), the choice (by the query, or the nearest), and whether the model was "
    "trained dense or sparse.",
    measures=f"Loss per seed relative to dense attention; up to {MARGIN:g} % more counts as the same. The share of the "
    "keys that a query reads.",
    evidence="training",
    published_en="MoBA trains with blocks chosen by their mean keys and scales as full attention does; a Llama 3.1 8B "
    "made so reads 1M tokens up to 6.5 times as fast (Lu et al. 2025, arXiv:2502.13189).",
    published_zh="MoBA 按平均 key 选块来训练，扩展规律与全注意力相当；这样改造的 Llama 3.1 8B 读 100 万 token 快至多 "
    "6.5 倍（Lu 等，2025，arXiv:2502.13189）。",
)
