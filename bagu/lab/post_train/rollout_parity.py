"""Rollout parity: the difference between the logprobs of trainer and inference engine for the same tokens.

    ratio = p_trainer(token) / p_engine(token) = exp(trainer logprob - engine logprob)

The first update of PPO or GRPO assumes that the ratio is 1 and clips it outside 1 ± ε. Both sides have the same
weights, but the engine samples token by token from a KV cache, and the trainer computes packed sequences: sums have
another order, and quantized weights are other numbers. In invariant mode both use the same order.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch

from bagu import ops
from bagu.data.sequences import Tokens, pack
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number
from bagu.lab.parts.library_models import KV_MEMORY, STEP_TOKENS, VOCAB, Library, new_model, read_library, sized, train
from bagu.lab.plot import Bars, Line, Note, Panel, Rule
from bagu.machine.fast_dtype import compute_dtype
from bagu.nn import Transformer
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Sampling
from bagu.train.rl.logprobs import token_logprobs

STEPS, WIDTH = 200, 128
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 64, 32, 128
CLIPS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.2)  # ε; PPO's usual one is the last
CLIP = CLIPS[-1]


class Mode(NamedTuple):
    """How the engine computes: the dtype of the weights on both sides, invariant arithmetic, int8 weights."""

    name: str
    dtype: torch.dtype
    invariant: bool = False
    quantization: Literal["int8"] | None = None


def modes(device: str) -> list[Mode]:
    found = [Mode("fp32, invariant", torch.float32, invariant=True), Mode("fp32", torch.float32)]
    if compute_dtype(torch.device(device)) == torch.bfloat16:  # elsewhere its products are scalar loops
        found.append(Mode("bf16", torch.bfloat16))
    if torch.device(device).type == "cpu":
        found.append(Mode("int8 weights", torch.float32, quantization="int8"))
    return found


def run(setting: Setting) -> list[Row]:
    quick = setting.quick
    library = read_library(quick=quick)
    model = new_model(width=WIDTH, seed=1, device=setting.device)
    steps = 3 if quick else STEPS
    train(model, library.train_tokens, steps=steps, seed=1)
    prompts = beginnings(library, 4 if quick else PROMPTS)
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    rows = []
    for mode in setting.track(modes(setting.device)):
        model.to(torch.float32).load_state_dict(weights)
        difference = logprob_difference(model.to(mode.dtype).eval(), prompts, 8 if quick else ANSWER_TOKENS, mode)
        rows.append(measure(mode.name, difference))
    return sized(rows, model, steps)


def beginnings(library: Library, count: int) -> list[list[int]]:
    """The first tokens of held-out modules."""
    encoded = (library.tokenizer.encode(d.text[:400])[:PROMPT_TOKENS] for d in library.held)
    return [ids for ids in encoded if len(ids) == PROMPT_TOKENS][:count]


@torch.no_grad()
def logprob_difference(model: Transformer, prompts: Sequence[list[int]], tokens: int, mode: Mode) -> torch.Tensor:
    """Trainer minus engine, in nats, for every token that the engine sampled. The trainer packs all answers."""
    config = EngineConfig(
        kv_memory=KV_MEMORY, cuda_graphs=False, invariant=mode.invariant, quantization=mode.quantization
    )
    asked = [Sampling(max_tokens=tokens, temperature=1.0, seed=i, logprobs=0) for i in range(len(prompts))]
    answers = Engine(model, None, config).generate(prompts, asked)
    sequences = [Tokens(ids=(*p, *a.tokens), start=len(p)) for p, a in zip(prompts, answers, strict=True)]
    found = []
    for first in range(0, len(sequences), 8):
        part = sequences[first : first + 8]
        batch = pack(part, tokens=sum(len(s.ids) for s in part), max_segments=len(part))
        with ops.invariant() if mode.invariant else nullcontext():
            logprobs, _ = token_logprobs(model, batch.to(model.embedding.weight.device))
        found.append(logprobs[batch.targets.to(logprobs.device) >= 0].cpu())
    engine = torch.tensor([x for a in answers for x in a.logprobs or ()], dtype=torch.float64)
    return torch.cat(found).double() - engine


def measure(name: str, difference: torch.Tensor) -> Row:
    ratio = difference.exp()
    row: Row = {
        "mode": name,
        "tokens": len(difference),
        "max_nats": float(difference.abs().max()),
        "mean_nats": float(difference.abs().mean()),
        "max_ratio": float(ratio.max()),
    }
    outside = {f"outside_{clip:g}_percent": 100 * float(((ratio - 1).abs() > clip).double().mean()) for clip in CLIPS}
    return row | outside


def clipped(row: Row, clip: float = CLIP) -> float:
    return number(row, f"outside_{clip:g}_percent")


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if no mode has a token outside 1 ± 0.2."""
    good = [row for row in rows if clipped(row) == 0]
    kind: Kind = "held" if len(good) == len(rows) else "holds only where" if good else "did not hold"
    en, zh = [], []
    for row in rows:
        if number(row, "max_nats") == 0:
            en.append(f"{row['mode']}: equal bits for {row['tokens']:,} tokens")
            zh.append(f"{row['mode']}：{row['tokens']:,} 个 token 的每一位都相同")
            continue
        en.append(
            f"{row['mode']}: a difference of at most {number(row, 'max_nats'):.2g} nats, {clipped(row):.2g} % of the "
            f"tokens outside 1 ± {CLIP:g}, {clipped(row, 1e-2):.2g} % outside 1 ± 0.01"
        )
        zh.append(
            f"{row['mode']}：最多相差 {number(row, 'max_nats'):.2g} nats，{clipped(row):.2g} % 的 token 在 "
            f"1 ± {CLIP:g} 之外，{clipped(row, 1e-2):.2g} % 在 1 ± 0.01 之外"
        )
    return Verdict(kind=kind, sentence_en=f"{'. '.join(en)}.", sentence_zh=f"{'。'.join(zh)}。")


