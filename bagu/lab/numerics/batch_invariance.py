"""Batch invariance: does the logprob of a token depend on the other requests in the batch?

In exact arithmetic it does not. A fast kernel chooses the order of its sums by the number of rows, and another order
rounds differently. The engine's invariant mode fixes the order (bagu.ops.invariant), which makes it slower.

Requests run alone, then in a batch, with chunked prefill, and with their prefixes in the cache. The logprobs of their
tokens are compared bit by bit: two floats that differ by u units in the last place differ in bit_length(u) bits.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, names_in, number, where
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Bars, Mark, Note, Panel
from bagu.machine.fast_dtype import compute_dtype
from bagu.nn import Transformer, init_weights
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Sampling
from bagu.types import Completion

MODEL = tiny(1024, 128, layers=4, heads=4, kv_heads=2, ffn=352, max_len=512, init_std=0.1)
MODES = ("fast", "invariant")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPT = (16, 81)  # range of tokens, end excluded
WATCHED = 8  # number of compared requests, or the batch size if it is smaller


class Case(NamedTuple):
    """How requests run: batch size, token budget per step, and whether each prompt runs for the second time."""

    name: str
    batch: int
    budget: int = 8192
    warm: bool = False


def cases(quick: bool) -> list[Case]:
    batches = [Case(f"batch of {n}", n) for n in ((2, 16) if quick else (2, 3, 4, 8, 16, 32, 64))]
    return [*batches, Case("chunks of 7", 1, budget=7), Case("warm prefix", 1, warm=True)]


def run(setting: Setting) -> Iterator[Row]:
    tokens = 6 if setting.quick else 64
    # Without bf16 instructions the products are scalar loops, which would take hours.
    dtypes = list(DTYPES) if compute_dtype(torch.device("cpu")) == torch.bfloat16 else ["fp32"]
    for mode, dtype in setting.track(list(product(MODES, dtypes))):
        model = init_weights(Transformer(MODEL, dtype=DTYPES[dtype]), 0).eval()
        alone, _ = completions(model, Case("alone", 1), mode, tokens)
        for case in cases(setting.quick):
            found, rate = completions(model, case, mode, tokens)
            row: Row = {"mode": mode, "dtype": dtype, "case": case.name, "batch_sequences": case.batch}
            yield row | compare(alone, found) | {"generated_tokens_per_s": rate}


def completions(model: Transformer, case: Case, mode: str, tokens: int) -> tuple[list[Completion], float]:
    """The completions of the first requests, at most WATCHED, and the tokens/s of all. With batch 1 each runs alone."""
    stream = np.random.default_rng(0)
    prompts = [stream.integers(MODEL.vocab_size, size=stream.integers(*PROMPT)).tolist() for _ in range(64)]
    # Random draws depend on the seed only, not on the batch: another token means another probability.
    asks = [Sampling(max_tokens=tokens, temperature=1.0, seed=i, logprobs=0) for i in range(64)]
    config = EngineConfig(
        num_blocks=16 * (WATCHED + case.batch),
        max_num_seqs=case.batch,
        max_num_batched_tokens=case.budget,
        invariant=mode == "invariant",
    )
    engine = Engine(model, None, config)
    groups = [slice(0, case.batch)] if case.batch > 1 else [slice(i, i + 1) for i in range(WATCHED)]
    if case.warm:
        for group in groups:
            engine.generate(prompts[group], asks[group])
    began, found = time.perf_counter(), []
    for group in groups:
        found += engine.generate(prompts[group], asks[group])
    rate = len(found) * tokens / (time.perf_counter() - began)
    assert not case.warm or engine.stats().prefix_hits, "the prefixes are not in the cache"
    return found[:WATCHED], rate


def compare(alone: Sequence[Completion], found: Sequence[Completion]) -> Row:
    """Differing bits of the logprobs, up to the first different token: after it the texts differ, and logprobs cannot
    be compared."""
    pairs: list[tuple[float, float]] = []
    texts = 0
    for a, b in zip(alone, found, strict=False):  # the smaller of the two
        assert a.logprobs is not None and b.logprobs is not None
        same = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), len(a.tokens))
        texts += same < len(a.tokens)
        pairs += zip(a.logprobs[:same], b.logprobs[:same], strict=True)
    bits = [differing_bits(x, y) for x, y in pairs]
    return {
        "requests": min(len(alone), len(found)),
        "other_texts": texts,
        "compared_tokens": len(pairs),
        "changed_percent": 100 * sum(n > 0 for n in bits) / len(pairs) if pairs else None,
        "median_bits": statistics.median(bits) if pairs else None,
        "max_bits": max(bits) if pairs else None,
        "max_difference_nats": max(abs(x - y) for x, y in pairs) if pairs else None,
    }


def differing_bits(a: float, b: float) -> int:
    """The number of lowest bits in which two fp32 numbers of the same sign differ; 0 if they are equal."""
    x, y = (int(np.float32(n).view(np.int32)) for n in (a, b))
    return abs(x - y).bit_length()


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if no case of any mode changes a bit or a token; holds only where, if this is true of one mode."""
    moved = {mode: [row for row in rows if row["mode"] == mode and changed(row)] for mode in MODES}
    clean = [mode for mode, changes in moved.items() if not changes]
    kind: Kind = "held" if len(clean) == len(MODES) else "holds only where" if clean else "did not hold"
    en, zh = [], []
    for mode, changes in moved.items():
        cases_of = sum(row["mode"] == mode for row in rows)
        texts, asked = (
            sum(number(row, key) for row in rows if row["mode"] == mode) for key in ("other_texts", "requests")
        )
        if not changes:
            en.append(f"{mode}: no bit changed in {cases_of} cases")
            zh.append(f"{mode}：{cases_of} 种情形中没有一位变化")
            continue
        parts = [
            f"{dtype} up to {max(number(row, 'max_bits') for row in of):.0f} of 32 bits "
            f"({max(number(row, 'max_difference_nats') for row in of):.1g} nats)"
            for dtype in dict.fromkeys(str(row["dtype"]) for row in changes)
            if (of := [row for row in changes if row["dtype"] == dtype and row["max_bits"] is not None])
        ]
        en.append(
            f"{mode}: changed in {len(changes)} of {cases_of} cases, {', '.join(parts)}, and {texts:.0f} of "
            f"{asked:.0f} texts changed"
        )
        in_zh = "、".join(parts).replace(" up to ", " 至多 ").replace(" of 32 bits", "/32 位")
        zh.append(
            f"{mode}：{cases_of} 种情形中 {len(changes)} 种有变化（{in_zh}），{asked:.0f} 段文本中 {texts:.0f} 段变了"
        )
    price = ", ".join(f"×{cost:.1f} in a batch of {batch}" for batch, cost in slower(rows).items())
    price_zh = "，".join(f"批大小 {batch} 时慢 ×{cost:.1f}" for batch, cost in slower(rows).items())
    return Verdict(
        kind=kind,
        sentence_en=f"{'; '.join(en)}. The invariant engine is slower: {price} (fp32).",
        sentence_zh=f"{'；'.join(zh)}。不变模式的代价（fp32）：{price_zh}。",
    )


