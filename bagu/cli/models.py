"""Verbs that make a model or measure its quality: demo, train, report, export, eval, tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.cli.options import group, takes
from bagu.recipes.verbs import DemoOptions, EvalOptions, ExportOptions, TrainOptions

tokenizers = group("Train a tokenizer, or measure one.")


@takes(DemoOptions)
def demo(given: DemoOptions) -> None:
    """Train a tokenizer and a language model on Python's standard library, fine-tune it, write a report, serve it."""
    from bagu.recipes.demo import demo as part

    part(given.out, quick=given.quick, minutes=given.minutes, serve=given.serve)


@takes(TrainOptions)
def train(given: TrainOptions) -> None:
    """Pretrain, continue pretraining or fine-tune. Ctrl-C saves a checkpoint; --resume continues with the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once by cuBLAS; train.deterministic needs it
    from bagu.recipes import command

    raise typer.Exit(command.train_main(given))


def report(run: Annotated[Path, Argument(help="The folder of the run.")]) -> None:
    """Write report.html for a run, finished or still running."""
    from bagu.train.report import write_report

    typer.echo(write_report(run))


@takes(ExportOptions)
def export(given: ExportOptions) -> None:
    """Export a model for transformers, vLLM and others (safetensors), for llama.cpp (GGUF), or for ONNX Runtime."""
    from bagu.recipes import command

    command.export_main(given)


@takes(EvalOptions)
def evaluate(given: EvalOptions) -> None:
    """Evaluate a model on tasks, with 95 % confidence intervals, and save the result of every item."""
    from bagu.recipes import evaluate as part

    if given.compare and len(given.tasks) != 1:
        raise typer.BadParameter("--compare takes two folders of results")
    raise typer.Exit(part.compare_main(given) if given.compare else part.eval_main(given))


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
