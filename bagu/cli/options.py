"""Options and helpers that several verbs share."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer import Option

from bagu.config import options


def takes(*classes: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the options of dataclasses (bagu/config/options.py); it is called with one value of each class."""
    found = [(cls, *parameter) for cls in classes for parameter in options.parameters(cls)]

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            values: dict[type[Any], dict[str, Any]] = {cls: {} for cls in classes}
            for cls, field, kind, _ in found:
                value = given[field.name]
                values[cls][field.name] = tuple(value or ()) if get_origin(kind) is tuple else value
            verb(*(cls(**values[cls]) for cls in classes))

        types = {field.name: Annotated[_cli_type(kind, field), shown(note)] for _, field, kind, note in found}
        defaults = {field.name: _cli_default(field) for _, field, _, _ in found}
        run.__name__, run.__doc__, run.__annotations__ = verb.__name__, verb.__doc__, types
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
                for name, kind in types.items()
            ]
        )
        return run

    return decorate


def shown(note: options.Argument | options.Option) -> Any:
    """An option of a dataclass as typer's."""
    if isinstance(note, options.Argument):
        return typer.Argument(metavar=note.metavar, help=note.help)
    return Option(*note.flags, metavar=note.metavar, envvar=note.envvar, help=note.help)


def _cli_type(kind: Any, field: Any) -> Any:
    """typer reads a repeatable option as a list, or None."""
    if get_origin(kind) is not tuple:
        return kind
    return list[get_args(kind)[0]] if options.default_of(field) is MISSING else list[get_args(kind)[0]] | None  # type: ignore[misc]


def _cli_default(field: Any) -> Any:
    default = options.default_of(field)
    return inspect.Parameter.empty if default is MISSING else None if default == () else default


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


AsJson = Annotated[bool, shown(options.AS_JSON)]
Model = Annotated[str, shown(options.MODEL)]
TokenizerFolder = Annotated[str | None, shown(options.TOKENIZER)]
Device = Annotated[str | None, shown(options.DEVICE)]
OpDtype = Annotated[str | None, Option(help="bf16, fp16, fp32 or fp64. Default: bf16 on a GPU, fp32 on a CPU.")]
ModelDtype = Annotated[str, shown(options.MODEL_DTYPE)]
BenchDtype = Annotated[str | None, Option(help="bf16 or fp32. Default: the faster one on this machine.")]
ApiKey = Annotated[str | None, shown(options.API_KEY)]
KVDtype = Annotated[str, Option(help="Dtype of the KV cache: auto (the model's), int8 or fp8.")]
TensorParallel = Annotated[
    int, Option("--tp", "--tensor-parallel-size", help="Divide the model over this many processes, one per GPU.")
]
PrefixCaching = Annotated[bool, Option(help="Reuse the KV cache of common prompt prefixes.")]
SharedPrefix = Annotated[int, Option(help="Number of leading tokens that all prompts have in common.")]
Rounds = Annotated[int, Option(help="How many times to run all implementations, in turn.")]
Results = Annotated[Path | None, Option(help="The folder of results. Default: benchmarks/results or a subfolder.")]
LabResults = Annotated[Path, Option(help="The folder of lab results.")]
