"""Paging: how much KV memory holds no token, if a sequence reserves its maximum length and if it allocates pages.

A contiguous cache cannot grow in place, so a sequence reserves all it may need. This equals one page as long as the
maximum length, so one sweep over the page size covers both. The scheduler and the block accounting are the engine's;
the model is left out, because its outputs do not matter here. All requests wait from the start. Averages are over the
steps in which some requests wait, because then memory is the limit.

Both directions have a cost: large pages are partly empty, small ones make tables long and the gather scattered.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import torch

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, names_in, number, where
from bagu.lab.parts.interleaved import best_times
from bagu.lab.plot import INK, Line, Mark, Note, Panel, Rule
from bagu.serve.kv.blocks import Blocks
from bagu.serve.request import Request, Sampling
from bagu.serve.scheduler import Scheduler, SchedulerConfig

LONGEST = 2048  # maximum tokens of prompt and output together
POOL = 16 * LONGEST  # tokens
PAGE = 16  # the engine's page size
RESERVED_WASTE, PAGED_WASTE = 60.0, 4.0  # percent: the claim of the PagedAttention paper
Lengths = list[tuple[int, int]]  # of prompt and output, in tokens


def chat(n: int, stream: np.random.Generator) -> Lengths:
    """Lognormal: medians of 100 and 150 tokens, and a few very long ones."""
    prompt = np.clip(stream.lognormal(np.log(100), 1.0, n), 1, LONGEST // 2).astype(int)
    answer = np.clip(stream.lognormal(np.log(150), 0.8, n), 1, LONGEST // 2).astype(int)
    return list(zip(prompt.tolist(), answer.tolist(), strict=True))


def uniform(n: int, stream: np.random.Generator) -> Lengths:
    prompt, answer = stream.integers(1, LONGEST // 2, size=(2, n), endpoint=True)
    return list(zip(prompt.tolist(), answer.tolist(), strict=True))


def longest(n: int, stream: np.random.Generator) -> Lengths:
    return [(LONGEST // 2, LONGEST // 2)] * n


LOADS: dict[str, Callable[[int, np.random.Generator], Lengths]] = {"chat": chat, "uniform": uniform, "longest": longest}


def drawn(load: str, tokens: int) -> Lengths:
    """Requests of this load, up to this total number of tokens."""
    many = LOADS[load](tokens // 100, np.random.default_rng(0))
    totals = np.cumsum([prompt + answer for prompt, answer in many])
    return many[: int(np.searchsorted(totals, tokens)) + 1]


def run(setting: Setting) -> Iterator[Row]:
    pools = 2 if setting.quick else 12  # the tokens of a load, as a multiple of the pool
    pages = (PAGE, 256, LONGEST) if setting.quick else (1, 4, PAGE, 64, 256, 1024, LONGEST)
    gathers = {page: gather(page, setting.device) for page in pages}
    calls = {str(page): call for page, call in gathers.items()}
    times = best_times(calls, setting.device, seconds=0.05 if setting.quick else 0.5)
    for load, page in setting.track(list(product(LOADS, pages))):
        lengths = drawn(load, pools * POOL)
        row: Row = {"load": load, "page_tokens": page, "requests": len(lengths), "pool_tokens": POOL}
        yield row | serve(lengths, page) | {"gather_us": times[str(page)] * 1e6}


def serve(lengths: Lengths, page: int) -> Row:
    """Run all requests from one pool; no two share a page. Percentages and means are over the steps in which requests
    wait."""
    blocks = Blocks(POOL // page, page, prefix_cache=True)
    config = SchedulerConfig(max_model_len=LONGEST, max_num_seqs=1024, max_num_batched_tokens=4096)
    scheduler = Scheduler(config, blocks)
    for i, (prompt, answer) in enumerate(lengths):
        scheduler.queues.add(Request(id=str(i), prompt=(i,) * prompt, sampling=Sampling(max_tokens=answer)))
    held, reserved, running, computed, steps = [], [], [], 0, 0
    while scheduler.queues.has_work:
        plan = scheduler.plan()
        assert plan is not None, "requests are left, but there is nothing to run"
        if scheduler.queues.waiting:  # measured before the commit, which frees finished sequences
            held.append(sum(s.planned for s in scheduler.queues.running))
            reserved.append(blocks.used_count * page)
            running.append(len(scheduler.queues.running))
        scheduler.commit(plan, [0] * len(plan.sampled))
        computed, steps = computed + plan.num_tokens, steps + 1
    needed = sum(prompt + answer - 1 for prompt, answer in lengths)  # the last token is not an input
    return {
        "waste_percent": 100 * (1 - sum(held) / sum(reserved)),
        "unreserved_percent": 100 * (1 - sum(reserved) / (POOL * len(reserved))),
        "running_sequences": sum(running) / len(running),
        "steps": steps,
        "preemptions": scheduler.queues.preemptions,
        "recomputed_percent": 100 * (computed / needed - 1),
    }


def gather(page: int, device: str) -> Callable[[], object]:
    """Attention of one new token in each of 16 sequences of 1,024, with pages scattered over the pool."""
    S, context, H, G, D = 16, 1024, 8, 2, 64
    N, P = POOL // page, -(-context // page)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, N, page, G, D, generator=generator).to(device).unbind()
    q = torch.randn(S, H, D, generator=generator).to(device)
    tables = torch.randperm(N, generator=generator)[: S * P].view(S, P).to(device, torch.int32)
    cu_seqlens = torch.arange(S + 1, dtype=torch.int32, device=device)
    lens = torch.full((S,), context, dtype=torch.int32, device=device)
    return lambda: ops.paged_attention(q, k, v, tables, cu_seqlens, lens, 1, context)


def at(rows: Sequence[Row], load: str, page: int) -> Row:
    return next(row for row in rows if row["load"] == load and row["page_tokens"] == page)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if for each load the reservation wastes at least as much as claimed, and pages at most."""
    loads = list(dict.fromkeys(str(row["load"]) for row in rows))
    waste = {load: [number(at(rows, load, page), "waste_percent") for page in (LONGEST, PAGE)] for load in loads}
    good = [load for load, (much, little) in waste.items() if much >= RESERVED_WASTE and little < PAGED_WASTE]
    kind: Kind = "held" if len(good) == len(loads) else "holds only where" if good else "did not hold"
    more = {
        load: number(at(rows, load, PAGE), "running_sequences") / number(at(rows, load, LONGEST), "running_sequences")
        for load in loads
    }
    again = max(number(at(rows, load, PAGE), "recomputed_percent") for load in loads)
    each_en = "; ".join(
        f"{load}: {much:.0f} % reserved against {little:.1f} % in pages of {PAGE}, ×{more[load]:.1f} sequences at once"
        for load, (much, little) in waste.items()
    )
    each_zh = "；".join(
        f"{load}：预留浪费 {much:.0f} %，{PAGE} token 一页浪费 {little:.1f} %，并发 ×{more[load]:.1f}"
        for load, (much, little) in waste.items()
    )
    return Verdict(
        kind=kind,
        sentence_en=f"Waste of the allocated memory: {each_en}. As claimed for: {', '.join(good) or 'none'}. Without a "
        f"reservation memory can run out: preemption recomputed up to {again:.1f} % of the tokens.",
        sentence_zh=f"已分配显存中的浪费：{each_zh}。符合说法的负载：{'、'.join(good) or '无'}。"
        f"不预留就可能不够：抢占使至多 {again:.1f} % 的 token 被重算。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Waste and concurrent sequences over the page size, and the cost of small pages for the gather."""
    waste: list[Mark] = [Rule(RESERVED_WASTE, upto=80), Rule(PAGED_WASTE, style="--")]
    waste += [Note(None, 70, "claimed, reserved"), Note(None, PAGED_WASTE, f"claimed, pages: {PAGED_WASTE:.0f} %")]
    running = []
    for load in names_in(rows, "load"):
        own = where(rows, load=load)
        waste.append(Line.of(own, "page_tokens", "waste_percent", load))
        running.append(Line.of(own, "page_tokens", "running_sequences", load))
    gathers = Line.of(where(rows, load=rows[0]["load"]), "page_tokens", "gather_us", colour=INK)
    x, zero, once = f"page, tokens ({LONGEST:,}: contiguous)", (0, None), f"Concurrent in {POOL:,} tokens"
    title, y = "One token in each of 16 × 1,024", "paged_attention, µs"
    return [
        Panel(waste, "Wasted memory", x, "% of allocated", "log2", ylim=(0, 100), legend="below"),
        Panel(running, once, x, "sequences, mean", "log2", ylim=zero, legend="below"),
        Panel([gathers], title, x, y, "log2", ylim=zero),
    ]


LAB = Claim(
    title_en="Paged KV memory",
    title_zh="分页 KV 显存",
    claim_en="Reserving memory for the longest sequence wastes 60 to 80 % of the KV memory; pages of 16 tokens waste "
    "less than 4 %.",
    claim_zh="按最大长度预留会浪费 60 % 到 80 % 的 KV 显存；每页 16 token 的分页浪费不到 4 %。",
    regime=f"The engine's scheduler and block accounting without a model, a pool of {POOL:,} tokens, sequences of at "
    f"most {LONGEST:,}, all requests waiting from the start. The reservation is for the model's maximum length: an "
    "engine that knew each output length in advance would reserve less.",
    varies="Tokens per page, up to one page per sequence (contiguous); lengths: chat (lognormal), uniform, longest.",
    measures="Fraction of the allocated token slots that hold no token, over the steps in which "
    "requests wait (claimed: 60 % or more reserved, below 4 % in pages); concurrent sequences; recomputed "
    "tokens; time of ops.paged_attention.",
)
