"""`bagu tune`: search for faster settings on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.cli.options import OpDtype, group

tune = group("Tune kernels for this GPU; list calls without a tuning; report what a search gained.")


@tune.command("ops")
def tune_ops(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="The ops to tune. Default: all.")] = None,
    case: Annotated[list[str] | None, Option(help="Tune only this benchmark case; repeatable.")] = None,
    dtype: OpDtype = None,
    budget: Annotated[float, Option(help="Seconds to spend in all.")] = 300.0,
) -> None:
    """Measure the tuning space of Triton kernels and store what is faster than the defaults."""
    from bagu.bench import tune_ops as part

    raise typer.Exit(part.main(names or (), cases=case or (), dtype=dtype, budget=budget))


@tune.command("missing")
def tune_missing() -> None:
    """List the calls that found no tuning on a device that has some."""
    from bagu.bench.tune_report import show_missing

    show_missing()


@tune.command("report")
def tune_report() -> None:
    """Report time spent, gain over the defaults, and the records that are stale or unreadable."""
    from bagu.bench.tune_report import show_report

    show_report()


@tune.command("merge")
def tune_merge(files: Annotated[list[Path], Argument(metavar="FILE", help="Stores of other machines.")]) -> None:
    """Add the records of other stores to this machine's."""
    from bagu.ops.tuning.store import Store, merge, user_store

    typer.echo(f"{merge([Store(path) for path in files], user_store())} records added to {user_store().path}")
