"""The options of `bagu demo`, `train`, `export` and `eval` (bagu/config/options.py). `--help` imports this file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bagu.config import options
from bagu.config.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    out: Annotated[Path | None, Option("A new or empty folder. Default: runs/demo, runs/demo-2, …")] = None
    quick: Annotated[bool, Option("Run every stage at a small size, in under a minute.", flags=("--quick",))] = False
    minutes: Annotated[float | None, Option("Time budget; sets model size and steps. Default: at most 5.")] = None
    seed: Annotated[int, Option("Of the first weights and of the training questions.")] = 0
    serve: Annotated[bool, Option("Serve the model at the end and send it one question.")] = True
    vision: Annotated[bool, Option("Pictures instead of text: names, groups, answers.", flags=("--vision",))] = False


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    data: Annotated[
        tuple[str, ...],
        Argument(
            "Files or folders of text, JSON or Parquet. SFT reads chats (messages, ShareGPT, Alpaca, TRL), "
            "reward and dpo read preferences (prompt, chosen, rejected). "
            "Default: 'stdlib', Python's standard library.",
            metavar="DATA",
        ),
    ] = ()
    recipe: Annotated[
        str | None,
        Option(
            "small (default), reader, gpt2_124m, llama_1b, mlm, contrastive, token_table, sft, lora, distill, "
            "on_policy_distill, reward, dpo, grpo or ppo; on pictures clip, groupvit or vlm."
        ),
    ] = None
    config: Annotated[Path | None, Option("A run's config.json, instead of a recipe.")] = None
    start: Annotated[
        str | None,
        Option("Initial weights: a run, a checkpoint, a Hugging Face folder, an adapter.", flags=("--from",)),
    ] = None
    steps: Annotated[int | None, Option("Number of steps. Default: the recipe's.")] = None
    minutes: Annotated[float | None, Option("Train for this time instead: the first steps are timed.")] = None
    lr: Annotated[float | None, Option("Peak learning rate. Default: the recipe's.")] = None
    device: Annotated[str | None, options.DEVICE] = None
    settings: Annotated[
        tuple[str, ...],
        Option(
            "A setting of docs/settings.md, e.g. train.clip=0.5; repeatable.", flags=("--set",), metavar="KEY=VALUE"
        ),
    ] = ()
    out: Annotated[Path, Option("The folder of the run.")] = Path("runs/train")
    resume: Annotated[
        bool,
        Option(
            "Resume the run in the folder --out. --resume auto: start the run, or resume it if --out holds it.",
            flags=("--resume",),
        ),
    ] = False
    resume_auto: Annotated[bool, Option("--resume auto, as one word.", flags=("--resume-auto",), hidden=True)] = False
    accept_data_change: Annotated[bool, Option("Resume with changed data.", flags=("--accept-data-change",))] = False
    reward: Annotated[
        tuple[str, ...],
        Option(
            "Of grpo and ppo: FILE.py:FUNCTION (your code, run with your rights), a built-in name, a model; "
            "repeatable, with weights after a colon: python:0.8."
        ),
    ] = ()
    prompt: Annotated[tuple[str, ...], Option("A prompt to sample from during training; repeatable.")] = ()
    wandb: Annotated[str | None, Option("Also log to this Weights & Biases project.", metavar="PROJECT")] = None
    mesh: Annotated[
        str | None,
        Option("Divide the run over ranks: sizes of dp, shard (ZeRO), tp, pp, cp, ep: dp=2,tp=2.", metavar="DIMS"),
    ] = None
    nproc: Annotated[int | None, Option("Start this many ranks on this machine. Default mesh: dp=NPROC.")] = None
    max_restarts: Annotated[int, Option("Of --nproc: restarts from the last checkpoint after a crash.")] = 3
    hang_timeout: Annotated[
        float, Option("Of --nproc: seconds without progress after which the rank that hangs is named and killed.")
    ] = 600.0
    servers: Annotated[
        int | None, Option("Keep the parameters on this many servers, which may die (docs/parallel).")
    ] = None
    workers: Annotated[
        str | None,
        Option(
            'Processes that compute gradients, with their cores: 2, or "2x cpu:2,1x cpu:1". Each gets micro-batches by '
            "its speed, or with --servers (default there: 2) equally many."
        ),
    ] = None
    delay: Annotated[int | None, Option("Of --servers: updates that a worker may be ahead of the slowest.")] = None
    compress: Annotated[str | None, Option("Of --servers: int8 or topk, gradients on the wire.")] = None
    local_steps: Annotated[int | None, Option("Of --servers: steps between exchanges (DiLoCo).")] = None
    ray: Annotated[str | None, Option("Of --servers: place processes on Ray: auto, an address, or local.")] = None
    explain: Annotated[
        bool,
        Option(
            "Print what the mesh divides, the bytes sent and the waiting time of a step; draw the pipeline.",
            flags=("--explain",),
        ),
    ] = False
    dry_run: Annotated[bool, Option("Check the data; print configuration, sizes and time.", flags=("--dry-run",))] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    model: Annotated[str, options.MODEL]
    out: Annotated[Path, Argument("The folder to write, or the GGUF or ONNX file.")]
    dtype: Annotated[str | None, Option("bf16 or fp32. Default: as saved.")] = None
    format: Annotated[
        str | None, Option("safetensors (a Hugging Face folder), gguf or onnx. Default: by the ending of OUT.")
    ] = None
    quantization: Annotated[
        str | None, Option("For GGUF: f32, f16, bf16, q8_0 or q4_0. Default: f16.", flags=("--gguf-type",))
    ] = None


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    model: Annotated[str, Argument("A run, a Hugging Face folder, or the URL of a server.", metavar="MODEL")]
    tasks: Annotated[
        tuple[str, ...], Argument("Built-in tasks, task files (.toml), or BENCHMARK=PATH.", metavar="TASK")
    ]
    compare: Annotated[bool, Option("Deprecated: bagu compare A B.", flags=("--compare",), hidden=True)] = False
    out: Annotated[Path | None, Option("The folder of results. Default: evals/NAME.")] = None
    limit: Annotated[int | None, Option("Evaluate only this many items per task.")] = None
    index: Annotated[
        Path | None, Option("The index that `lookup` searches, from `bagu index`.", flags=("--with",), metavar="INDEX")
    ] = None
    passages: Annotated[int | None, Option("Most passages of --with that the model is shown. Default: 4.")] = None
    few_shot: Annotated[int | None, Option("Number of examples before each question.")] = None
    normalization: Annotated[str | None, Option("Log-likelihoods: raw, characters, tokens or pmi.")] = None
    seed: Annotated[int, Option("Seed for the choice of examples.")] = 0
    training: Annotated[Path | None, Option("A run or text: report items found in its training text.")] = None
    tokenizer: Annotated[str | None, options.TOKENIZER] = None
    dtype: Annotated[str, options.MODEL_DTYPE] = "auto"
    device: Annotated[str | None, options.DEVICE] = None
    quantization: Annotated[str | None, options.QUANTIZATION] = None
    invariant: Annotated[bool, options.INVARIANT] = False
    api_key: Annotated[str | None, options.API_KEY] = None
    judge: Annotated[str | None, Option("Grades answers: a server (URL or URL#MODEL), or a model's path.")] = None
    judge_api_key: Annotated[str | None, Option("The judge's API key.", envvar="BAGU_JUDGE_API_KEY")] = None
    as_json: Annotated[bool, options.AS_JSON] = False


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    a: Annotated[Path, Argument("A folder of results (`bagu eval --out`).", metavar="A")]
    b: Annotated[Path, Argument("Another one; differences are B minus A.", metavar="B")]
    out: Annotated[Path | None, Option("The page to write. Default: B/against-A.html.")] = None
    as_json: Annotated[bool, options.AS_JSON] = False
