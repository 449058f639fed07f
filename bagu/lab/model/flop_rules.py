"""Rules for parameters and FLOPs: 12·L·d² and 6ND compared with the counts of `bagu.nn.count`.

    parameters of a block     4d² (q, k, v, out) + 8d² (an FFN of 4d, no gate)                 →  N = 12·L·d²
    training FLOPs per token  2 in the forward and 4 in the backward per weight                 →  6N
    not included in 6N        6·L·d·T of attention in a context of T, causal; a fraction T / 12d of 72·L·d²

Authors define N differently: the blocks only (Kaplan), with the head, or all parameters, although an embedding lookup
and an unused expert cost no FLOPs. The count itself is checked against PyTorch's FLOP counter on small models.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, names_in, number, where
from bagu.lab.plot import COLOURS, Line, Mark, Note, Panel, Rule
from bagu.nn import Transformer, count, init_weights, preset
from bagu.nn.config import MLAConfig, ModelConfig, MoEConfig

GOOD = 10.0  # percent: the tolerated error of a rule of thumb
CONTEXTS = (128, 512, 2048, 8192, 32768, 131072)
USUAL = 2048  # tokens: the context at which the three definitions of N are compared
RULES = ("blocks", "blocks_and_head", "all")  # definitions of N; the second is the set of multiplied weights
RULE = "six_nd_error_{}_percent".format


def gpt(width: int, layers: int, vocab_size: int = 50257) -> ModelConfig:
    """The shape that the rule assumes: an FFN of 4d without a gate, MHA, a tied head."""
    heads = width // 64 if width < 4096 else width // 128
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=width, num_layers=layers, num_heads=heads, num_kv_heads=heads,
        head_dim=width // heads, intermediate_size=4 * width, max_len=2048, ffn="gelu_tanh", tie_embeddings=True,
    )  # fmt: skip


def llama3(width: int, layers: int, heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=128256,
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=ffn,
        max_len=8192,
    )


def models() -> dict[str, ModelConfig]:
    """From a laptop-sized model to the largest, all with RoPE, so that any context is possible."""
    deepseek = ModelConfig(
        vocab_size=129280,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        intermediate_size=18432,
        max_len=4096,
        mla=MLAConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(num_experts=256, top_k=8, expert_size=2048, num_shared=1, dense_layers=(0, 1, 2)),
    )
    return {
        "bagu small 6M": preset("cpu_6m"),
        "GPT-2 124M": gpt(768, 12),
        "GPT-2 1.5B": gpt(1600, 48),
        "GPT-3 175B": gpt(12288, 96),
        "TinyLlama 1.1B": preset("llama_1b"),
        "Llama-3 8B": llama3(4096, 32, 32, 14336),
        "Llama-3 70B": llama3(8192, 80, 64, 28672),
        "DeepSeek-V3 671B": deepseek,
    }


def run(setting: Setting) -> list[Row]:
    large = models()
    if setting.quick:
        large = {name: large[name] for name in ("bagu small 6M", "GPT-2 124M", "TinyLlama 1.1B")}
    contexts = (128, 2048, 32768) if setting.quick else CONTEXTS
    small = {
        "GPT of d64 L2": gpt(64, 2, vocab_size=512),
        "Llama of d128 L3": replace(preset("cpu_6m"), hidden_size=128, num_layers=3),
    }
    points = [partial(counted, *model, T) for model, T in product(large.items(), contexts)]
    points += [
        partial(measured, *model, T)
        for model, T in product(small.items(), (64, 256) if setting.quick else (64, 256, 1024))
    ]
    return [point() for point in setting.track(points)]


def counted(name: str, config: ModelConfig, context: int) -> Row:
    """The rules and the count for one model in one context. Errors are in percent of the count."""
    n, cost = count.parameters(config), count.flops(config, context)
    blocks, by_rule = n.attention + n.ffn + n.norm, 12 * config.num_layers * config.hidden_size**2
    six = (6 * (n.active - n.embedding - n.head), count.six_nd(config), 6 * n.total)
    row: Row = {
        "kind": "counted",
        "model": name,
        "width": config.hidden_size,
        "layers": config.num_layers,
        "context_tokens": context,
        "parameters": n.total,
        "block_parameters": blocks,
        "rule_parameters": by_rule,
        "rule_error_of_blocks_percent": off(by_rule, blocks),
        "rule_error_of_total_percent": off(by_rule, n.total),
        "flops_per_token": cost.training,
        "attention_percent": 100 * cost.attention / cost.forward,
    }
    return row | {RULE(rule): off(value, cost.training) for rule, value in zip(RULES, six, strict=True)}


def off(rule: float, truth: float) -> float:
    return 100 * (rule / truth - 1)


def measured(name: str, config: ModelConfig, context: int) -> Row:
    """Run a forward and backward under PyTorch's counter, which counts attention as a full square."""
    model = init_weights(Transformer(replace(config, max_len=context)), seed=0)
    ids = torch.randint(config.vocab_size, (context,), generator=torch.Generator().manual_seed(0))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    mapping = {
        flash: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        flash_backward: lambda dout, q, k, v, *_, **__: sdpa_backward_flop_count(dout, q, k, v),
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        cu_seqlens = torch.tensor([0, context], dtype=torch.int32)
        model.logits(model(ids, torch.arange(context), cu_seqlens, context).hidden).sum().backward()
    found = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for op, flops in found.items() if "attention" in op)
    weights, cost = sum(found.values()) - attention, count.flops(config, context)
    return {
        "kind": "measured",
        "model": name,
        "width": config.hidden_size,
        "layers": config.num_layers,
        "context_tokens": context,
        "counted_weight_flops_per_token": 3 * cost.linear,
        "counter_weight_flops_per_token": weights / context,
        "weight_difference_percent": off(weights / context, 3 * cost.linear),
        "counted_attention_flops_per_token": 3 * cost.attention,
        "counter_attention_flops_per_token": attention / context,
        "attention_ratio": attention / context / (3 * cost.attention),
    }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if both rules are within GOOD percent at every model and context; did not hold if neither ever is."""
    points = [row for row in rows if row["kind"] == "counted"]
    by_model = {str(row["model"]): row for row in points}
    sized = {name: number(row, "rule_error_of_blocks_percent") for name, row in by_model.items()}
    fits = [name for name, error in sized.items() if abs(error) <= GOOD]
    good = {rule: sum(abs(number(row, RULE(rule))) <= GOOD for row in points) for rule in RULES}
    both = len(fits) == len(sized), good["blocks_and_head"] == len(points)
    kind: Kind = "held" if all(both) else "holds only where" if fits or any(good.values()) else "did not hold"
    limits = {name: limit(points, name) for name in by_model}
    reach = sorted(T / number(by_model[name], "width") for name, T in limits.items() if T is not None)
    worst = min(points, key=lambda row: number(row, RULE("blocks_and_head")))
    odd = max(sized, key=lambda name: abs(sized[name]))
    checked = [row for row in rows if row["kind"] == "measured"]
    differ = max(abs(number(row, "weight_difference_percent")) for row in checked)
    square = max(number(row, "attention_ratio") for row in checked)
    upto_en = (
        f"up to a context of {reach[0]:.1f}·d to {reach[-1]:.1f}·d tokens" if reach else "at every context counted"
    )
    upto_zh = f"在上下文不超过 {reach[0]:.1f}·d 至 {reach[-1]:.1f}·d 时" if reach else "在所有上下文长度下"
    lowest, at = number(worst, RULE("blocks_and_head")), f"{worst['context_tokens']:,}"
    return Verdict(
        kind=kind,
        sentence_en=f"12·L·d² is within {GOOD:g} % of the parameters of the blocks in {len(fits)} of {len(sized)} "
        f"models ({odd}: {sized[odd]:+.0f} %). If N is the blocks and the head, 6ND is within {GOOD:g} % of the count "
        f"{upto_en}, and too low beyond ({lowest:+.0f} % for {worst['model']} at {at} tokens). Within {GOOD:g} % "
        f"are {good['blocks_and_head']} of {len(points)} points; {good['blocks']} with the blocks only, "
        f"{good['all']} with all parameters. PyTorch's counter agrees on the weight products to {differ:.1g} %, and "
        f"counts attention {square:.1f} times as high: the full square, and recomputed scores.",
        sentence_zh=f"{len(sized)} 个模型中有 {len(fits)} 个的各层参数与 12·L·d² 相差不超过 {GOOD:g} %"
        f"（{odd}：{sized[odd]:+.0f} %）。N 取各层加输出头时，6ND {upto_zh}误差不超过 {GOOD:g} %，再长则偏低"
        f"（{worst['model']} 在 {at} 个 token 时为 {lowest:+.0f} %）。{len(points)} 个测点中误差不超过 {GOOD:g} % 的有 "
        f"{good['blocks_and_head']} 个；N 只取各层时 {good['blocks']} 个，取全部参数时 {good['all']} 个。PyTorch 的"
        f"计数器对权重乘法的结果相差不到 {differ:.1g} %，对注意力则为 {square:.1f} 倍："
        "它按整个方阵计，并计入重算的分数。",
    )


def limit(points: Sequence[Row], model: str) -> float | None:
    """The context at which 6ND becomes GOOD percent too low; None if it does not in these rows.

    The count is linear in the context, so values between two contexts are interpolated.
    """
    line = [
        (number(row, "context_tokens"), 1 / (1 + number(row, RULE("blocks_and_head")) / 100))
        for row in points
        if row["model"] == model
    ]
    bound = 1 / (1 - GOOD / 100)
    for (T0, r0), (T1, r1) in pairwise(line):
        if r0 <= bound < r1:
            return T0 + (T1 - T0) * (bound - r0) / (r1 - r0)
    return None


def plot(rows: Sequence[Row]) -> list[Panel]:
    points, good = where(rows, kind="counted"), Rule(-GOOD, upto=GOOD, colour=2)
    left: list[Mark] = [good]
    for i, name in enumerate(names_in(points, "model")):
        own, style = where(points, model=name), "o-" if i < len(COLOURS) else "o--"
        x = [number(r, "context_tokens") / number(r, "width") for r in own]
        left.append(Line(x, column(own, RULE("blocks_and_head")), name, style, i))
    usual = where(points, context_tokens=USUAL)
    meanings = {RULE(rule): rule.replace("_", " ") for rule in RULES}
    sizes = {"rule_error_of_blocks_percent": "of the blocks", "rule_error_of_total_percent": "of all parameters"}
    return [
        Panel(left, "6ND (blocks and head)", "context, in widths d", "error, %", "log", width=1.5),
        dots(usual, meanings, f"6ND at {USUAL:,} tokens, N =", names_in(usual, "model")),
        dots(usual, sizes, "12·L·d²", [""] * len(usual)),
    ]


def dots(rows: Sequence[Row], keys: dict[str, str], title: str, names: Sequence[str]) -> Panel:
    """A row of dots per model; a value outside the axes is printed at the border."""
    most = 40.0
    marks: list[Mark] = [Rule(-GOOD, axis="x", upto=GOOD, colour=2)]
    for i, (key, label) in enumerate(keys.items()):
        errors = column(rows, key)
        marks.append(Line([max(-most, min(most, e)) for e in errors], range(len(errors)), label, "os^"[i], i))
        for y, error in enumerate(errors):
            if abs(error) > most:
                at, shift = (most, (-6, 0)) if error > 0 else (-most, (6, 0))
                marks.append(Note(at, y, f"{error:+,.0f} %", i, shift, "right" if error > 0 else "left"))
    return Panel(marks, title, "error, %", xlim=(-1.1 * most, 1.1 * most), ynames=names, legend="below")


LAB = Claim(
    title_en="Parameter and FLOP rules",
    title_zh="参数量与计算量的经验公式",
    claim_en="L layers of width d have N = 12·L·d² parameters, and training costs 6N FLOPs per token.",
    claim_zh="宽度为 d 的 L 层模型有 N = 12·L·d² 个参数，训练每个 token 需要 6N 次浮点运算。",
    regime="Decoders from 6M to 671B parameters with causal attention over documents as long as the context; FLOPs of "
    "products with weights, keys and values; the backward is twice the forward; no recomputation.",
    varies="Model (GPT, Llama, a mixture of experts), context (128 to 131,072 tokens), definition of N: the blocks, "
    "blocks and head, or all parameters.",
    measures=f"Error of both rules relative to bagu.nn.count, and where it exceeds {GOOD:g} %; the count against "
    "PyTorch's FLOP counter over a real forward and backward, for two small models.",
)
