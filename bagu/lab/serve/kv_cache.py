"""KV cache: the cost of a new token with the keys and values of the past in a cache, and without.

    no cache       a forward over the full sequence for its last row                       Transformer.forward
    cache          a forward over one token, which reads the keys and values of the past   Engine.step
    training       a forward over the full sequence; all of its rows are used              Transformer.forward

Training has every token of the text in advance, so it uses all rows of one forward: nothing is computed twice, and a
cache could save nothing. It would only split one product of L rows into L products of one row.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel, Rule
from bagu.nn import Transformer, init_weights
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.kv.paged import block_bytes
from bagu.serve.request import Request, Sampling

MODEL = tiny(2048, 256, layers=4, heads=4, kv_heads=2, ffn=704, max_len=4096 + 256)
ROUNDS = 3  # interleaved; the best is used, because other load on the machine can only make a run slower
FLAT = 0.25  # a time within this fraction of the one at the shortest context counts as independent of the length


def run(setting: Setting) -> Iterator[Row]:
    lengths = (64, 256, 512) if setting.quick else (32, 128, 512, 1024, 2048, 4096)
    steps, rounds = (8, 1) if setting.quick else (24, ROUNDS)
    model = init_weights(Transformer(MODEL, device=setting.device), 0).eval()
    for length in setting.track(lengths):
        ids = torch.randint(MODEL.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
        cached, last, all_rows = [], [], []
        for _ in range(rounds):
            cached.append(decode_s(model, ids, steps))
            last.append(forward_s(model, ids, every=False))
            all_rows.append(forward_s(model, ids, every=True))
        yield {
            "length_tokens": length,
            "no_cache_ms": min(last) * 1e3,
            "cache_ms": min(cached) * 1e3,
            "training_ms_per_token": min(all_rows) * 1e3 / length,
            "cache_bytes": length * block_bytes(MODEL, 1, model.embedding.weight.dtype),
        }


def decode_s(model: Transformer, ids: torch.Tensor, steps: int) -> float:
    """The median step of the engine when it generates one token at a time after `ids`."""
    config = EngineConfig(
        num_blocks=-(-(len(ids) + steps) // 16) + 1, max_num_seqs=1, max_num_batched_tokens=len(ids), prefix_cache=False
    )
    engine = Engine(model, None, config)
    sampling = Sampling(max_tokens=steps, temperature=0.0)
    engine.submit(Request(id="one", prompt=tuple(ids.tolist()), sampling=sampling))
    engine.step()  # the prompt
    times = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()  # returns when the token is on the host: nothing is pending
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@torch.inference_mode()
def forward_s(model: Transformer, ids: torch.Tensor, *, every: bool) -> float:
    """The faster of two forwards over all tokens, including the choice of the next token (or of every next token)."""
    device, L = model.embedding.weight.device, len(ids)
    ids, positions = ids.to(device), torch.arange(L, device=device)
    cu_seqlens = torch.tensor([0, L], dtype=torch.int32, device=device)
    times = []
    for _ in range(2):
        began = time.perf_counter()
        hidden = model(ids, positions, cu_seqlens, L).hidden
        model.logits(hidden if every else hidden[-1:]).argmax(-1).tolist()
        times.append(time.perf_counter() - began)
    return min(times)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the cached step takes the same time at every length, is faster than the forward without a cache, and
    slower than training's forward, per token. Did not hold if one of the last two fails everywhere."""
    first = number(rows[0], "cache_ms")
    flat = [row for row in rows if number(row, "cache_ms") <= (1 + FLAT) * first]
    pays = [row for row in rows if number(row, "cache_ms") < number(row, "no_cache_ms")]
    idle = [row for row in rows if number(row, "training_ms_per_token") < number(row, "cache_ms")]
    good = [row for row in flat if row in pays and row in idle]
    kind: Kind = "held" if len(good) == len(rows) else "holds only where" if good else "did not hold"
    last = rows[-1]
    low, high = (f"{number(row, 'length_tokens'):,.0f}" for row in (rows[0], last))
    grows = number(last, "cache_ms") / first
    gain = [number(row, "no_cache_ms") / number(row, "cache_ms") for row in (rows[0], last)]
    parallel = [number(row, "cache_ms") / number(row, "training_ms_per_token") for row in (rows[0], last)]
    mib = number(last, "cache_bytes") / (1 << 20)
    where = ", ".join(f"{number(row, 'length_tokens'):,.0f}" for row in good) or "no length"
    return Verdict(
        kind=kind,
        sentence_en=f"From {low} to {high} tokens a cached step grows ×{grows:.2f} (it reads {mib:.1f} MiB at the "
        f"end), and is ×{gain[0]:.1f} to ×{gain[1]:.0f} faster than recomputing the past. A token of training's "
        f"forward is ×{parallel[0]:.0f} to ×{parallel[1]:.0f} cheaper than a cached step. All parts of the claim are "
        f"met at: {where}.",
        sentence_zh=f"长度从 {low} 到 {high}，带缓存的一步变为 ×{grows:.2f}（最后要读 {mib:.1f} MiB），"
        f"比重算历史快 ×{gain[0]:.1f} 到 ×{gain[1]:.0f}。训练的一次前向平均到每个 token 比带缓存的一步便宜 "
        f"×{parallel[0]:.0f} 到 ×{parallel[1]:.0f}。说法全部成立的长度：{where}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Times by length, and the speedup."""
    names = {"no cache": "no_cache_ms", "cache": "cache_ms", "training, per token": "training_ms_per_token"}
    times = [Line.of(rows, "length_tokens", key, name) for name, key in names.items()]
    new, known = "no cache, for a new token", "one forward, for a known text"
    gains = [
        Line.of(rows, "length_tokens", partial(over_cache, key), f"cache relative to {name}", colour=i)
        for i, key, name in ((0, "no_cache_ms", new), (2, "training_ms_per_token", known))
    ]
    even, y = Rule(1, style="--", colour=1), "speedup of the cached step, ×"
    return [
        Panel(times, "One more token", "earlier tokens", "time per token, ms", "log2", "log"),
        Panel([*gains, even], "Speedup of the cache", "earlier tokens", y, "log2", "log"),
    ]


def over_cache(key: str, row: Row) -> float:
    return number(row, key) / number(row, "cache_ms")


LAB = Claim(
    title_en="KV cache",
    title_zh="KV 缓存",
    claim_en="With a KV cache the time of a new token does not depend on the length; training does not use one because "
    "it would gain nothing.",
    claim_zh="有了 KV 缓存，生成一个 token 的时间与长度无关；训练不用它，因为没有好处。",
    regime="One sequence, a Llama of 4 layers and 256 features (GQA, 2 KV heads of 64), greedy. The cached step is "
    "the engine's, including planning and sampling. Training's forward is timed without its backward, which needs the "
    "activations of all positions and would need them from a cache too.",
    varies="Number of earlier tokens; with a cache, without, and as one forward over a known text.",
    measures="Best of three medians. The time counts as independent of the length if a cached step is within "
    f"{FLAT:.0%} of the one at the shortest length.",
    evidence="timing",
)
