"""The cost of invariance, on a GPU or a CPU: which ops change their bits in fast mode, and what the promise costs.

    ops       the first rows of a result alone and among many rows, in both modes
    engine    the logprobs of tokens that were decoded in a batch, beside those of one prefill of each text alone

In fast mode a kernel chooses tiles and splits by the number of rows, and another order of a sum rounds differently. In
invariant mode (bagu.ops.invariant, docs/decisions/016) the order follows from the row and the weight alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, names_in, number, where
from bagu.lab.parts.decoding import decode_step_s
from bagu.lab.parts.interleaved import best_times
from bagu.lab.plot import Line, Mark, Panel, Rule
from bagu.machine.fast_dtype import compute_dtype
from bagu.nn import ModelConfig, Transformer, init_weights, preset
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Sampling

MODES = ("fast", "invariant")
LIMIT = 1.3  # times the fast mode's decode step
ENGINE = "engine"
SEGMENT, DOCUMENTS = 48, 256  # the attention op: tokens of a document, which is its row, and the most of them
Op = Callable[[int], torch.Tensor]  # the result for the first n of the same rows


def mode(name: str) -> AbstractContextManager[None]:
    return ops.invariant() if name == "invariant" else nullcontext()


def run(setting: Setting) -> Iterator[Row]:
    on_gpu, quick = setting.device != "cpu", setting.quick
    tiny = replace(preset("cpu_8m"), num_layers=2, vocab_size=512)
    config = tiny if quick else preset("qwen3_0_6b") if on_gpu else preset("cpu_8m")
    counts = (1, 64) if quick else (1, 16, 256, 4096) if on_gpu else (1, 7, 64, 512)
    batches = (2,) if quick else (1, 32, 256) if on_gpu else (1, 32)
    device = torch.device(setting.device)
    for name, op in setting.track(list(operations(config, max(counts), device).items())):
        fitting = [n for n in counts if n <= DOCUMENTS] if name == "attention" else counts
        yield from op_rows(name, op, fitting, setting)
    model = init_weights(Transformer(config, device=device, dtype=compute_dtype(device)), 0).eval()
    for batch in setting.track(batches):
        yield from engine_rows(model, batch, setting)


def operations(config: ModelConfig, most: int, device: torch.device) -> dict[str, Op]:
    """The ops of a layer and the head at the sizes of the model, each a function of the number of rows."""
    generator = torch.Generator().manual_seed(0)
    dtype = compute_dtype(device)
    D, F, H, G, d = (
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, wide, gain = draw(most, D), draw(most, F), draw(D)
    qkv, down, head = draw((H + 2 * G) * d, D), draw(D, F), draw(config.vocab_size, D)
    targets = torch.randint(config.vocab_size, (most,), generator=generator).to(device)
    documents = min(most, DOCUMENTS)
    q, k, v = (draw(documents * SEGMENT, heads, d) for heads in (H, G, G))
    offsets = (torch.arange(documents + 1, dtype=torch.int32) * SEGMENT).to(device)

    def attend(n: int) -> torch.Tensor:
        tokens = n * SEGMENT
        out, _ = ops.attention(q[:tokens], k[:tokens], v[:tokens], offsets[: n + 1], SEGMENT)
        return out.reshape(n, -1)

    return {
        "rms_norm": lambda n: ops.rms_norm(x[:n], gain),
        "qkv product": lambda n: ops.matmul(x[:n], qkv),
        "down product": lambda n: ops.matmul(wide[:n], down),
        "attention": attend,
        "logprobs": lambda n: ops.token_losses(*ops.linear_cross_entropy(x[:n], head, targets[:n])).logprobs,
    }


@torch.no_grad()
def op_rows(name: str, op: Op, counts: Sequence[int], setting: Setting) -> list[Row]:
    """For each mode and number of rows: the share of changed values, and the time."""

    def timed(of: str, n: int) -> Callable[[], object]:
        def call() -> object:
            with mode(of):
                return op(n)

        return call

    rows: list[Row] = []
    whole = {of: timed(of, max(counts))() for of in MODES}
    for n in counts:
        calls = {of: timed(of, n) for of in MODES}
        times = best_times(
            calls, setting.device, seconds=0.01 if setting.quick else 0.1, rounds=1 if setting.quick else 3
        )
        for of in MODES:
            alone, among = calls[of](), whole[of]
            assert isinstance(alone, torch.Tensor) and isinstance(among, torch.Tensor)
            changed = (alone != among[: len(alone)]).double().mean()
            rows.append(
                {
                    "part": name,
                    "mode": of,
                    "rows": n,
                    "changed_percent": 100 * float(changed),
                    "time_us": 1e6 * times[of],
                }
            )
    return rows


def engine_rows(model: Transformer, batch: int, setting: Setting) -> list[Row]:
    context, steps = (16, 3) if setting.quick else (256, 16)
    times = dict.fromkeys(MODES, float("inf"))
    for _ in range(1 if setting.quick else 3):  # in turn; other load only makes a step slower
        for of in MODES:
            took = decode_step_s(model, batch=batch, context=context, steps=steps, invariant=of == "invariant")
            times[of] = min(times[of], took)
    return [
        {
            "part": ENGINE,
            "mode": of,
            "rows": batch,
            "changed_percent": decoded_changes(model, batch, of, tokens=4 if setting.quick else 32),
            "time_us": 1e6 * times[of],
        }
        for of in MODES
    ]


def decoded_changes(model: Transformer, batch: int, of: str, tokens: int) -> float:
    """The percentage of generated tokens whose logprob has other bits when the text is scored in one prefill, alone."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 40, (batch,), generator=generator).tolist()
    prompts = [torch.randint(model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    config = EngineConfig(
        max_num_seqs=max(batch, 2), num_blocks=8 * max(batch, 2), prefix_cache=False, invariant=of == "invariant"
    )
    engine = Engine(model, None, config)
    asked = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    changed = total = 0
    watched = list(zip(prompts, engine.generate(prompts, asked), strict=True))[:16]
    for prompt, answer in watched:
        assert answer.logprobs is not None
        (alone,) = engine.score([[*prompt, *answer.tokens]], [len(prompt)])
        changed += sum(a != b for a, b in zip(alone, answer.logprobs, strict=True))
        total += len(alone)
    return 100 * changed / total


def cost(rows: Sequence[Row], part: str) -> dict[float, float]:
    """The invariant mode's time over the fast mode's, by the number of rows."""
    times = {(r["mode"], number(r, "rows")): number(r, "time_us") for r in rows if r["part"] == part}
    return {n: times["invariant", n] / times["fast", n] for of, n in times if of == "fast"}


def changed_parts(rows: Sequence[Row], of: str) -> list[str]:
    return list(dict.fromkeys(str(r["part"]) for r in rows if r["mode"] == of and number(r, "changed_percent") > 0))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if fast mode changes bits, invariant mode none, and a decode step takes at most LIMIT times as long."""
    fast, kept = changed_parts(rows, "fast"), not changed_parts(rows, "invariant")
    engine = cost(rows, ENGINE)
    good = [n for n in engine if engine[n] <= LIMIT]
    needed = bool(fast)
    kind: Kind = "did not hold"
    if needed and kept and good:
        kind = "held" if len(good) == len(engine) else "holds only where"
    most = max(number(r, "changed_percent") for r in rows if r["mode"] == "fast" and r["part"] == ENGINE)
    steps = ", ".join(f"×{c:.2f} at {n:g}" for n, c in engine.items())
    steps_zh = "，".join(f"{n:g} 条序列 ×{c:.2f}" for n, c in engine.items())
    parts = {str(r["part"]) for r in rows} - {ENGINE}
    worst = max(((c, part, n) for part in parts for n, c in cost(rows, part).items()), default=(1.0, "no op", 0.0))
    broken = "no value changes" if kept else f"{', '.join(changed_parts(rows, 'invariant'))} change"
    broken_zh = "没有数值变化" if kept else f"{'、'.join(changed_parts(rows, 'invariant'))} 有变化"
    return Verdict(
        kind=kind,
        sentence_en=f"Fast mode changes {', '.join(fast) or 'nothing'} with the rows (up to {most:.0f} % of the "
        f"decoded logprobs); in invariant mode {broken}. A decode step takes {steps} sequences; the most expensive "
        f"op is {worst[1]} at {worst[2]:g} rows, ×{worst[0]:.1f}.",
        sentence_zh=f"快速模式下随行数变化的有：{'、'.join(fast) or '无'}（解码的 logprob 至多 {most:.0f} % 变化）；"
        f"不变模式下{broken_zh}。解码一步的用时：{steps_zh}；最贵的算子是 {worst[1]}（{worst[2]:g} 行），"
        f"×{worst[0]:.1f}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    changed, times = [], list[Mark]([Rule(1, style="-")])
    for i, part in enumerate(names_in(rows, "part")):
        own, style = where(rows, part=part, mode="fast"), "s--" if part == ENGINE else "o-"
        changed.append(Line.of(own, "rows", "changed_percent", part, style, i))
        slower = cost(rows, part)
        times.append(Line([*slower], [*slower.values()], part, style, i))
    return [
        Panel(changed, "Fast mode, among more rows", "rows, or sequences", "values that change, %", "log"),
        Panel(times, "Time, invariant", "rows, or sequences", "times fast", "log", "log", legend="none"),
    ]


LAB = Claim(
    title_en="The cost of batch invariance",
    title_zh="批不变性的代价",
    claim_en="Fast kernels change a token's bits with its batch, and fixing them costs at most 30 % of a decode step.",
    claim_zh="快速内核的结果会随批次变化；使其不变，至多让解码一步变慢 30 %。",
    regime="Random weights, greedy decoding from contexts of 256 tokens. On a GPU Qwen3-0.6B's shape in bf16; on a CPU "
    "a Llama of 8M parameters in the faster dtype.",
    varies="Mode (fast, invariant); the op or the engine; number of rows, documents or sequences.",
    measures="Values of the first rows that differ from those in the largest batch; logprobs that differ between "
    "decode in a batch and one prefill alone; time of an op and of a decode step, best of three medians in turn.",
    evidence="timing",
)
