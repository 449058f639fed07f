"""The command line: one verb per job. Each verb imports the part it needs when it runs, so `--help` stays fast."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer import Option

from bagu import __version__
from bagu.cli import models, serve
from bagu.cli.bench import bench
from bagu.cli.book import book
from bagu.cli.data import data
from bagu.cli.drill import drill
from bagu.cli.help import SECTIONS, Verbs
from bagu.cli.index import index, search
from bagu.cli.lab import lab
from bagu.cli.ops import ops
from bagu.cli.options import AsJson
from bagu.cli.plan import plans
from bagu.cli.process import process
from bagu.cli.profile import profile
from bagu.cli.tune import tune
from bagu.errors import BaguError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota reached, file size limit reached

app = Verbs(
    """bagu (八股): train, serve and benchmark language models on one machine.

    Examples:
      bagu demo               # from text to a served model, in minutes
      bagu serve --help       # the options of a command, and examples
    """,
    completion=True,
)
MAKE, USE, LEARN, MEASURE, MACHINE = SECTIONS[:5]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"bagu {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def doctor(
    as_json: AsJson = False,
    measure: Annotated[bool, Option(help="Measure memory bandwidth and matmul rate (about 2 s).")] = True,
    ray: Annotated[bool, Option("--ray", help="Start Ray here instead, and measure it.")] = False,
) -> None:
    """Describe this machine and list its problems, each with a fix.

    Examples:
      bagu doctor
      bagu doctor --no-measure --json
    """
    if ray:
        from bagu.parallel.server.on_ray import examine

        for line in examine():
            typer.echo(line)
        return
    from bagu.machine import doctor as part

    raise typer.Exit(part.main(as_json=as_json, measure=measure))


def version() -> None:
    """Print the versions of bagu, Python, torch and Triton.

    Examples:
      bagu version
    """
    import platform
    from importlib import metadata

    typer.echo(f"bagu {__version__}\nPython {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in ("torch", "triton"):
        try:
            typer.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"{name} is not installed")


for verb in (models.demo, models.train):
    app.command(section=MAKE)(verb)
app.command("eval", section=MAKE)(models.evaluate)
for verb in (models.compare, models.report, models.watch, models.export):
    app.command(section=MAKE)(verb)
app.add_typer(models.tokenizers, name="tokenizer", rich_help_panel=MAKE)
app.add_typer(data, name="data", rich_help_panel=MAKE)
for verb in (serve.serve, serve.chat, index, search):
    app.command(section=USE)(verb)
app.add_typer(process, name="process", rich_help_panel=USE)
app.add_typer(lab, name="lab", rich_help_panel=LEARN)
app.add_typer(drill, name="drill", rich_help_panel=LEARN)
app.command(section=LEARN)(book)
app.add_typer(ops, name="ops", rich_help_panel=LEARN)
app.add_typer(plans, name="plan", rich_help_panel=LEARN)
app.add_typer(bench, name="bench", rich_help_panel=MEASURE)
app.add_typer(profile, name="profile", rich_help_panel=MEASURE)
app.add_typer(tune, name="tune", rich_help_panel=MEASURE)
for verb in (doctor, version):
    app.command(section=MACHINE)(verb)


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
