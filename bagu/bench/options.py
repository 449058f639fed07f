"""The options of `bagu bench` (bagu/config/options.py), as its commands take them. `--help` imports this file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bagu.config import options
from bagu.config.options import Argument, Option

RESULTS_HELP = "The folder of results. Default: benchmarks/results or a subfolder."
ROUNDS = Option("How many times to run all implementations, in turn.")
SHAPE = Option("cpu_8m, smollm_135m or qwen3_0_6b, with random weights.")


@dataclass(frozen=True, kw_only=True)
class BenchSetting:
    """Where a benchmark runs and what it leaves: every command has these."""

    dtype: Annotated[str | None, Option("bf16 or fp32. Default: the faster one on this machine.")] = None
    device: Annotated[str | None, options.DEVICE] = None
    out: Annotated[Path | None, Option(RESULTS_HELP)] = None
    as_json: Annotated[bool, options.AS_JSON] = False


@dataclass(frozen=True, kw_only=True)
class OpSetting(BenchSetting):
    dtype: Annotated[str | None, Option("bf16, fp16, fp32 or fp64. Default: bf16 on a GPU, fp32 on a CPU.")] = None


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    shape: Annotated[
        str | None, Option("cpu_6m, llama_1b, llama_1b_long, llama_8b_4 or gpt_d20. Default: chosen for this machine.")
    ] = None
    peer: Annotated[
        tuple[str, ...],
        Option(
            "transformers, transformers-compile, flash-attention (bagu with FlashAttention-2), "
            "or a script that prints JSON with tokens_per_s."
        ),
    ] = ()
    steps: Annotated[int, Option("Number of timed steps per implementation.")] = 20
    micro_batches: Annotated[tuple[int, ...], Option("Micro-batches per step; repeatable.")] = ()
    compile: Annotated[bool, Option("Also time bagu under torch.compile.", flags=("--compile",))] = False
    recompute: Annotated[str, Option("Activation recomputation: none, selective or block.")] = "none"
    fp8: Annotated[bool, Option("Also time bagu with train.precision=fp8.", flags=("--fp8",))] = False
    rounds: Annotated[int, ROUNDS] = 1


@dataclass(frozen=True, kw_only=True)
class ConstrainedBench:
    model: Annotated[str | None, Argument("A model. Default: random weights of --shape.", metavar="MODEL")] = None
    shape: Annotated[str | None, Option("cpu_8m, smollm_135m or qwen3_0_6b.")] = None
    schema: Annotated[Path | None, Option("A file with a JSON schema. Default: a list of three people.")] = None
    streams: Annotated[int, Option("Number of streams that decode at once.")] = 32
    prompt: int = 64  # tokens
    max_tokens: Annotated[int, Option("Maximum tokens of an output.")] = 1024
    temperature: Annotated[float, Option("0 is greedy.")] = 1.0
    threads: Annotated[int | None, Option("CPU threads of the model.")] = None
    quantization: Annotated[str | None, options.QUANTIZATION] = None
    invariant: Annotated[bool, Option("Use the batch-invariant mode.", flags=("--invariant",))] = False
    rounds: Annotated[int, ROUNDS] = 5


@dataclass(frozen=True, kw_only=True)
class DpoBench:
    shape: Annotated[str | None, Option("A preset, with random weights. Default: llama_1b, cpu_6m on a CPU.")] = None
    peer: Annotated[tuple[str, ...], Option("transformers or transformers-compile, on the same pairs.")] = ()
    pairs: Annotated[int | None, Option("Pairs of a step. Default: 32 on a GPU, 4 on a CPU.")] = None
    prompt: Annotated[
        int | None, Option("Tokens of a prompt. Default: 256 on a GPU, 32 on a CPU.", flags=("--input-tokens",))
    ] = None
    answer: Annotated[
        int | None,
        Option("Tokens of the longest answer. Default: 768 on a GPU, 96 on a CPU.", flags=("--output-tokens",)),
    ] = None
    steps: Annotated[int, Option("Steps to time, after three to warm up.")] = 10


@dataclass(frozen=True, kw_only=True)
class GrpoBench:
    shape: Annotated[str | None, SHAPE] = None
    prompts: Annotated[int | None, Option("Prompts of a step. Default: 64 on a GPU, 4 on a CPU.")] = None
    samples: Annotated[int, Option("Answers to each prompt.")] = 8
    prompt: Annotated[int, Option("Tokens of a prompt.", flags=("--input-tokens",))] = 64
    new: Annotated[
        int | None, Option("Tokens of an answer. Default: 256 on a GPU, 32 on a CPU.", flags=("--output-tokens",))
    ] = None
    steps: Annotated[int, Option("Steps to time, after one to warm up.")] = 3


@dataclass(frozen=True, kw_only=True)
class EvalBench:
    shape: Annotated[str | None, Option("cpu_8m, smollm_135m or qwen3_0_6b; random weights.")] = None
    items: Annotated[int, Option("Number of four-way items, in all rounds together.")] = 10_000
    rounds: Annotated[int, ROUNDS] = 4


@dataclass(frozen=True, kw_only=True)
class LayersBench:
    names: Annotated[tuple[str, ...], Argument("The layers to time. Default: all.", metavar="NAME")] = ()
    batch: Annotated[tuple[int, ...], Option("Batch size; repeatable. Default: 1, 8 and on a GPU 32.")] = ()
    compile: Annotated[bool, Option("Also time torch.compile (slow).")] = True
    seconds: Annotated[float, Option("Seconds to measure each implementation and pass.")] = 0.3
    plot: Annotated[bool, Option("Write one plot per layer next to the results.")] = True


@dataclass(frozen=True, kw_only=True)
class OpsBench:
    names: Annotated[tuple[str, ...], Argument("The ops to time. Default: all.", metavar="NAME")] = ()
    case: Annotated[tuple[str, ...], Option("Time only this benchmark case; repeatable.")] = ()
    backend: Annotated[tuple[str, ...], Option("Time only this backend of bagu; repeatable.")] = ()
    quick: Annotated[bool, Option("One small case per op. Saved only with --out.", flags=("--quick",))] = False
    compile: Annotated[bool | None, Option("Also time torch.compile (slow). Default: unless --quick.")] = None
    plot: Annotated[bool, Option("Write one plot per op next to the results.")] = True
