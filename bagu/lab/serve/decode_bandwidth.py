"""Decode is bandwidth: tokens/s and GB/s of decode steps by batch and context, against the roofline of the machine.

    bytes of a step    the weights once, and the keys and values of every sequence
    FLOPs of a step    two for each weight and sequence, and four for each pair of query feature and key
    roofline           a step takes at least bytes / read bandwidth and FLOPs / matmul rate, both measured in this run

The fraction of the roofline is the longer of the two over the measured time. With one sequence a step reads every
weight for two FLOPs; more sequences share that read, so tokens/s grow with the batch until contexts dominate the bytes
or products the time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, numbers_in, where
from bagu.lab.parts.decoding import decode_step_s
from bagu.lab.plot import INK, Line, Panel
from bagu.machine.ceilings import measure_ceilings
from bagu.machine.fast_dtype import compute_dtype
from bagu.nn import ModelConfig, Transformer, count, init_weights

SMALL = ModelConfig(  # 17 M weights, 67 MB in fp32: more than most caches hold
    vocab_size=2048,
    hidden_size=512,
    num_layers=5,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1536,
    max_len=4096 + 64,
)
TINY = replace(SMALL, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256)
LARGE = ModelConfig(  # the sizes of Qwen3-0.6B
    vocab_size=151936, hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128,
    intermediate_size=3072, max_len=16384, tie_embeddings=True, qk_norm=True,
)  # fmt: skip
POSSIBLE = 1.1  # times the roofline: a step that is faster did not read its bytes from memory, or the ceiling is wrong
ENOUGH = 0.5  # a step at this fraction of the roofline counts as bound by it


def run(setting: Setting) -> Iterator[Row]:
    on_gpu = setting.device != "cpu"
    batches, contexts = ((1, 4), (16, 64)) if setting.quick else ((1, 4, 16), (64, 512, 2048))
    if on_gpu and not setting.quick:
        batches, contexts = (1, 8, 64), (128, 512, 2048)  # 15 GB of keys and values at most
    dtype = compute_dtype(torch.device(setting.device))
    config = TINY if setting.quick else LARGE if on_gpu else SMALL
    ceilings = measure_ceilings(setting.device, dtype=dtype, quick=True)
    model = init_weights(Transformer(config, device=setting.device, dtype=dtype), 0).eval()
    for batch, context in setting.track(list(product(batches, contexts))):
        step_s = decode_step_s(model, batch=batch, context=context, steps=3 if setting.quick else 16)
        yield {
            "device": setting.device,
            "batch_sequences": batch,
            "context_tokens": context,
            "step_ms": step_s * 1e3,
            "tokens_per_s": batch / step_s,
            "read_bytes": read_bytes(config, batch, context, dtype.itemsize),
            "flops": flops(config, batch, context),
            "read_ceiling_bytes_per_s": ceilings.read,
            "matmul_ceiling_flop_per_s": ceilings.matmul,
        }


def weights(config: ModelConfig) -> int:
    """The weights that a step multiplies: all but the rows of an embedding table that is not the head too."""
    parts = count.parameters(config)
    return parts.active - (0 if config.tie_embeddings else parts.embedding)


def read_bytes(config: ModelConfig, batch: int, context: int, itemsize: int) -> int:
    return weights(config) * itemsize + batch * context * count.kv_bytes(config, itemsize=itemsize)


def flops(config: ModelConfig, batch: int, context: int) -> int:
    pairs = config.num_layers * config.num_heads * context * (config.head_dim + config.v_dim)
    return 2 * batch * (weights(config) + pairs)


def floor_ms(row: Row) -> tuple[float, float]:
    """The least time of a step by its bytes, and by its FLOPs."""
    memory = number(row, "read_bytes") / number(row, "read_ceiling_bytes_per_s")
    return memory * 1e3, number(row, "flops") / number(row, "matmul_ceiling_flop_per_s") * 1e3


def fraction(row: Row) -> float:
    """The fraction of the roofline that a step reaches."""
    return max(floor_ms(row)) / number(row, "step_ms")


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the bytes of every step take longer than its FLOPs, and at least half of its time."""
    bound = [row for row in rows if floor_ms(row)[0] >= floor_ms(row)[1]]
    near = [row for row in bound if fraction(row) >= ENOUGH]
    kind: Kind = "held" if len(near) == len(rows) else "holds only where" if near else "did not hold"
    best = max(rows, key=fraction)
    fastest = max(rows, key=lambda row: number(row, "tokens_per_s"))
    places = [f"{number(r, 'batch_sequences'):.0f} × {number(r, 'context_tokens'):,.0f}" for r in near]
    gbs = number(best, "read_bytes") / number(best, "step_ms") / 1e6
    where = f"{number(best, 'batch_sequences'):.0f} × {number(best, 'context_tokens'):,.0f}"
    top = f"{number(fastest, 'batch_sequences'):.0f} × {number(fastest, 'context_tokens'):,.0f}"
    found = Verdict(
        kind=kind,
        sentence_en=f"On {best['device']} bytes take longer than products in {len(bound)} of {len(rows)} steps. The "
        f"best is {gbs:,.1f} GB/s, {fraction(best):.0%} of the roofline, at {where} tokens; the fastest "
        f"{number(fastest, 'tokens_per_s'):,.0f} tokens/s at {top}. At {ENOUGH:.0%} or more of the read bandwidth: "
        f"{', '.join(places) or 'none'} (sequences × tokens).",
        sentence_zh=f"在 {best['device']} 上，{len(rows)} 种步骤中有 {len(bound)} 种读数据比乘法更久。最好的是 "
        f"{where} 个 token：{gbs:,.1f} GB/s，为屋顶线的 {fraction(best):.0%}；最快的是 {top}：每秒 "
        f"{number(fastest, 'tokens_per_s'):,.0f} 个 token。达到读带宽 {ENOUGH:.0%} 以上的（序列 × token）："
        f"{'、'.join(places) or '无'}。",
    )
    if fraction(best) <= POSSIBLE:
        return found
    return found.undecided(
        "weights that no cache holds (a full run), or a ceiling measured on an idle machine: no step beats memory.",
        "需要任何缓存都放不下的权重（完整运行），或在空闲机器上测得的上限：没有一步能快过内存。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Tokens/s by batch, and GFLOP/s by intensity under the roofline."""
    reach, peak = number(rows[0], "read_ceiling_bytes_per_s"), number(rows[0], "matmul_ceiling_flop_per_s")
    speed, under = [], []
    for context in numbers_in(rows, "context_tokens"):
        own, label = where(rows, context_tokens=context), f"{context:,.0f} tokens"
        speed.append(Line.of(own, "batch_sequences", "tokens_per_s", label))
        under.append(Line.of(own, intensity, lambda r: number(r, "flops") / number(r, "step_ms") / 1e6, label, "o"))
    ends = [min(map(intensity, rows)) / 2, max(*map(intensity, rows), peak / reach) * 2]
    roof = sorted({ends[0], peak / reach, ends[1]})
    under.append(Line(roof, [min(i * reach, peak) / 1e9 for i in roof], "roofline", "-", INK))
    return [
        Panel(speed, "Speed", "sequences", "tokens/s", "log2", "log"),
        Panel(under, "Under the roofline", "FLOPs per byte", "GFLOP/s", "log2", "log"),
    ]


def intensity(row: Row) -> float:
    return number(row, "flops") / number(row, "read_bytes")


LAB = Claim(
    title_en="Decode is bandwidth",
    title_zh="解码就是带宽",
    claim_en="The time of a decode step is the time to read the weights and the KV cache, whatever the batch and the "
    "context.",
    claim_zh="一步解码的时间就是读取权重和 KV 缓存的时间，与批大小和上下文长度无关。",
    regime="Random weights, the engine's decode step with planning and greedy sampling. On a CPU a Llama of 17 M "
    "weights; on a GPU the sizes of Qwen3-0.6B in bf16.",
    varies="Sequences in the batch, and tokens in the context of each.",
    measures="Median time of a step; bytes and FLOPs by formula; read bandwidth and matmul rate measured in the same "
    f"run. A step is bound by reading if that takes longer than its products and at least {ENOUGH:.0%} of its time.",
    evidence="timing",
)
