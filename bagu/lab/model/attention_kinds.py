"""Kinds of attention: the KV cache of MHA, GQA, MQA and MLA, and the loss of each at equal parameters.

    MHA             a key and a value for each of H heads             2 H D numbers per token and layer
    GQA, MQA        a key and a value for 4 heads, for all heads      2 (H / 4) D, and 2 D
    MLA             one latent, and one key with the position         4 D + D / 2, in DeepSeek-V2's proportions
    fewer heads     a control: MHA with as many heads as GQA's cache has room for
    itself only     a control: a window of 1, so that a token attends to itself only; the added loss is the value of
                    attention

A kind with fewer attention parameters gets a wider FFN, so that all models are equally large. D = head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from bagu.data import evaluation_batches
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, names_in, number, where
from bagu.lab.parts.byte_models import VOCAB, LibraryBytes, read_bytes, rows_of, train_on_bytes
from bagu.lab.parts.confidence import interval
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Bars, Line, Mark, Note, Panel, Rule
from bagu.nn import ModelConfig, count
from bagu.nn.config import MLAConfig
from bagu.nn.kv import DenseKV
from bagu.train.cross_entropy import held_out_loss

MARGIN = 1.0  # percent of the loss: a kind within this margin counts as having MHA's loss
CONTEXT, ROWS = 128, 8
SMALL = tiny(VOCAB, 64, heads=8, ffn=176, max_len=CONTEXT, tie_embeddings=True)
LARGE_NAME, LARGE_CONTEXT = "Llama 3 8B", 131072
LARGE = ModelConfig(  # with MHA for comparison; the real model has GQA
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=14336,
    max_len=LARGE_CONTEXT,
)
MHA, FEWER, NONE = "MHA", "fewer heads", "itself only"
CLAIMED = ("GQA", "MQA", "MLA")
CONTROLS = (FEWER, NONE)


def kinds(mha: ModelConfig) -> dict[str, ModelConfig]:
    """Each kind of attention in the same model, with the same total number of parameters."""
    H, D = mha.num_heads, mha.head_dim
    mla = MLAConfig(kv_rank=4 * D, nope_dim=D, rope_dim=D // 2, v_dim=D)
    found = {
        MHA: mha,
        "GQA": replace(mha, num_kv_heads=H // 4),
        "MQA": replace(mha, num_kv_heads=1),
        "MLA": replace(mha, mla=mla, head_dim=mla.nope_dim + mla.rope_dim),
        FEWER: replace(mha, num_heads=H // 4, num_kv_heads=H // 4),
        NONE: replace(mha, windows=(1,)),
    }
    parameters = count.parameters(mha).total
    return {name: widened(config, parameters) for name, config in found.items()}


def widened(config: ModelConfig, parameters: int) -> ModelConfig:
    """The config with the FFN width that is closest to this number of parameters."""
    narrow = count.parameters(replace(config, intermediate_size=1)).total
    a_feature = count.parameters(replace(config, intermediate_size=2)).total - narrow
    return replace(config, intermediate_size=1 + round((parameters - narrow) / a_feature))


def run(setting: Setting) -> list[Row]:
    quick = setting.quick
    text = read_bytes(every=16 if quick else 4)
    seeds, steps = ((1, 2), 2) if quick else ((1, 2, 3, 4, 5), 200)
    points = [
        partial(trained, name, config, seed, steps, text, setting)
        for seed, (name, config) in product(seeds, kinds(SMALL).items())
    ]
    sizes = [sized(name, config) for name, config in kinds(LARGE).items()]
    return sizes + [point() for point in setting.track(points)]


def sized(name: str, config: ModelConfig) -> Row:
    """The KV cache of a large model of this kind."""
    return {"part": "size", "model": LARGE_NAME, "context_tokens": LARGE_CONTEXT, **facts(name, config)}


def facts(name: str, config: ModelConfig) -> Row:
    """Sizes of a model. The KV cache is in bf16, as counted and as allocated; none if a token attends to itself
    only."""
    cache = DenseKV(config, 1, config.max_len, device="meta", dtype=torch.bfloat16)
    return {
        "kind": name,
        "parameters": count.parameters(config).total,
        "intermediate_size": config.intermediate_size,
        "kv_bytes_per_token": 0 if name == NONE else count.kv_bytes(config, itemsize=2),
        "allocated_kv_bytes_per_token": 0 if name == NONE else cache.num_bytes // config.max_len,
    }


def trained(name: str, config: ModelConfig, seed: int, steps: int, text: LibraryBytes, setting: Setting) -> Row:
    """Train one model on the same batches as all others of this seed, and measure its loss on held-out modules."""
    data = rows_of(CONTEXT, ROWS, seed)
    model = train_on_bytes(config, text.train, data, steps=steps, seed=seed, device=setting.device).eval()
    batches = partial(evaluation_batches, text.held, data, limit=2 if setting.quick else 60)
    return {
        "part": "loss",
        **facts(name, config),
        "seed": seed,
        "steps": steps,
        "tokens": steps * data.tokens_per_step,
        "val_loss_nats": held_out_loss(batches)(model)["val_loss_nats"],
    }


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The loss of a kind above MHA's of the same seed, in percent; mean and interval over the seeds."""

    percent: float
    half_width: float

    @property
    def same(self) -> bool:
        """Not worse than the margin, with 95 % confidence; a lower loss counts too."""
        return self.percent + self.half_width <= MARGIN

    @property
    def worse(self) -> bool:
        return self.percent - self.half_width > MARGIN

    def __str__(self) -> str:
        return f"{self.percent:+.1f} ± {self.half_width:.1f} %"


