"""Verbs that make a model or measure its quality: demo, train, report, export, eval, tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.cli.options import ApiKey, AsJson, Device, Model, ModelDtype, TokenizerFolder, group

tokenizers = group("Train a tokenizer, or measure one.")


def demo(
    out: Annotated[Path | None, Option(help="A new or empty folder. Default: runs/demo, runs/demo-2, …")] = None,
    quick: Annotated[bool, Option("--quick", help="Run every stage at a small size, in under a minute.")] = False,
    minutes: Annotated[float | None, Option(help="Time budget; sets model size and steps. Default: at most 5.")] = None,
    serve: Annotated[bool, Option(help="Serve the model at the end and send it one question.")] = True,
) -> None:
    """Train a tokenizer and a language model on Python's standard library, fine-tune it, write a report, serve it."""
    from bagu.recipes.demo import demo as part

    part(out, quick=quick, minutes=minutes, serve=serve)


def train(
    data: Annotated[
        list[str] | None,
        Argument(
            metavar="DATA",
            help="Files or folders of text, JSON or Parquet. SFT reads chats (messages, ShareGPT, Alpaca), "
            "reward and dpo read preferences (prompt, chosen, rejected). "
            "Default: 'stdlib', Python's standard library.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        Option(
            help="small (default), gpt2_124m, llama_1b, mlm, sft, lora, distill, on_policy_distill, reward, dpo, grpo "
            "or ppo."
        ),
    ] = None,
    config: Annotated[Path | None, Option(help="A run's config.json, instead of a recipe.")] = None,
    start: Annotated[
        str | None, Option("--from", help="Initial weights: a run, a checkpoint, a Hugging Face folder, an adapter.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. train.optimizer.lr=3e-4; repeatable."),
    ] = None,
    out: Annotated[Path, Option(help="The folder of the run.")] = Path("runs/train"),
    resume: Annotated[bool, Option("--resume", help="Resume the run in the folder --out.")] = False,
    accept_data_change: Annotated[bool, Option("--accept-data-change", help="Resume with changed data.")] = False,
    reward: Annotated[
        str | None,
        Option(help="Of grpo and ppo: FILE.py:FUNCTION (your code, run with your rights), a built-in name, a model."),
    ] = None,
    prompt: Annotated[list[str] | None, Option(help="A prompt to sample from during training; repeatable.")] = None,
    wandb: Annotated[str | None, Option(metavar="PROJECT", help="Also log to this Weights & Biases project.")] = None,
    mesh: Annotated[
        str | None,
        Option(metavar="DIMS", help="Divide the run over ranks: sizes of dp, shard (ZeRO), tp, pp, cp, ep: dp=2,tp=2."),
    ] = None,
    nproc: Annotated[int | None, Option(help="Start this many ranks on this machine. Default mesh: dp=NPROC.")] = None,
    max_restarts: Annotated[int, Option(help="Of --nproc: restarts from the last checkpoint after a crash.")] = 3,
    hang_timeout: Annotated[
        float, Option(help="Of --nproc: seconds without progress after which the rank that hangs is named and killed.")
    ] = 600.0,
    explain: Annotated[
        bool,
        Option(
            "--explain",
            help="Print what the mesh divides, the bytes sent and the waiting time of a step; draw the pipeline.",
        ),
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Check the data; print configuration, sizes and time.")] = False,
) -> None:
    """Pretrain, continue pretraining or fine-tune. Ctrl-C saves a checkpoint; --resume continues with the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once by cuBLAS; train.deterministic needs it
    from bagu.recipes import command

    status = command.train_main(
        data or [], recipe=recipe, config=config, start=start, settings=settings or [], out=out, resume=resume,
        accept_data_change=accept_data_change, reward=reward, prompts=prompt or [], wandb=wandb, dry_run=dry_run,
        mesh=mesh, nproc=nproc, max_restarts=max_restarts, hang_timeout=hang_timeout, explain=explain,
    )  # fmt: skip
    raise typer.Exit(status)


def report(run: Annotated[Path, Argument(help="The folder of the run.")]) -> None:
    """Write report.html for a run, finished or still running."""
    from bagu.train.report import write_report

    typer.echo(write_report(run))


def export(
    model: Model,
    out: Annotated[Path, Argument(help="The folder to write, or the GGUF or ONNX file.")],
    dtype: Annotated[str | None, Option(help="bf16 or fp32. Default: as saved.")] = None,
    format: Annotated[str, Option(help="safetensors (a Hugging Face folder), gguf or onnx.")] = "safetensors",
    quantization: Annotated[str | None, Option(help="For GGUF: f32, f16, bf16, q8_0 or q4_0. Default: f16.")] = None,
) -> None:
    """Export a model for transformers, vLLM and others (safetensors), for llama.cpp (GGUF), or for ONNX Runtime."""
    from bagu.recipes import command

    command.export_main(model, out, dtype=dtype, format=format, quantization=quantization)


def evaluate(
    model: Annotated[str, Argument(metavar="MODEL", help="A run, a Hugging Face folder, or the URL of a server.")],
    tasks: Annotated[
        list[str], Argument(metavar="TASK", help="Built-in tasks, task files (.toml), or BENCHMARK=PATH.")
    ],
    compare: Annotated[bool, Option("--compare", help="Compare two folders of results: MODEL and TASK.")] = False,
    out: Annotated[Path | None, Option(help="The folder of results. Default: evals/NAME.")] = None,
    limit: Annotated[int | None, Option(help="Evaluate only this many items per task.")] = None,
    few_shot: Annotated[int | None, Option(help="Number of examples before each question.")] = None,
    normalization: Annotated[str | None, Option(help="Log-likelihoods: raw, characters, tokens or pmi.")] = None,
    seed: Annotated[int, Option(help="Seed for the choice of examples.")] = 0,
    training: Annotated[Path | None, Option(help="A run or text: report items found in its training text.")] = None,
    tokenizer: TokenizerFolder = None,
    dtype: ModelDtype = "auto",
    device: Device = None,
    quantization: Annotated[str | None, Option(help="int8, int4 or fp8 weights in linear layers.")] = None,
    invariant: Annotated[bool, Option("--invariant", help="Bitwise equal results at any batch size; slower.")] = False,
    api_key: ApiKey = None,
    judge: Annotated[str | None, Option(help="Grades answers: a server (URL or URL#MODEL), or a model's path.")] = None,
    judge_api_key: Annotated[str | None, Option(envvar="BAGU_JUDGE_API_KEY", help="The judge's API key.")] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on tasks, with 95 % confidence intervals, and save the result of every item."""
    from bagu.recipes import evaluate as part

    if compare:
        if len(tasks) != 1:
            raise typer.BadParameter("--compare takes two folders of results")
        raise typer.Exit(part.compare_main(Path(model), Path(tasks[0]), out=out, as_json=as_json))
    status = part.eval_main(
        model, tasks, out=out, limit=limit, few_shot=few_shot, normalization=normalization, seed=seed,
        training=training, tokenizer=tokenizer, dtype=dtype, device=device, invariant=invariant,
        quantization=quantization, api_key=api_key, judge=judge, judge_api_key=judge_api_key, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(status)


@tokenizers.command("train")
def tokenizer_train(
    out: Annotated[Path, Argument(help="The folder to write.")],
    data: Annotated[Path | None, Argument(help="Text, JSONL or Parquet. Default: Python's standard library.")] = None,
    vocab_size: Annotated[int, Option(help="Vocabulary size, special tokens included.")] = 4096,
    max_mb: Annotated[float, Option(help="Train on at most this many MB of text.")] = 64,
) -> None:
    """Train a byte-level BPE tokenizer."""
    from bagu.data import tokenizer_cli

    tokenizer_cli.train_main(out, path=data, vocab_size=vocab_size, max_mb=max_mb)


@tokenizers.command("stats")
def tokenizer_stats(
    path: Annotated[Path, Argument(help="A folder with tokenizer.json.")],
    data: Annotated[Path | None, Argument(help="Text to measure on. Default: Python's standard library.")] = None,
    max_mb: Annotated[float, Option(help="Measure on at most this many MB of text.")] = 8,
) -> None:
    """Measure bytes per token and speed, and check that decoding restores the text."""
    from bagu.data import tokenizer_cli

    tokenizer_cli.stats_main(path, path=data, max_mb=max_mb)
