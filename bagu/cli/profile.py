"""`bagu profile`: where the time of an op, a training step or the engine goes."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bagu.cli.found import check_model
from bagu.cli.help import Verbs
from bagu.cli.options import BenchDtype, Device, Model, ModelDtype, OpDtype

profile = Verbs("Profile an op, a training step or the engine: a trace, the time by operator, and advice.")


Out = Annotated[Path, Option(help="The folder for trace.json and the plot.")]
Steps = Annotated[int, Option(help="Number of profiled steps.", min=1)]


@profile.command("op")
def profile_op(
    name: Annotated[str, Argument(help="The op.")],
    dtype: OpDtype = None,
    device: Device = None,
    steps: Steps = 5,
    out: Out = Path("profiles/op"),
) -> None:
    """Profile the forward and backward of an op at its first benchmark case.

    Examples:
      bagu profile op rms_norm
      bagu profile op softmax --dtype fp32 --device cpu
    """
    from bagu.bench import profile_targets as part

    part.profile_op(name, out, dtype=dtype, device=device, steps=steps)


@profile.command("train")
def profile_train(
    old: Annotated[str | None, Argument(hidden=True)] = None,
    shape: Annotated[str, Option(help="A shape of `bagu bench train`: cpu_6m, llama_1b, gpt_d20, ...")] = "cpu_6m",
    dtype: BenchDtype = None,
    device: Device = None,
    steps: Steps = 3,
    out: Out = Path("profiles/train"),
) -> None:
    """Profile whole optimizer steps.

    Examples:
      bagu profile train
      bagu profile train --shape llama_1b --steps 5
    """
    if old is not None:
        print(f"bagu: profile train {old} is now --shape {old}; the old way works until 0.2", file=sys.stderr)
        shape = old
    from bagu.bench import profile_targets as part

    part.profile_train(shape, out, dtype=dtype, device=device, steps=steps)


@profile.command("serve")
def profile_serve(
    model: Model,
    streams: Annotated[int, Option(help="Number of sequences that decode at once.")] = 8,
    input_tokens: Annotated[int, Option(help="Tokens of a prompt.")] = 64,
    dtype: ModelDtype = "auto",
    device: Device = None,
    steps: Steps = 10,
    out: Out = Path("profiles/serve"),
) -> None:
    """Profile decode steps of the engine.

    Examples:
      bagu profile serve runs/demo/grpo
      bagu profile serve Qwen/Qwen3-0.6B --streams 32 --input-tokens 512
    """
    check_model(model)
    from bagu.bench import profile_targets as part
    from bagu.recipes.loader import Loader

    load = Loader(model=model, dtype=dtype, device=device)
    part.profile_serve(load, model, out, streams=streams, prompt=input_tokens, steps=steps)
