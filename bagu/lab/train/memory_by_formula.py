"""Memory by formula: the predicted memory of a training step beside that of real steps.

    textbook   16 bytes per parameter, and 34·s·b·h (ReLU, dropout) + 5·a·s²·b bytes per layer in 16 bits
               (Korthikanti et al., https://arxiv.org/abs/2205.05198)
    planner    16 or 18 bytes per parameter, and the tensors that bagu's kernels keep

On a GPU, measured is the allocator's peak of a step. On a CPU it is what exists when the backward starts: weights,
gradients, optimizer state and every tensor that autograd saved in a real forward.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from bagu.data.random_batches import random_batches
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, number
from bagu.lab.plot import Line, Panel
from bagu.nn import ModelConfig, Transformer, init_weights, preset
from bagu.ops.call.recording import storage_id
from bagu.parallel.planner.layouts import Layout, Layouts, Workload
from bagu.parallel.planner.memory import memory
from bagu.parallel.planner.model_cost import model_cost
from bagu.parallel.planner.software import STACKS
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step
from bagu.types import Batch

GOOD = 15.0  # percent: a plan with more error cannot choose a micro-batch
SEQ = 256


def models(quick: bool) -> dict[str, ModelConfig]:
    small = {"llama 6M": preset("cpu_6m"), "gpt, 2 layers": replace(preset("gpt2_124m"), num_layers=2, vocab_size=512)}
    wide = {
        "qk norm, relu²": replace(preset("gpt_d20"), num_layers=3, vocab_size=4096),
        "llama wide": replace(preset("llama_1b"), num_layers=3, vocab_size=4096),
    }
    return small if quick else small | wide


def run(setting: Setting) -> list[Row]:
    device = torch.device(setting.device)
    counts = (1, 2) if setting.quick else (1, 2, 4, 8)
    points = [(name, config, n) for name, config in models(setting.quick).items() for n in counts]
    return [measured(name, config, n, device) for name, config, n in setting.track(points)]


def measured(name: str, config: ModelConfig, sequences: int, device: torch.device) -> Row:
    config = replace(config, max_len=max(config.max_len, SEQ))
    gpu = device.type == "cuda"
    itemsize = 2 if gpu else 4  # the training dtype that is fast on the device
    dtype = torch.bfloat16 if gpu else torch.float32
    model = init_weights(Transformer(config, device=device, dtype=dtype), seed=0)
    (batch,) = random_batches(config.vocab_size, (SEQ,) * sequences, micro_batches=1, device=device)
    peak = _peak_on_gpu(model, batch, device) if gpu else _held_on_cpu(model, batch)
    return {
        "model": name,
        "sequences": sequences,
        "measured_bytes": peak,
        "planner_bytes": planned(config, sequences, itemsize=itemsize),
        "textbook_bytes": textbook(config, sequences, itemsize=itemsize),
    }


def _peak_on_gpu(model: Transformer, batch: Batch, device: torch.device) -> int:
    state = TrainState(model, TrainConfig(steps=10, optimizer=OptimizerConfig(kind="adamw")))
    step(state, [batch])
    torch.cuda.reset_peak_memory_stats(device)
    step(state, [batch])
    state.close()
    return torch.cuda.max_memory_allocated(device)


def _held_on_cpu(model: Transformer, batch: Batch) -> int:
    weights = {storage_id(t) for t in (*model.parameters(), *model.buffers())}
    saved: dict[object, torch.Tensor] = {}

    def save(x: torch.Tensor) -> torch.Tensor:
        saved[storage_id(x)] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len)
    kept = sum(x.untyped_storage().nbytes() for key, x in saved.items() if key not in weights)
    parameters = sum(p.numel() for p in model.parameters())
    return kept + 16 * parameters  # fp32: weights (they are the masters), gradients, two moments


def planned(config: ModelConfig, sequences: int, *, itemsize: int) -> float:
    """The planner's allocation on one GPU; in fp32 a tensor is twice as large, and weights are their own masters."""
    workload = Workload(model=config, seq=SEQ, batch=sequences)
    layouts = Layouts.of(Layout(micro_batch=sequences))
    need = memory(workload, STACKS["bagu"], layouts)
    if itemsize == 2:
        return float(need.allocated[0])
    states = need.weights + need.gradients + need.optimizer
    return float(states[0]) * 16 / 18 + 2 * float(need.activations[0])


def textbook(config: ModelConfig, sequences: int, *, itemsize: int) -> float:
    layer = 34 * config.hidden_size + 5 * config.num_heads * SEQ
    return 16 * model_cost(config).parameters + config.num_layers * sequences * SEQ * layer * itemsize / 2


def error(row: Row, key: str) -> float:
    """Percent."""
    return 100 * (number(row, key) / number(row, "measured_bytes") - 1)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the planner is within GOOD percent everywhere."""
    planner = [error(row, "planner_bytes") for row in rows]
    book = [error(row, "textbook_bytes") for row in rows]
    good = [abs(e) <= GOOD for e in planner]
    kind: Kind = "held" if all(good) else "holds only where" if any(good) else "did not hold"
    worst = max(rows, key=lambda row: abs(error(row, "planner_bytes")))
    return Verdict(
        kind=kind,
        sentence_en=f"The planner's formula is within {GOOD:g} % in {sum(good)} of {len(rows)} steps (worst "
        f"{error(worst, 'planner_bytes'):+.0f} %: {worst['model']}, {worst['sequences']} sequences). The textbook's is "
        f"off by {min(book):+.0f} to {max(book):+.0f} %: it counts dropout masks and a square of scores that these "
        "kernels never keep.",
        sentence_zh=f"规划器的公式在 {len(rows)} 步中有 {sum(good)} 步误差不超过 {GOOD:g} %（最大 "
        f"{error(worst, 'planner_bytes'):+.0f} %：{worst['model']}，{worst['sequences']} 条序列）。教科书公式误差为 "
        f"{min(book):+.0f} % 至 {max(book):+.0f} %：它计入了这些内核并不保存的 dropout 掩码和注意力分数方阵。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    measured, low = [v / 1e6 for v in column(rows, "measured_bytes")], min(column(rows, "measured_bytes")) / 2e6
    top = max(*measured, *(v / 1e6 for v in column(rows, "textbook_bytes")))
    marks = [Line([0.1, top], [0.1, top], "", "-", "#888888")]
    names = {"planner_bytes": "planner", "textbook_bytes": "textbook: 16 Ψ + 34 sbh + 5 as²b"}
    for i, (key, label) in enumerate(names.items()):
        marks.append(Line(measured, [v / 1e6 for v in column(rows, key)], label, "o", i))
    return [Panel(marks, "", "measured, MB", "formula, MB", "log", "log", (low, None), (low, None))]


LAB = Claim(
    title_en="Memory by formula",
    title_zh="用公式算显存",
    claim_en="The memory of a training step follows from a formula to within 15 %.",
    claim_zh="训练一步所需的内存可由公式算出，误差不超过 15 %。",
    regime="Small decoders, AdamW, no recomputation, documents of 256 tokens; bf16 with fp32 masters on a GPU, fp32 "
    "on a CPU.",
    varies="Model (Llama, GPT, QK norm with ReLU²) and the number of sequences in a micro-batch.",
    measures="Peak bytes of a real step (GPU), or states and tensors saved by autograd in a real forward (CPU), beside "
    "the planner's formula and the textbook's.",
)
