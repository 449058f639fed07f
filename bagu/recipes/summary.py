"""The summary of a run, printed before its first step: sizes, tokens, epochs, device, dtype, estimated time."""

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bagu.data.loader import DataConfig
from bagu.machine.device import vendor_flops
from bagu.machine.terminal import counted
from bagu.nn import ModelConfig, count
from bagu.nn.lora import lora_parameters
from bagu.recipes.inputs import Inputs
from bagu.recipes.models import model_config
from bagu.recipes.run import Run
from bagu.runs.progress import duration

# The fraction of the matmul rate that a step reaches: 57 % on an H200 (1.1B parameters, of the vendor's figure), 54 %
# on two ARM cores (5.9M parameters, of a measured matmul). Smaller models reach less.
UTILISATION = 0.5
LAYER_S = 0.006  # minimum per layer and micro-batch, host time: an H200 without CUDA graphs took 40 ms for six layers
MANY_EPOCHS = 50  # from here on a model reproduces its text: in https://arxiv.org/abs/2305.16264 gains end at 16


@dataclass(frozen=True, kw_only=True)
class SourceSummary:
    """`epochs` counts the passes over the source in the whole run, from step 0 on."""

    name: str
    documents: int
    tokens: int
    held_out_tokens: int
    epochs: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """`first_step` is the first step of the run; it is not 0 if the run is resumed. `seconds` is an estimate for the
    remaining steps, without evaluation, sampling and saving.
    """

    objective: str
    model: ModelConfig
    parameters: int
    trained: int
    outside_blocks: int  # of the trained: embedding, head
    lora_base: str | None
    data: DataConfig
    sources: tuple[SourceSummary, ...]
    auxiliary: Mapping[str, int]  # parameters of the objective's other models, by role
    first_step: int
    steps: int
    tokens_per_step: int
    device: str
    dtype: str
    peak_flops: float
    seconds: float

    def lines(self) -> list[str]:
        """The summary as text, one fact per line, warnings last."""
        lora = "LoRA" if self.lora_base is None else f"LoRA over {self.lora_base} weights"
        trained = "" if self.trained == self.parameters else f", of which {self.trained:,} are trained ({lora})"
        left = self.steps - self.first_step
        begun = f" from step {self.first_step:,} on" if self.first_step else ""
        lines = [
            f"model     {self.parameters:,} parameters{trained}, {self.dtype} on {self.device}",
            *(f"{role:<9} {size:,} parameters, frozen" for role, size in self.auxiliary.items()),
            *(
                f"data      {s.name}: {counted(s.documents, 'document')}, {counted(s.tokens, 'token')}, "
                f"{s.held_out_tokens:,} held out; "
                f"seen {s.epochs:.3g} times{'; ' * bool(s.note)}{s.note}"
                for s in self.sources
            ),
            f"{self.objective:<9} {counted(left, 'step')}{begun} of {self.tokens_per_step:,} tokens, "
            f"{left * self.tokens_per_step:,} tokens in all",
            f"time      about {duration(self.seconds)}, at {100 * UTILISATION:.0f} % of the rate of a matmul here, "
            f"{_rate(self.peak_flops)}",
        ]
        return lines + [f"warning: {w}" for w in self.warnings()]

    def warnings(self) -> list[str]:
        return [
            f"the run sees the {s.tokens:,} tokens of {s.name!r} {s.epochs:.0f} times and will memorise them: "
            f"give more text, or set train.steps={max(int(self.steps * 10 / s.epochs), 1)} for 10 epochs"
            for s in self.sources
            if s.epochs >= MANY_EPOCHS
        ]


def summarise(run: Run, inputs: Inputs, *, first_step: int = 0, peak_flops: float | None = None) -> Summary:
    """The summary of `run`. Without `peak_flops`, the matmul rate is measured."""
    peak = matmul_rate(inputs.device, inputs.dtype) if peak_flops is None else peak_flops
    report = inputs.data.loader.report(run.train.steps)
    tokens_per_step = report.get("tokens_per_step", run.data.tokens_per_step)
    sources = tuple(
        SourceSummary(
            name=name,
            documents=size.documents,
            tokens=size.tokens,
            held_out_tokens=size.validation_tokens,
            epochs=report["sources"][name]["epochs"],
            note=size.note,
        )
        for name, size in inputs.data.sources.items()
    )
    total = count.parameters(inputs.model).total
    others = {role: model_config(folder) for role, folder in inputs.auxiliary.items()}
    per_token = count.flops(inputs.model, run.data.context).training
    per_token += sum(count.flops(other, run.data.context).forward for other in others.values())
    flops = per_token * tokens_per_step
    least = LAYER_S * inputs.model.num_layers * run.data.micro_batches
    step_s = max(flops / (peak * UTILISATION), least)
    parts = count.parameters(inputs.model)
    trained, outside = total, parts.embedding + parts.head
    if run.lora is not None:
        trained = lora_parameters(inputs.model, rank=run.lora.rank, targets=run.lora.targets)
        outside = inputs.model.hidden_size if inputs.model.score_head else 0  # a score head is trained whole
        trained += outside
    return Summary(
        objective=run.objective.kind, model=inputs.model, parameters=total, trained=trained, outside_blocks=outside,
        lora_base=None if run.lora is None else run.lora.base, data=run.data, sources=sources,
        auxiliary={role: count.parameters(other).total for role, other in others.items()}, first_step=first_step,
        steps=run.train.steps, tokens_per_step=tokens_per_step, device=str(inputs.device),
        dtype=str(inputs.dtype).removeprefix("torch."), peak_flops=peak,
        seconds=(run.train.steps - first_step) * step_s,
    )  # fmt: skip


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """The FLOP/s that MFU refers to: the vendor's dense bf16 figure for a known GPU, else a measured matmul rate."""
    stated = vendor_flops(device)
    return _measured_rate(device, dtype, torch.get_num_threads()) if stated is None else stated


@functools.cache  # half a second on a CPU: once per process, not for each of its runs
def _measured_rate(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    n, fewest = 1024 if device.type == "cpu" else 8192, float("inf")
    x = torch.randn(n, n, device=device, dtype=dtype)
    for _ in range(8):
        start = time.perf_counter()
        y = x @ x
        float(y[0, 0])  # waits for the device
        fewest = min(fewest, time.perf_counter() - start)
    return 2 * n**3 / fewest


def _rate(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"
