"""Options and helpers that several verbs share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def group(help: str) -> typer.Typer:
    """A verb with subcommands; without one it prints its help."""
    return typer.Typer(help=help, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection in a verb that imports torch and ends: it takes 0.1 s of the 3.1 s CPU of `ops list`."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


AsJson = Annotated[bool, Option("--json", help="Print JSON, and nothing else, on stdout.")]
Model = Annotated[str, Argument(metavar="MODEL", help="A run, a checkpoint, a Hugging Face folder or a model id.")]
TokenizerFolder = Annotated[str | None, Option(help="A folder with tokenizer.json. Default: the model's tokenizer.")]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:1. Default: the first GPU if there is one.")]
OpDtype = Annotated[str | None, Option(help="bf16, fp16, fp32 or fp64. Default: bf16 on a GPU, fp32 on a CPU.")]
ModelDtype = Annotated[str, Option(help="bf16, fp32 or auto. auto picks the faster one on this machine.")]
BenchDtype = Annotated[str | None, Option(help="bf16 or fp32. Default: the faster one on this machine.")]
ApiKey = Annotated[str | None, Option(envvar="BAGU_API_KEY", help="The API key that the server requires.")]
KVDtype = Annotated[str, Option(help="Dtype of the KV cache: auto (the model's), int8 or fp8.")]
TensorParallel = Annotated[
    int, Option("--tp", "--tensor-parallel-size", help="Divide the model over this many processes, one per GPU.")
]
PrefixCaching = Annotated[bool, Option(help="Reuse the KV cache of common prompt prefixes.")]
SharedPrefix = Annotated[int, Option(help="Number of leading tokens that all prompts have in common.")]
Rounds = Annotated[int, Option(help="How many times to run all implementations, in turn.")]
Results = Annotated[Path | None, Option(help="The folder of results. Default: benchmarks/results or a subfolder.")]
LabResults = Annotated[Path, Option(help="The folder of lab results.")]
