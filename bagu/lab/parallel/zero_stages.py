"""ZeRO: memory and bytes of each stage, measured on four ranks, against the formula. Is stage 3 really 1.5 times?

    data parallel   states 16 Ψ             all-reduce of gradients: 2 Ψ numbers
    stage 1, 2      masters, optimizer      reduce-scatter of gradients, all-gather of parameters: Ψ + Ψ
    stage 3         parameters too          and all-gather again for the backward: Ψ + Ψ + Ψ, 1.5 times

The textbook's count has one number size, one micro-batch, and parameters that are all gathered twice. Here gradients
are fp32, so that in bf16 the parameters count half; the embedding and the head are gathered once, not twice; and stages
2 and 3 repeat their communication for every micro-batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from bagu.data.random_batches import random_batches
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, where
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import INK, Bars, Line, Mark, Panel, Rule
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.parallel.explain import step_bytes
from bagu.parallel.local_ranks import on_ranks
from bagu.parallel.mesh import MeshConfig, open_mesh
from bagu.parallel.zero import model_state_bytes
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step

RANKS, TOKENS = 4, 16
CLAIM, CLOSE = 1.5, 0.05  # a ratio within 5 % of 1.5 agrees with the claim
STAGES = (0, 1, 2, 3)
SMALL = tiny(64, 64, layers=8, heads=4, kv_heads=2, ffn=192, max_len=TOKENS, tie_embeddings=True)


def models(quick: bool) -> dict[str, ModelConfig]:
    """Blocks have 98 % of the parameters, or 60 %."""
    deep = replace(SMALL, num_layers=2) if quick else replace(SMALL, hidden_size=128, intermediate_size=384)
    return {"mostly blocks": deep, "large vocabulary": replace(deep, vocab_size=2048 if quick else 8192)}


def run(setting: Setting) -> list[Row]:
    found = models(setting.quick).items()
    points = [(name, config, dtype, 1) for (name, config), dtype in product(found, ("fp32", "bf16"))]
    if not setting.quick:  # micro-batches of a rank
        points += [(name, config, "fp32", m) for (name, config), m in product(found, (2, 4))]
    rows = on_ranks(RANKS, measured, points)[0]  # all ranks have equal parts
    return [row for each in setting.track(rows) for row in each]


def measured(points: Sequence[tuple[str, ModelConfig, str, int]]) -> list[list[Row]]:
    return [[one(name, config, dtype, m, stage) for stage in STAGES] for name, config, dtype, m in points]


def one(name: str, config: ModelConfig, dtype: str, micro_batches: int, stage: Any) -> Row:
    """The bytes of a step and of the states between two steps, on this rank."""
    mesh = open_mesh(MeshConfig(shard=RANKS) if stage else MeshConfig(dp=RANKS), torch.device("cpu"))
    as_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    model = init_weights(Transformer(config, dtype=as_dtype), seed=0)
    train = TrainConfig(steps=10, optimizer=OptimizerConfig(kind="adamw"), mesh=mesh.config, zero=stage or None)
    state = TrainState(model, train, mesh=mesh)
    total = RANKS * micro_batches
    batches = random_batches(config.vocab_size, (TOKENS,) * total, micro_batches=total, device=mesh.device)
    step(state, batches)
    before = dict(mesh.traffic.tallies)
    step(state, batches)
    sent = sum(tally.sent for tally in mesh.traffic.since(before).values())
    parameters = sum(p.numel() for p in model.parameters())
    root = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("blocks."))
    row: Row = {
        "model": name,
        "dtype": dtype,
        "micro_batches": micro_batches,
        "stage": stage,
        "parameters": parameters,
        "state_bytes": held_bytes(state),
        "state_formula_bytes": model_state_bytes(parameters, stage=stage, ranks=RANKS, compute_bytes=as_dtype.itemsize),
        "sent_bytes": sent,
        "sent_formula_bytes": sum(
            step_bytes(
                parameters,
                root=root,
                mesh=mesh.config,
                stage=stage,
                compute_bytes=as_dtype.itemsize,
                backwards=micro_batches,
            ).values()
        ),
    }
    state.close()
    return row


def held_bytes(state: TrainState) -> int:
    """Parameters, masters, gradients and optimizer state that this rank holds between two steps."""
    held = [p.data for p in state.model.parameters()] + [state.flat.master, state.flat.grad]
    held += [t for part in state.optimizer.parts for t in part.state.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


def ratios(rows: Sequence[Row]) -> dict[tuple[str, str, float], float]:
    """Bytes of stage 3 over those of data parallelism, by model, dtype and micro-batches."""
    sent = {(r["model"], r["dtype"], number(r, "micro_batches"), r["stage"]): number(r, "sent_bytes") for r in rows}
    return {(str(m), str(d), n): sent[m, d, n, 3] / sent[m, d, n, 0] for m, d, n, stage in sent if stage == 3}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if stage 3 sends 1.5 times the bytes of data parallelism at every point."""
    found = ratios(rows)
    good = [point for point, ratio in found.items() if abs(ratio / CLAIM - 1) <= CLOSE]
    kind: Kind = "held" if len(good) == len(found) else "holds only where" if good else "did not hold"
    low, high = min(found, key=lambda p: found[p]), max(found, key=lambda p: found[p])
    memory = max(abs(number(r, "state_bytes") / number(r, "state_formula_bytes") - 1) for r in rows)
    sent = max(abs(number(r, "sent_bytes") / number(r, "sent_formula_bytes") - 1) for r in rows)

    def at(point: tuple[str, str, float]) -> str:
        return f"×{found[point]:.2f} ({point[0]}, {point[1]}, {point[2]:g} micro-batches)"

    return Verdict(
        kind=kind,
        sentence_en=f"Stage 3 sends 1.5 times the bytes of data parallelism, within {100 * CLOSE:g} %, at {len(good)} "
        f"of {len(found)} points: from {at(low)} to {at(high)}. bagu's formulas are off by at most "
        f"{100 * memory:.1f} % for states and {100 * sent:.1f} % for bytes.",
        sentence_zh=f"{len(found)} 个点中有 {len(good)} 个，第 3 阶段的通信量是数据并行的 1.5 倍"
        f"（误差 {100 * CLOSE:g} % 以内）：从 {at(low)} 到 {at(high)}。"
        f"bagu 的公式误差至多为：状态 {100 * memory:.1f} %，字节 {100 * sent:.1f} %。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    states: list[Mark] = []
    for i, dtype in enumerate(("fp32", "bf16")):
        own = where(rows, model=rows[0]["model"], micro_batches=1, dtype=dtype)
        held, formula = (
            [number(r, key) / number(r, "parameters") for r in own] for key in ("state_bytes", "state_formula_bytes")
        )
        x = [number(r, "stage") + 0.4 * (i - 0.5) for r in own]
        states += [Bars(held, dtype, i), Line(x, formula, "", "_", INK, size=14)]
    points, sent = ratios(rows), []
    for model, dtype in dict.fromkeys((m, d) for m, d, _ in points):
        counts = sorted(n for m, d, n in points if (m, d) == (model, dtype))
        sent.append(Line(counts, [points[model, dtype, n] for n in counts], f"{model}, {dtype}"))
    stages, micro = [str(stage) for stage in STAGES], "micro-batches of a rank"
    title, stage = "States of a rank (−: formula)", "stage (0: data parallel)"
    return [
        Panel(states, title, stage, "bytes per parameter", xnames=stages),
        Panel([*sent, Rule(CLAIM, style="-")], "Bytes sent", micro, "stage 3 / data parallel"),
    ]


LAB = Claim(
    title_en="ZeRO: memory and bytes",
    title_zh="ZeRO：显存与通信量",
    claim_en="ZeRO stage 3 sends 1.5 times the bytes of data parallelism.",
    claim_zh="ZeRO 第 3 阶段的通信量是数据并行的 1.5 倍。",
    regime="A small Llama with tied embeddings and AdamW on 4 processes with Gloo; gradients and masters in fp32.",
    varies="Stage (0 is data parallel), dtype of the parameters, share of the vocabulary, micro-batches of a rank.",
    measures="Bytes of all collectives of one step on one rank; bytes of the states that it holds between steps; the "
    "formula of each.",
)
