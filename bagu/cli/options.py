"""Options and helpers that several verbs share."""

import gc
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer import Option

from bagu.cli.help import grouped
from bagu.config import options


def takes(
    *classes: type[Any], groups: dict[str, str] | None = None, **others: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the options of dataclasses (bagu/config/options.py); it is called with one value of each class.
    `others` are options of typer that act by their callback, as --config does; the verb does not see their values.
    `groups` are headings of the help and the options below them (bagu/cli/help.py)."""
    found = [(cls, *parameter) for cls in classes for parameter in options.parameters(cls)]

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            values: dict[type[Any], dict[str, Any]] = {cls: {} for cls in classes}
            for cls, field, kind, note in found:
                values[cls][field.name] = _read(given[field.name], kind, note)
            verb(*(cls(**values[cls]) for cls in classes))

        types = others | {
            field.name: Annotated[_cli_type(kind, field, note), shown(note)] for _, field, kind, note in found
        }
        defaults = dict.fromkeys(others) | {field.name: _cli_default(field) for _, field, _, _ in found}
        run.__name__, run.__doc__, run.__annotations__ = verb.__name__, verb.__doc__, types
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
                for name, kind in types.items()
            ]
        )
        return grouped(**groups or {})(run)

    return decorate


def shown(note: options.Argument | options.Option) -> Any:
    """An option of a dataclass as typer's."""
    if isinstance(note, options.Argument):
        return typer.Argument(metavar=note.metavar, help=note.help)
    return Option(*note.flags, metavar=note.metavar, envvar=note.envvar, help=note.help, hidden=note.hidden)


def _cli_type(kind: Any, field: Any, note: options.Argument | options.Option) -> Any:
    """The type that typer reads: a repeatable option is a list or None, and what `parse` reads is a string. So is one
    of several names: the dataclass refuses others."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    repeatable = next((m for m in members if get_origin(m) is tuple), None)
    one = get_args(repeatable)[0] if repeatable else next(m for m in members if m is not NoneType)
    if getattr(note, "parse", None) is not None or get_origin(one) is Literal:
        one = str
    whole: Any = list[one] if repeatable else one  # type: ignore[valid-type]
    return whole | None if options.default_of(field) in (None, ()) else whole


def _read(value: Any, kind: Any, note: options.Argument | options.Option) -> Any:
    parse = getattr(note, "parse", None) or (lambda text: text)
    if get_origin(kind) is tuple:
        return tuple(map(parse, value or ()))
    return None if value is None else parse(value)


def _cli_default(field: Any) -> Any:
    default = options.default_of(field)
    return inspect.Parameter.empty if default is MISSING else None if default == () else default


@contextmanager
def dying_of_sigint() -> Iterator[None]:
    """Ctrl-C inside ends the process at once and without a word, as a program without a handler ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
LabResults = Annotated[Path, Option(help="The folder of lab results.")]