def changed(row: Row) -> bool:
    return row["max_bits"] != 0 or row["other_texts"] != 0


def slower(rows: Sequence[Row]) -> dict[int, float]:
    """Tokens/s of the fast mode over those of the invariant mode in fp32, for the smallest and the largest batch."""
    rate = {
        (str(row["mode"]), int(number(row, "batch_sequences"))): number(row, "generated_tokens_per_s")
        for row in rows
        if row["dtype"] == "fp32" and str(row["case"]).startswith("batch")
    }
    batches = sorted({batch for _, batch in rate})
    return {batch: rate["fast", batch] / rate["invariant", batch] for batch in dict.fromkeys((batches[0], batches[-1]))}


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Differing bits per case, and how often they differ."""
    names, dtypes = names_in(rows, "case"), names_in(rows, "dtype")
    bits: list[Mark] = []
    often: list[Mark] = []
    for i, (mode, dtype) in enumerate(product(MODES, dtypes)):
        own = where(rows, mode=mode, dtype=dtype)
        for marks, key in ((bits, "max_bits"), (often, "changed_percent")):
            marks.append(Bars([None if r[key] is None else number(r, key) for r in own], f"{mode}, {dtype}", i))
        width = 0.8 / len(MODES) / len(dtypes)
        for at, r in enumerate(own):
            if r["other_texts"] and r["max_bits"] is not None:
                place = at + width * (i - (len(MODES) * len(dtypes) - 1) / 2)
                bits.append(Note(place, number(r, "max_bits"), str(r["other_texts"]), align="center"))
    title, y = f"Differing bits (above: changed texts of {WATCHED})", "lowest bits of 32, maximum over tokens"
    return [
        Panel(bits, title, y=y, ylim=(0, 32), xnames=names, legend="below"),
        Panel(often, "Logprobs that differ", y="%", ylim=(0, 105), xnames=names, legend="below"),
    ]


LAB = Claim(
    title_en="Batch invariance",
    title_zh="批不变性",
    claim_en="With the same seed a request gets the same tokens and logprobs, independent of the rest of the batch.",
    claim_zh="种子相同，请求得到的 token 和 logprob 就与同批的其他请求无关。",
    regime="The engine on a CPU, a Llama of 4 layers and 128 features with random weights; prompts of 16 to 80 tokens, "
    "temperature 1, a fixed number of threads. On another machine other shapes change other bits.",
    varies="Mode (fast, invariant), dtype (bf16 if the CPU is fast in it), number of requests at once, "
    "chunked prefill, a warm prefix cache.",
    measures="Bits of the fp32 logprobs that differ from the same request alone, up to the first different token; "
    "number of changed texts; tokens/s of the batch, prompts included.",
)
