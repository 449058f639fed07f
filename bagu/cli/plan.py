"""`bagu plan`: a training run over a cluster, or a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from bagu.cli.found import check_files
from bagu.cli.help import Verbs
from bagu.cli.options import AsJson
from bagu.errors import ArgumentError

if TYPE_CHECKING:
    from bagu.nn.config import ModelConfig

TRAINING = ("seq", "batch", "tokens", "precision", "top", "out")  # options without a meaning for --serve
DEPLOYMENT = ("rate", "input_tokens", "output_tokens", "tpot", "ttft", "quantization")  # options of --serve alone

plans = Verbs(
    """Plan: rank the layouts of a training run over a cluster, or plan a deployment (--serve).

    Examples:
      bagu plan --model llama3-70b --gpus 512 --gpu h100 --tokens 2e12
      bagu plan --serve --model llama3-8b --gpu h200 --rate 20 --tpot 30ms
    """
)


@plans.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    model: Annotated[str, Option(help="A model such as llama3-70b, or a config.json of Hugging Face or bagu.")] = "",
    gpus: Annotated[int | None, Option(help="Number of GPUs. Default: 8; with --serve as many as needed.")] = None,
    gpu: Annotated[
        str, Option(help="a100, a100-40gb, h100, h200, b200, l40s, 4090, or a cluster file (docs/planner.md).")
    ] = "h100",
    seq: Annotated[int, Option(help="Tokens per sequence.")] = 4096,
    batch: Annotated[int, Option(help="Sequences per step, over all GPUs.")] = 256,
    tokens: Annotated[float | None, Option(help="Tokens to train on, e.g. 2e12: adds days and cost.")] = None,
    precision: Annotated[str, Option(help="bf16 or fp8.")] = "bf16",
    top: Annotated[int, Option(help="Number of layouts to print.")] = 10,
    out: Annotated[Path | None, Option(help="A folder for plan.html and the plot.")] = None,
    workers: Annotated[
        str | None, Option(help='Instead of GPUs, workers of this machine, timed: "2x cpu:2,1x cpu:1".')
    ] = None,
    as_json: AsJson = False,
    serve: Annotated[bool, Option("--serve", help="Plan a deployment instead; the options below describe it.")] = False,
    rate: Annotated[float, Option(help="Requests per second.")] = 10.0,
    input_tokens: Annotated[int, Option(help="Tokens of a prompt.")] = 1024,
    output_tokens: Annotated[int, Option(help="Tokens of an answer.")] = 256,
    tpot: Annotated[str, Option(metavar="TIME", help="Limit of the time per output token, e.g. 30ms.")] = "50ms",
    ttft: Annotated[str, Option(metavar="TIME", help="Limit of the time to first token, e.g. 300ms.")] = "1000ms",
    quantization: Annotated[str | None, Option(help="int8, int4 or fp8 weights.")] = None,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if not model:
        raise typer.BadParameter("name a model, such as --model llama3-70b", param_hint="--model")
    for name in TRAINING if serve else DEPLOYMENT:
        if _given(context, name):
            option, what = "--" + name.replace("_", "-"), "training run" if serve else "deployment"
            hint = "leave it out, or leave out --serve" if serve else "leave it out, or add --serve"
            raise ArgumentError(f"{option} is an option for planning a {what}", hint=hint)
    check_files(*(path for path in (model, gpu) if Path(path).suffix))
    if workers is not None:
        from bagu.recipes.plan_workers import plan_workers

        given = {name for name in ("seq", "gpu", "gpus", "tokens", "precision", "top", "out") if _given(context, name)}
        if serve or given - {"seq"}:
            raise ArgumentError("--workers is for a training run on this machine's cores", hint="leave GPU options out")
        plan_workers(workers, model=model, seq=seq if "seq" in given else None, batch=batch, as_json=as_json)
        return
    from bagu.parallel.planner import command

    if serve:
        from bagu.bench.units import parse_ms

        command.serve(
            model=model,
            gpu=gpu,
            rate=rate,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            token_ms=parse_ms(tpot),
            first_token_ms=parse_ms(ttft),
            as_json=as_json,
            gpus=gpus,
            quantization=quantization,
        )
        return
    command.plan(
        model=model, gpus=8 if gpus is None else gpus, gpu=gpu, seq=seq, batch=batch, tokens=tokens,
        precision=precision, top=top, as_json=as_json, out=out, model_settings=_model_settings,
    )  # fmt: skip


def _given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _model_settings(model: ModelConfig) -> list[str]:
    """The settings by which `bagu train` makes this model: what differs from its default recipe's."""
    import json

    from bagu import config as configs
    from bagu.recipes.catalogue import recipe

    default = recipe("small").model
    if configs.to_dict(default) == configs.to_dict(model):
        return []
    words = []
    for name, value in configs.to_dict(model).items():
        if value != configs.to_dict(default)[name]:
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            words.append(f"model.{name}={text}" if isinstance(value, str | int | float) else f"'model.{name}={text}'")
    return words


@plans.command("validate")
def plan_validate(
    out: Annotated[Path | None, Option(help="A folder for validation.html and the plot.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with published measurements: errors per source, and the ranking of layouts.

    Examples:
      bagu plan validate
      bagu plan validate --out validation
    """
    from bagu.parallel.planner import command

    command.validation(out=out, as_json=as_json)
