"""Verbs that make a model or measure its quality: demo, train, report, export, eval, tokenizer."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from bagu.cli.found import check_files, check_model
from bagu.cli.help import Verbs
from bagu.cli.options import dying_of_sigint, takes
from bagu.recipes.verbs import CompareOptions, DemoOptions, EvalOptions, ExportOptions, TrainOptions

PICTURES = ("clip", "groupvit", "vlm", "scenes")  # the recipes of bagu/recipes/vision
tokenizers = Verbs("Train a tokenizer, or measure one.")


@takes(DemoOptions)
def demo(given: DemoOptions) -> None:
    """Train a tokenizer and a language model on Python's standard library, fine-tune it, write a report, serve it.

    Examples:
      bagu demo --minutes 20 --out runs/long
      bagu demo --vision --minutes 5
    """
    if given.vision:
        from bagu.recipes.vision.command import demo_vision

        demo_vision(given.out or Path("runs/demo-vision"), minutes=given.minutes or 5.0, seed=given.seed)
        return
    from bagu.recipes.demo import demo as part

    part(given.out, quick=given.quick, minutes=given.minutes, seed=given.seed, serve=given.serve)


@takes(
    TrainOptions,
    groups={
        "Run": "config accept_data_change resume_auto reward prompt wandb",
        "Several processes": "workers mesh nproc max_restarts hang_timeout explain",
        "Parameter server": "servers delay compress local_steps ray",
    },
)
def train(given: TrainOptions) -> None:
    """Pretrain, continue pretraining or fine-tune. Ctrl-C saves a checkpoint; --resume continues with the same bits.

    Examples:
      bagu train notes/ --minutes 10
      bagu train chats.jsonl --recipe sft --from runs/train --out runs/sft
    """
    check_files(given.config, *(path for path in given.data if path != "stdlib"))
    check_model(given.start)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once by cuBLAS; train.deterministic needs it
    # read once by torch: its warnings about a peer that is gone are pages of C++ frames
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if given.recipe in PICTURES:
        from bagu.recipes.vision.command import train_main as train_pictures

        raise typer.Exit(train_pictures(given))
    with dying_of_sigint():  # numpy turns a KeyboardInterrupt of its import into pages about its installation
        from bagu.recipes import command, rewards

    rewards.provided["drill"] = _drill_reward
    try:
        status = command.train_main(given)
    except KeyboardInterrupt:
        print("bagu: stopped", file=sys.stderr)
        status = 130
    raise typer.Exit(status)


def watch(
    run: Annotated[Path, Argument(help="The folder of the run.")],
    delay: Annotated[int | None, Option(help="Set how many updates workers may be ahead, while it runs.")] = None,
    once: Annotated[bool, Option("--once", help="Print one state and end.")] = False,
) -> None:
    """Show the parameter servers of a run: ranges and their holders, clocks, idle share, age of weights, bytes.

    Examples:
      bagu watch runs/ps
      bagu watch runs/ps --delay 4 --once
    """
    check_files(run)
    from bagu.recipes.served import watch_main

    with dying_of_sigint():
        raise typer.Exit(watch_main(run, delay=delay, once=once))


def _drill_reward(name: str) -> Any:
    """The reward `drill:NAME`: recipes do not import labs."""
    from bagu.lab.drill.reward import DrillReward

    return DrillReward(name)


def report(run: Annotated[Path, Argument(help="The folder of the run.")]) -> None:
    """Write report.html for a run, finished or still running.

    Examples:
      bagu report runs/train
      bagu report runs/demo/sft
    """
    check_files(run)
    from bagu.train.report import write_report

    typer.echo(write_report(run))


@takes(ExportOptions)
def export(given: ExportOptions) -> None:
    """Export a model for transformers, vLLM and others (safetensors), for llama.cpp (GGUF), or for ONNX Runtime.

    Examples:
      bagu export runs/demo/grpo exported
      bagu export runs/demo/grpo model.gguf --gguf-type q8_0
    """
    check_model(given.model)
    from bagu.recipes import command

    command.export_main(given)


@takes(EvalOptions, groups={"Items": "normalization seed training", "Judge": "judge judge_api_key"})
def evaluate(given: EvalOptions) -> None:
    """Evaluate a model on tasks, with 95 % confidence intervals, and save the result of every item.

    Examples:
      bagu eval runs/demo/sft continue4 --out evals/sft
      bagu eval http://127.0.0.1:8000 gsm8k=gsm8k.jsonl --limit 100
    """
    files = (name.rpartition("=")[2] for name in given.tasks if "=" in name or name.endswith(".toml"))
    check_files(*files, *(() if not given.compare else (given.model,)))
    if not given.compare:
        check_model(given.model)
    from bagu.recipes import evaluate as part

    if given.compare:
        if len(given.tasks) != 1:
            raise typer.BadParameter("--compare takes two folders of results")
        print("bagu: eval --compare A B is now: bagu compare A B; the old way works until 0.2", file=sys.stderr)
        a, b = Path(given.model), Path(given.tasks[0])
        raise typer.Exit(part.compare_main(CompareOptions(a=a, b=b, out=given.out, as_json=given.as_json)))
    raise typer.Exit(part.eval_main(given))


@takes(CompareOptions)
def compare(given: CompareOptions) -> None:
    """Compare two evaluations item by item: differences with 95 % intervals, p-values, and a page.

    Examples:
      bagu compare evals/pretrain evals/sft
      bagu compare evals/fp32 evals/int8 --out int8.html
    """
    check_files(given.a, given.b)
    from bagu.recipes.evaluate import compare_main

    raise typer.Exit(compare_main(given))


@tokenizers.command("train")
def tokenizer_train(
    out: Annotated[Path, Argument(help="The folder to write.")],
    data: Annotated[Path | None, Argument(help="Text, JSONL or Parquet. Default: Python's standard library.")] = None,
    vocab_size: Annotated[int, Option(help="Vocabulary size, special tokens included.")] = 4096,
    max_mb: Annotated[float, Option(help="Train on at most this many MB of text.")] = 64,
) -> None:
    """Train a byte-level BPE tokenizer.

    Examples:
      bagu tokenizer train tokenizers/4k
      bagu tokenizer train tokenizers/notes notes/ --vocab-size 8192
    """
    check_files(data)
    from bagu.data import tokenizer_cli

    tokenizer_cli.train_main(out, path=data, vocab_size=vocab_size, max_mb=max_mb)


@tokenizers.command("stats")
def tokenizer_stats(
    path: Annotated[Path, Argument(help="A folder with tokenizer.json.")],
    data: Annotated[Path | None, Argument(help="Text to measure on. Default: Python's standard library.")] = None,
    max_mb: Annotated[float, Option(help="Measure on at most this many MB of text.")] = 8,
) -> None:
    """Measure bytes per token and speed, and check that decoding restores the text.

    Examples:
      bagu tokenizer stats tokenizers/4k
      bagu tokenizer stats runs/demo/pretrain/tokenizer notes/ --max-mb 1
    """
    check_files(path, data)
    from bagu.data import tokenizer_cli

    tokenizer_cli.stats_main(path, path=data, max_mb=max_mb)
