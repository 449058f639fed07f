"""Verbs about this machine: doctor, version."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from bagu import __version__
from bagu.cli.options import AsJson


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
