"""The command line: one verb per job. A verb's module is imported when it is called, and imports the part it needs when
it runs: `--help` and lists answer at once."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import typer
from typer import Option

from bagu import __version__
from bagu.cli.help import SECTIONS, Verbs
from bagu.cli.lazy import LazyGroup, Place
from bagu.errors import BaguError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota reached, file size limit reached

MAKE, USE, LEARN, MEASURE, MACHINE = SECTIONS[:5]


class Program(LazyGroup):
    places: ClassVar = {
        "demo": Place(MAKE, "models", "demo"),
        "train": Place(MAKE, "models", "train"),
        "eval": Place(MAKE, "models", "evaluate"),
        "compare": Place(MAKE, "models", "compare"),
        "report": Place(MAKE, "models", "report"),
        "watch": Place(MAKE, "models", "watch"),
        "export": Place(MAKE, "models", "export"),
        "tokenizer": Place(MAKE, "models", "tokenizers"),
        "data": Place(MAKE, "data", "data"),
        "serve": Place(USE, "serve", "serve"),
        "chat": Place(USE, "serve", "chat"),
        "index": Place(USE, "index", "index"),
        "search": Place(USE, "index", "search"),
        "process": Place(USE, "process", "process"),
        "book": Place(LEARN, "book", "book"),
        "lab": Place(LEARN, "lab", "lab"),
        "drill": Place(LEARN, "drill", "drill"),
        "ops": Place(LEARN, "ops", "ops"),
        "plan": Place(LEARN, "plan", "plans"),
        "bench": Place(MEASURE, "bench", "bench"),
        "profile": Place(MEASURE, "profile", "profile"),
        "tune": Place(MEASURE, "tune", "tune"),
        "doctor": Place(MACHINE, "machine", "doctor"),
        "version": Place(MACHINE, "machine", "version"),
    }


app = Verbs(
    """bagu (八股): train, serve and benchmark language models on one machine.

    Examples:
      bagu demo               # from text to a served model, in minutes
      bagu serve --help       # the options of a command, and examples
    """,
    cls=Program,
    completion=True,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
) -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read with torch, whose profiler prints two lines a run without it
    if version:
        typer.echo(f"bagu {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the program `bagu`.

    A BaguError, and an OSError about a file or a full disk, print a message without a traceback and exit with status
    2. Set BAGU_TRACEBACK=1 to see the traceback.
    """
    if argv is None:
        warnings.showwarning = _once()
    try:
        app(args=argv, prog_name="bagu")
    except (BaguError, OSError) as error:
        message = _message(error)
        if message is None or os.environ.get("BAGU_TRACEBACK", "0") not in ("", "0"):
            raise
        print(f"bagu: {message}", file=sys.stderr)
        raise SystemExit(2) from None


def _once() -> Callable[..., None]:
    """What shows a warning: each text once in a run, without the line of code. Python's own rule shows it again when a
    library has changed the filters meanwhile, and torch does so often."""
    said: set[str] = set()

    def show(message: Warning | str, *where: object, **more: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            print(f"bagu: warning: {message}", file=sys.stderr)

    return show


def _message(error: BaguError | OSError) -> str | None:
    """The message to print instead of a traceback; None for an OSError that is not about a file or a full disk."""
    if isinstance(error, BaguError):
        return f"{error}" + (f"\n  -> {error.hint}" if error.hint else "")
    if error.errno in DISK_FULL:
        file = f"{error.filename}: " if error.filename else ""
        return f"{file}{error.strerror}\n  -> free some disk space, or write to another disk"
    return error.filename and f"{error.filename}: {error.strerror}\n  -> check the path and its permissions"
