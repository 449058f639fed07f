"""What limits a context: the time of attention's n² products, the bytes of the cache, or the positions.

time        n (a + c n) FLOPs of a prompt within a stated time; a = products with weights, c n = attention
KV bytes    n · 2 · layers · KV heads · head dim · itemsize, for every stream, in what the weights leave
positions   the longest text of the training
scores      H n² itemsize of one layer: what attention would need if it stored them, which no kernel does
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from bagu.lab.core import Claim, Row, Setting, Text, Verdict, listed, names_in, number, say, share_met
from bagu.lab.model.flop_rules import llama3
from bagu.lab.plot import Bars, Panel
from bagu.nn import ModelConfig, count, preset
from bagu.parallel.planner.cluster import CLUSTERS

PATIENCE = 10  # seconds for the prompt
GPUS = ("4090", "h200")
STREAMS = (1, 32)
LIMITS = {"time": "时间", "KV bytes": "KV 字节", "positions": "位置"}


def models() -> dict[str, ModelConfig]:
    """With the longest text that each was trained for."""
    return {
        "TinyLlama 1.1B": preset("llama_1b"),
        "Qwen3 0.6B": preset("qwen3_0_6b"),
        "Llama 3.1 8B": replace(llama3(4096, 32, 32, 14336), max_len=131_072),
    }


def run(setting: Setting) -> list[Row]:
    context = 1024 if setting.quick else 8192  # at which FLOPs are counted
    return [row(name, gpu, context) for name, gpu in setting.track(list(product(models(), GPUS)))]


def row(name: str, gpu_name: str, context: int) -> Row:
    """The longest context by each limit, in tokens."""
    config, gpu = models()[name], CLUSTERS[gpu_name].gpu
    flops = count.flops(config, context)
    a, c = flops.linear, flops.attention / context
    free = gpu.memory_gib * 2**30 - 2 * count.parameters(config).total
    work = PATIENCE * gpu.matmul_bf16_tflops * 1e12
    kv = free / count.kv_bytes(config)
    return {
        "model": name,
        "gpu": gpu_name,
        "attention_half_tokens": a / c,
        "time_tokens": (math.sqrt(a * a + 4 * c * work) - a) / (2 * c),
        "positions_tokens": config.max_len,
        "scores_tokens": math.sqrt(free / (2 * config.num_heads)),
        **{f"kv_bytes_{n}_tokens": kv / n for n in STREAMS},
    }


def limits(row: Row, streams: int) -> dict[str, float]:
    """The longest context by each of the three limits."""
    keys = {"time": "time_tokens", "KV bytes": f"kv_bytes_{streams}_tokens", "positions": "positions_tokens"}
    return {limit: number(row, key) for limit, key in keys.items()}


def first(row: Row, streams: int) -> str:
    found = limits(row, streams)
    return min(found, key=found.__getitem__)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the time of the prompt is the first limit of every model, GPU and number of streams."""
    cases = [(row, n) for row in rows for n in STREAMS]
    found = {limit: [case for case in cases if first(*case) == limit] for limit in LIMITS}
    told = [
        say(
            "{limit} in {n} (from {least:,.0f} tokens on)",
            "{limit} {n} 种（最短 {least:,.0f} token）",
            n=len(own),
            limit=Text(limit, LIMITS[limit]),
            least=min(limits(*case)[limit] for case in own),
        )
        for limit, own in found.items()
        if own
    ]
    return Verdict.say(
        share_met(first(row, n) == "time" for row, n in cases),
        "With {seconds} s for a prompt the first limit of {cases} combinations of model, GPU and streams is {told}. "
        "Time is first for: {where}. Stored scores, which no kernel needs, would end at {least:,.0f} to {most:,.0f} "
        "tokens.",
        "提示限时 {seconds} 秒，{cases} 种模型、GPU 与并发路数的组合中最先到达的限制：{told}。时间最先的是：{where}。"
        "若存下分数（没有算子需要），只到 {least:,.0f} 至 {most:,.0f} token。",
        seconds=PATIENCE,
        cases=len(cases),
        told=listed(told),
        where=listed([f"{r['model']}, {r['gpu']} × {n}" for r, n in found["time"]] or [Text("none", "无")], "; ", "；"),
        least=min(number(r, "scores_tokens") for r in rows),
        most=max(number(r, "scores_tokens") for r in rows),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    keys = {
        "time of the prompt": "time_tokens",
        "positions": "positions_tokens",
        **{f"KV bytes, {n} stream{'s' * (n > 1)}": f"kv_bytes_{n}_tokens" for n in STREAMS},
        "if scores were stored": "scores_tokens",
    }
    panels = []
    for gpu in names_in(rows, "gpu"):
        own = [row for row in rows if row["gpu"] == gpu]
        bars = [Bars([number(row, key) for row in own], name, bottom=1000.0) for name, key in keys.items()]
        names = [str(row["model"]).rsplit(" ", 1)[0] for row in own]
        panels.append(Panel(bars, gpu, y="longest context, tokens", yscale="log", xnames=names, legend="below"))
    return panels


LAB = Claim(
    title_en="What limits a context",
    title_zh="上下文受什么限制",
    claim_en="The context is limited because attention takes time and memory of O(n²).",
    claim_zh="上下文长度受限，是因为注意力的时间和显存都是 O(n²)。",
    regime="One GPU, bf16 weights and cache, full attention that stores no scores; matrix products at the measured "
    "best rate of the GPU; no other memory than weights and cache.",
    varies=f"Model, GPU ({', '.join(GPUS)}), streams that share the memory ({STREAMS[0]}, {STREAMS[-1]}).",
    measures=f"The longest context by each limit: {PATIENCE} s for the prompt, the memory that the weights leave, the "
    "length of the training. The first of the three decides.",
)
