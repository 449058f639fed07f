"""The table of serving plans in docs/planner.md: recorded runs of the engine beside the planner's prediction.

A row of `bagu bench engine` is compared if the planner models what ran: a GPU that it knows, weights and KV cache of 16
bits, fast arithmetic, requests that all start at once and that all run together. The latest run of each model and GPU
counts. The requests are drawn again from the recorded case and seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagu.bench.workload import Lengths, random_workload
from bagu.nn.presets import preset
from bagu.parallel.planner.cluster import CLUSTERS
from bagu.parallel.planner.serving import batch_times
from benchmarks.tools.markdown import markdown_table

Row = Mapping[str, Any]
HEAD = (
    "engine on one GPU", "requests", "tokens in, out", "output tokens/s", "predicted", "median step, ms", "predicted",
)  # fmt: skip
NOTHING = "No run is recorded yet."


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    model: str
    gpu: str
    requests: int
    input_tokens: int
    output_tokens: int
    measured_s: float
    predicted_s: float
    measured_step_s: float  # median
    predicted_step_s: float

    @property
    def rate_error(self) -> float:
        return self.measured_s / self.predicted_s - 1

    @property
    def step_error(self) -> float:
        return self.predicted_step_s / self.measured_step_s - 1


def compared_runs(rows: Sequence[Row]) -> list[ComparedRun]:
    latest = {(row["model"], _gpu(row)): row for row in sorted(rows, key=lambda r: r["env"]["time"]) if _modelled(row)}
    return [_compared(row) for row in latest.values()]


def _gpu(row: Row) -> str:
    """The planner's name of the GPU."""
    return str(row["env"]["machine"]).removeprefix("nvidia-")


def _modelled(row: Row) -> bool:
    if row["system"] != "engine" or row["implementation"] != "bagu" or _gpu(row) not in CLUSTERS:
        return False
    engine, case = row["engine"], row["case"]
    # kv_dtype and speculative are newer than some rows
    options = (engine.get("kv_dtype", "auto"), engine["quantization"], engine.get("speculative"))
    together = row["streams"] is None and case["requests"] <= engine["max_num_seqs"] and not case["shared_prefix"]
    return (
        options == ("auto", None, None)
        and together
        and not engine["invariant"]
        and row["dtype"] in ("bfloat16", "float16")
    )


def _compared(row: Row) -> ComparedRun:
    model, case = preset(row["model"]), row["case"]
    work = random_workload(
        case["requests"], Lengths(**case["inputs"]), Lengths(**case["outputs"]), tokens=model.vocab_size,
        seed=case["seed"],
    )  # fmt: skip
    inputs = [len(prompt) for prompt in work.prompts]
    assert (sum(inputs), work.output_tokens) == (row["input_tokens"], row["output_tokens"]), "another draw of lengths"
    predicted = batch_times(model, CLUSTERS[_gpu(row)], inputs, work.max_tokens)
    return ComparedRun(
        model=row["model"], gpu=_gpu(row), requests=case["requests"], input_tokens=row["input_tokens"],
        output_tokens=row["output_tokens"], measured_s=row["seconds"], predicted_s=predicted.total_s,
        measured_step_s=row["step_s"], predicted_step_s=predicted.step_s,
    )  # fmt: skip


def render(rows: Sequence[Row]) -> str:
    lines = [
        (
            f"`{x.model}`, {x.gpu.upper()}", str(x.requests), f"{x.input_tokens:,}, {x.output_tokens:,}",
            f"{x.output_tokens / x.measured_s:,.0f}",
            f"{x.output_tokens / x.predicted_s:,.0f} ({100 * x.rate_error:+.1f} %)",
            f"{1000 * x.measured_step_s:.2f}", f"{1000 * x.predicted_step_s:.2f} ({100 * x.step_error:+.1f} %)",
        )
        for x in compared_runs(rows)
    ]  # fmt: skip
    return markdown_table(HEAD, lines, names=1) if lines else NOTHING
