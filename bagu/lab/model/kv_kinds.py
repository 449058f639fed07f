"""Kinds of KV cache: bytes per token of MHA, GQA, MQA, MLA and int8, and the time a decode step spends on a context.

    MHA, GQA, MQA   keys and values of all 16 heads, of 4, of 1
    MLA             one latent of 4 heads' size and a rotated key of half a head, as in DeepSeek-V2, for all heads
    GQA, int8       GQA's cache in 8 bits with a scale per token and head

The time of a context is the step at the long context minus the step at the short one: the weights are read in both.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, names_in, number
from bagu.lab.parts.decoding import decode_step_s
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Bars, Panel
from bagu.machine.fast_dtype import compute_dtype
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.nn.config import MLAConfig
from bagu.serve.kv.paged import block_bytes

SMALL = tiny(512, 256, heads=16, head_dim=32, ffn=512, max_len=8192)
LARGE = replace(SMALL, hidden_size=2048, num_layers=8, head_dim=128, intermediate_size=5632, max_len=16384)
SHORT = 16
ROUNDS = 3  # interleaved; the best is used, because other load on the machine can only make a step slower
LEAD = 1.1  # a difference counts if one time is this many times the other


def kinds(mha: ModelConfig) -> dict[str, tuple[ModelConfig, Literal["auto", "int8"]]]:
    """The model and the dtype of the cache of each kind."""
    D, gqa = mha.head_dim, replace(mha, num_kv_heads=4)
    mla = MLAConfig(kv_rank=4 * D, nope_dim=D, rope_dim=D // 2, v_dim=D)
    return {
        "MHA": (mha, "auto"),
        "GQA": (gqa, "auto"),
        "MQA": (replace(mha, num_kv_heads=1), "auto"),
        "MLA": (replace(mha, mla=mla, head_dim=D + D // 2), "auto"),
        "GQA, int8": (gqa, "int8"),
    }


def run(setting: Setting) -> list[Row]:
    on_gpu, quick = setting.device != "cpu", setting.quick
    batch, context = (16, 8192) if on_gpu and not quick else (2, 128) if quick else (8, 2048)
    dtype, steps = compute_dtype(torch.device(setting.device)), 3 if quick else 16
    found = kinds(LARGE if on_gpu and not quick else SMALL)
    models = {
        name: init_weights(Transformer(config, device=setting.device, dtype=dtype), 0).eval()
        for name, (config, _) in found.items()
    }
    best: dict[tuple[str, int], float] = {}
    for _ in setting.track(range(1 if quick else ROUNDS)):
        for name, model in models.items():
            for length in (SHORT, context):
                time = decode_step_s(model, batch=batch, context=length, steps=steps, kv_dtype=found[name][1])
                best[name, length] = min(time, best.get((name, length), time))
    return [
        {
            "kind": name,
            "device": setting.device,
            "batch_sequences": batch,
            "context_tokens": context,
            "kv_bytes_per_token": token_bytes(config, dtype, kv_dtype),
            "short_step_ms": best[name, SHORT] * 1e3,
            "long_step_ms": best[name, context] * 1e3,
            "tokens_per_s": batch / best[name, context],
        }
        for name, (config, kv_dtype) in found.items()
    ]


def token_bytes(config: ModelConfig, dtype: torch.dtype, kv_dtype: Literal["auto", "int8"]) -> int:
    """Bytes of one token in the engine's pool, over all layers."""
    return block_bytes(config, 1, dtype if kv_dtype == "auto" else torch.int8)


def context_ms(row: Row) -> float:
    """The part of a long step that the context adds."""
    return max(number(row, "long_step_ms") - number(row, "short_step_ms"), 0.0)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if no kind has a smaller cache than another and yet a longer time for the context."""
    pairs = [(a, b) for a in rows for b in rows if number(a, "kv_bytes_per_token") < number(b, "kv_bytes_per_token")]
    wrong = [(a, b) for a, b in pairs if context_ms(a) > LEAD * context_ms(b)]
    kind: Kind = "held" if not wrong else "holds only where" if len(wrong) < len(pairs) else "did not hold"
    first = rows[0]
    en, zh = [], []
    for row in rows:
        share = number(row, "kv_bytes_per_token") / number(first, "kv_bytes_per_token")
        en.append(
            f"{row['kind']} {number(row, 'kv_bytes_per_token'):,.0f} B ({share:.0%}), {context_ms(row):.2f} ms, "
            f"{number(row, 'tokens_per_s'):,.0f} tokens/s"
        )
        zh.append(
            f"{row['kind']} {number(row, 'kv_bytes_per_token'):,.0f} 字节（{share:.0%}），{context_ms(row):.2f} ms，"
            f"每秒 {number(row, 'tokens_per_s'):,.0f} 个 token"
        )
    slow = sorted({str(a["kind"]) for a, _ in wrong})
    at = f"{number(first, 'batch_sequences'):.0f} × {number(first, 'context_tokens'):,.0f}"
    return Verdict(
        kind=kind,
        sentence_en=f"{at} tokens on {first['device']}; bytes per token, time of the context in a step, speed: "
        f"{'; '.join(en)}. Slower than a kind with a larger cache: {', '.join(slow) or 'none'}.",
        sentence_zh=f"{first['device']} 上 {at} 个 token；每个 token 的字节、一步中上下文所占的时间、速度："
        f"{'；'.join(zh)}。比缓存更大的种类还慢的：{'、'.join(slow) or '无'}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    at = f"{number(rows[0], 'batch_sequences'):.0f} sequences of {number(rows[0], 'context_tokens'):,.0f} tokens"
    size = Bars(column(rows, "kv_bytes_per_token"), colour="each", text="{:,.0f}", sideways=True)
    time = Bars([context_ms(row) for row in rows], colour="each", text="{:,.3g}", sideways=True)
    names = names_in(rows, "kind")
    return [
        Panel([size], "Size", "KV cache, bytes per token", ynames=names),
        Panel([time], f"Time, {at}", "time of the context in a decode step, ms", ynames=names),
    ]


LAB = Claim(
    title_en="Kinds of KV cache",
    title_zh="KV 缓存的种类",
    claim_en="A KV cache with fewer bytes per token makes decoding faster: the order of the sizes is the order of the "
    "times.",
    claim_zh="每个 token 占的 KV 缓存字节越少，解码越快：大小的次序就是时间的次序。",
    regime="Random weights, 16 heads, the engine's decode step with greedy sampling. On a CPU 2 layers of 256 features "
    "and 8 sequences of 2,048 tokens; on a GPU 8 layers of 2,048 features and 16 sequences of 8,192.",
    varies="The kind of KV cache: MHA, GQA (4 key heads), MQA, MLA (a latent of 4 heads' size and half a head), and "
    "GQA in int8.",
    measures="Bytes per token of the engine's pool; the time of a step at the long context minus that at "
    f"{SHORT} tokens, best of three medians. A time counts as longer from ×{LEAD:g}.",
    evidence="timing",
)