def costs(rows: Sequence[Row]) -> dict[str, Cost]:
    """The cost of every kind except MHA."""
    losses = {(str(r["kind"]), r["seed"]): number(r, "val_loss_nats") for r in rows if r["part"] == "loss"}
    seeds = dict.fromkeys(seed for _, seed in losses)
    found = {}
    for name in dict.fromkeys(name for name, _ in losses):
        if name != MHA:
            mean, half = interval([100 * (losses[name, seed] / losses[MHA, seed] - 1) for seed in seeds])
            found[name] = Cost(percent=mean, half_width=half)
    return found


def cache_percent(rows: Sequence[Row], name: str) -> float:
    """The size of its KV cache in percent of MHA's."""
    size = {r["kind"]: number(r, "kv_bytes_per_token") for r in rows if r["part"] == "loss"}
    return 100 * size[name] / size[MHA]


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if each claimed kind is not worse than MHA by the margin; holds only where, if some are not. A kind for
    which the seeds are not conclusive does not count; without one that is as good, it leaves the claim open."""
    found = costs(rows)
    same = [name for name in CLAIMED if found[name].same and cache_percent(rows, name) < 100]
    unclear = [name for name in CLAIMED if not (found[name].same or found[name].worse)]
    kind: Kind = "held" if len(same) == len(CLAIMED) else "holds only where" if same else "did not hold"
    first = next(r for r in rows if r["part"] == "loss")
    seeds = len({r["seed"] for r in rows if r["part"] == "loss"})
    spare = found[FEWER].same  # then sharing does not explain the loss: the model does not need the heads
    en, zh = [], []
    for name in CLAIMED:
        cost, share = found[name], cache_percent(rows, name)
        standing = ("no worse", "不差于 MHA") if cost.same else ("worse", "更差") if cost.worse else ("open", "未定")
        en.append(f"{name} with {share:.0f} % of the cache {cost} ({standing[0]})")
        zh.append(f"{name} 用 {share:.0f} % 的缓存，{cost}（{standing[1]}）")
    found_so = Verdict(
        kind=kind,
        sentence_en=f"Loss relative to MHA at {number(first, 'parameters'):,.0f} parameters, {first['steps']} steps, "
        f"{seeds} seeds (up to {MARGIN:g} % more counts as the same): {'; '.join(en)}. MHA with fewer heads and "
        f"GQA's cache: {found[FEWER]}{', so a model of this size does not need the heads' if spare else ''}; "
        f"a token that attends to itself only: {found[NONE]}.",
        sentence_zh=f"在 {number(first, 'parameters'):,.0f} 个参数、{first['steps']} 步、{seeds} 个种子下与 MHA "
        f"的损失相比（高出不超过 {MARGIN:g} % 视为相同）：{'；'.join(zh)}。头数更少、缓存与 GQA 相同的 MHA："
        f"{found[FEWER]}{'，可见这么小的模型并不缺头' if spare else ''}；每个 token 只看自己：{found[NONE]}。",
    )
    if same or not unclear:
        return found_so
    return found_so.undecided(
        f"more seeds or steps, until the interval of {', '.join(unclear)} is on one side of {MARGIN:g} %.",
        f"更多种子或步数，直到 {'、'.join(unclear)} 的区间落在 {MARGIN:g} % 的一侧。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    found = {MHA: Cost(percent=0.0, half_width=0.0)} | {n: c for n, c in costs(rows).items() if n != NONE}
    size = {str(r["kind"]): number(r, "kv_bytes_per_token") for r in where(rows, part="loss")}
    marks: list[Mark] = [Rule(MARGIN)]
    for i, (name, cost) in enumerate(found.items()):
        x, y = size[name] * (0.94 if name == FEWER else 1), cost.percent  # its cache size equals GQA's: avoid overlap
        marks.append(Line([x], [y], "", "o", i, [(y - cost.half_width, y + cost.half_width)]))
        shift = (-6, 5) if name == FEWER else (6, 5)
        marks.append(Note(x, y, name, i, shift, "right" if name == FEWER else "left"))
    limits = min(s for s in size.values() if s) / 1.2, max(size.values()) * 1.5
    large = [r for r in where(rows, part="size") if r["kind"] not in CONTROLS]
    gib = [number(r, "kv_bytes_per_token") * number(r, "context_tokens") / 2**30 for r in large]
    title, bytes_ = f"Loss at equal parameters (dotted: {MARGIN:g} % more)", "KV cache, bytes per token (bf16)"
    bars = Bars(gib, colour="each", text="{:.3g}", sideways=True)
    at = f"{large[0]['model']} at {number(large[0], 'context_tokens'):,.0f} tokens"
    return [
        Panel(marks, title, bytes_, "loss relative to MHA, %", "log2", xlim=limits, width=1.5),
        Panel([bars], at, "KV cache, GiB", ynames=names_in(large, "kind")),
    ]


LAB = Claim(
    title_en="Kinds of attention",
    title_zh="注意力的种类",
    claim_en="At equal parameters GQA, MQA and MLA reach MHA's loss with a fraction of its KV cache.",
    claim_zh="参数量相同时，GQA、MQA 和 MLA 只用一小部分 KV 缓存就能得到与 MHA 相同的损失。",
    regime="A model of 2 layers, width 64, 8 heads of 8, on the bytes of the standard library in contexts of "
    f"{CONTEXT}; one learning rate for all, chosen with MHA; FFN widths make parameters equal; held-out "
    "modules; 5 seeds.",
    varies="The kind of attention: MHA, GQA (4 heads share), MQA, MLA (a latent of the size of 4 heads and a position "
    "key of half a head, as in DeepSeek-V2), and as controls MHA with a quarter of the heads, and no attention to "
    "other tokens.",
    measures="Loss on held-out modules, per seed relative to MHA; bytes of KV cache per token, counted and allocated.",
    evidence="training",
    published_en="T5-XXL (11B) uptrained with 5 % of its pretraining: GQA with 8 groups has a quality close to "
    "MHA's at about the speed of MQA (Ainslie et al. 2023, arXiv:2305.13245).",
    published_zh="T5-XXL（11B）用 5 % 的预训练量继续训练：8 组的 GQA 质量接近 MHA，速度接近 MQA"
    "（Ainslie 等，2023，arXiv:2305.13245）。",
)