def plot(rows: Sequence[Row]) -> list[Panel]:
    floor = 1e-8  # bits that are equal have no place on a logarithmic axis
    largest, outside = [max(number(row, "max_nats"), floor) for row in rows], []
    for i, row in enumerate(rows):
        shares = [(clip, clipped(row, clip)) for clip in CLIPS if clipped(row, clip) > 0]
        if shares:
            outside.append(
                Line([clip for clip, _ in shares], [share for _, share in shares], str(row["mode"]), "o-", i)
            )
    names = [str(row["mode"]).replace(", ", ",\n").replace(" w", "\nw") for row in rows]
    notes = [Note(i, v, "0" if v == floor else f"{v:.1g}", align="center") for i, v in enumerate(largest)]
    bars, clip, epsilon = Bars(largest, colour="each", bottom=floor / 2), Rule(CLIP, axis="x"), "ε (dotted: PPO's 0.2)"
    return [
        Panel([bars, *notes], "Largest difference", y="nats", yscale="log", ylim=(floor / 2, 10), xnames=names),
        Panel([*outside, clip], "Tokens outside 1 ± ε", epsilon, "%", "log", "log"),
    ]


LAB = Claim(
    title_en="Rollout parity",
    title_zh="采样与训练的概率一致性",
    claim_en="Trainer and engine give a sampled token the same probability, so the first update clips nothing.",
    claim_zh="训练器与推理引擎给出的采样概率相同，所以第一次更新不会裁剪任何 token。",
    regime=f"A decoder of width {WIDTH} with 2 layers and a vocabulary of {VOCAB:,}, trained on "
    f"{STEPS * STEP_TOKENS:,} tokens of the standard library; {PROMPTS} prompts of {PROMPT_TOKENS} tokens, answers of "
    f"{ANSWER_TOKENS} tokens, sampled at temperature 1.",
    varies="The arithmetic: invariant, fast, bf16 where it is fast, int8 weights in the engine (CPU).",
    measures="The difference of both logprobs for every sampled token; the share of ratios outside 1 ± ε.",
    evidence="model",
)
