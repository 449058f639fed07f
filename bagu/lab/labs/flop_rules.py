"""Parameter and FLOP rules: 12·L·d² and 6ND against what `bagu.nn.count` counts.

    parameters of a block     4d² (q, k, v, out) + 8d² (an FFN of 4d, no gate)                 →  N = 12·L·d²
    training FLOPs a token    2 of the forward and 4 of the backward for each weight            →  6N
    left out of 6N            6·L·d·T of attention in a context of T, causal; a share T / 12d of 72·L·d²

Which N is meant differs by author: the blocks' (Kaplan), with the head, or all parameters, where an embedding that is
looked up and an expert that is not visited cost no FLOP. The count itself is checked against PyTorch's FLOP counter on
models small enough to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from bagu.lab.core import Kind, Lab, Row, Setting, Verdict, number
from bagu.lab.plot import COLOURS, INK, log_ticks
from bagu.nn import count
from bagu.nn.config import MLAConfig, ModelConfig, MoEConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.train.bench import SHAPES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GOOD = 10.0  # percent: what a rule of thumb may be off by
CONTEXTS = (128, 512, 2048, 8192, 32768, 131072)
USUAL = 2048  # tokens: where the three meanings of N are compared
RULES = {"blocks": "only blocks", "blocks and head": "blocks and head", "all": "all parameters"}


def gpt(width: int, layers: int, vocab_size: int = 50257) -> ModelConfig:
    """The shape the rule was made for: an FFN of 4d without a gate, a key head for each head, a tied head."""
    heads = width // 64 if width < 4096 else width // 128
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=width, num_layers=layers, num_heads=heads, num_kv_heads=heads,
        head_dim=width // heads, intermediate_size=4 * width, max_len=2048, ffn="gelu_tanh", tie_embeddings=True,
    )  # fmt: skip


def llama3(width: int, layers: int, heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=128256, hidden_size=width, num_layers=layers, num_heads=heads, num_kv_heads=8, head_dim=128,
        intermediate_size=ffn, max_len=8192,
    )  # fmt: skip


def models() -> dict[str, ModelConfig]:
    """From a laptop's to the largest, all with RoPE, so that the context has no end."""
    deepseek = ModelConfig(
        vocab_size=129280, hidden_size=7168, num_layers=61, num_heads=128, num_kv_heads=128, head_dim=192,
        intermediate_size=18432, max_len=4096,
        mla=MLAConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(num_experts=256, top_k=8, expert_size=2048, num_shared=1, dense_layers=(0, 1, 2)),
    )  # fmt: skip
    return {
        "bagu small 6M": SHAPES["cpu_6m"].model,
        "GPT-2 124M": gpt(768, 12),
        "GPT-2 1.5B": gpt(1600, 48),
        "GPT-3 175B": gpt(12288, 96),
        "TinyLlama 1.1B": SHAPES["llama_1b"].model,
        "Llama-3 8B": llama3(4096, 32, 32, 14336),
        "Llama-3 70B": llama3(8192, 80, 64, 28672),
        "DeepSeek-V3 671B": deepseek,
    }


def run(setting: Setting) -> list[Row]:
    chosen = models()
    contexts = CONTEXTS
    if setting.quick:
        chosen = {n: c for n, c in chosen.items() if n in ("bagu small 6M", "GPT-2 124M", "TinyLlama 1.1B")}
        contexts = (128, 2048, 32768)
    small = {"gpt d64 L2": gpt(64, 2, 512), "llama d128 L3": replace(SHAPES["cpu_6m"].model, hidden_size=128, num_layers=3)}
    points: list[tuple[str, ModelConfig, int, bool]] = [(n, c, T, False) for (n, c), T in product(chosen.items(), contexts)]
    points += [(n, c, T, True) for (n, c), T in product(small.items(), (64, 256) if setting.quick else (64, 256, 1024))]
    return [
        measured(name, config, T) if small_one else counted(name, config, T)
        for name, config, T, small_one in setting.track(points)
    ]


def counted(name: str, config: ModelConfig, context: int) -> Row:
    """The rules beside the count, for one model in one context. Errors are the rule's, in percent of the count."""
    n, cost = count.parameters(config), count.flops(config, context)
    blocks, by_rule = n.attention + n.ffn + n.norm, 12 * config.num_layers * config.hidden_size**2
    six = {"blocks": 6 * (n.active - n.embedding - n.head), "blocks and head": count.six_nd(config), "all": 6 * n.total}
    return {
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
    } | {f"six_nd_error_{key.replace(' ', '_')}_percent": off(value, cost.training) for key, value in six.items()}


def off(rule: float, truth: float) -> float:
    return 100 * (rule / truth - 1)


def measured(name: str, config: ModelConfig, context: int) -> Row:
    """A forward and backward that runs, under PyTorch's counter. It takes attention for a full square."""
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
