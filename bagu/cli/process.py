"""`bagu process`: from a CSV to a model and to settings one may trust, or a refusal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.cli.help import Verbs

process = Verbs("Process data: a CSV in, settings one may trust or an honest refusal out.")

Data = Annotated[Path, Argument(metavar="DATA", help="A CSV file.")]
Target = Annotated[list[str] | None, Option(metavar="NAME:max|min", help="What to improve, e.g. yield:max.")]
Lang = Annotated[str, Option("--lang", help="en or zh.")]
Run = Annotated[Path, Argument(metavar="RUN", help="The folder of a fit.")]
Given = Annotated[list[str] | None, Option(metavar="NAME=VALUE,…", help="The context. Default: that of the last row.")]
Limits = Annotated[list[str] | None, Option("--limit", help='A limit, e.g. "purity >= 99.2"; repeatable.')]


@process.callback()
def one_thread() -> None:
    """Process data: a CSV in, settings one may trust or an honest refusal out."""
    # Read when numpy is imported. The bits of a BLAS product depend on its threads, and 1,000 rows gain nothing by two.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def show(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


@process.command()
def demo(
    plant: Annotated[str, Argument(metavar="[PLANT]", help="weld, coating, turbojet or reactor.")] = "reactor",
    out: Annotated[Path, Option(help="A new folder.")] = Path("runs/process_demo"),
    lang: Lang = "en",
) -> None:
    """A plant, its history, a model, three recommendations, and the truth beside them: about a minute.

    Examples:
      bagu process demo
      bagu process demo weld --out runs/weld
    """
    from bagu.process.commands import demo_lines

    show(demo_lines(plant, out, lang))


@process.command()
def look(
    data: Data,
    target: Target = None,
    lang: Lang = "en",
    write: Annotated[bool, Option(help="Write the guessed roles to DATA.toml, unless it exists.")] = True,
) -> None:
    """Report what is wrong with a table, and write the guessed role of each column to a TOML file.

    Examples:
      bagu process look data.csv
      bagu process look data.csv --target yield:max --lang zh
    """
    from bagu.process.commands import look_lines

    show(look_lines(data, target or (), lang, write=write))


@process.command()
def fit(
    data: Data,
    target: Target = None,
    limit: Limits = None,
    group: Annotated[list[str] | None, Option(help="A column whose rows belong together, e.g. batch.")] = None,
    time: Annotated[list[str] | None, Option(help="The column of the time.")] = None,
    minutes: Annotated[float, Option(help="The time budget.", min=0.0)] = 2.0,
    model: Annotated[list[str] | None, Option(help="Besides mean, ridge, gp: trees, mlp. Default: both.")] = None,
    out: Annotated[Path, Option(help="The folder of the run.")] = Path("runs/process"),
    lang: Lang = "en",
) -> None:
    """Fit models to a table and judge them on rows that they have not seen. A killed fit resumes.

    Examples:
      bagu process fit data.csv --target yield:max --out runs/line3
      bagu process fit data.csv --limit "purity >= 99.2" --group batch --time stamp
    """
    from bagu.process.commands import fit_lines
    from bagu.process.run import MODELS

    show(fit_lines(
        data, out, lang, targets=target or (), limits=limit or (), groups=group or (), times=time or (),
        models=MODELS if model is None else model, minutes=minutes,
    ))  # fmt: skip


@process.command()
def recommend(
    run: Run,
    given: Given = None,
    now: Annotated[list[str] | None, Option(metavar="NAME=VALUE,…", help="The present settings.")] = None,
    move: Annotated[list[str] | None, Option(metavar="NAME=MOST,…", help="The largest change of a setting.")] = None,
    recent: Annotated[
        Path | None, Option(metavar="CSV", help="The latest rows: the last one is the context, and drift is refused.")
    ] = None,
    probability: Annotated[float, Option(help="Asked of every limit.", min=0.5, max=0.9999)] = 0.95,
    lang: Lang = "en",
) -> None:
    """Recommend settings for a context, with a promise, or refuse and say why.

    Examples:
      bagu process recommend runs/line3 --given feed=0.42,ambient=31
      bagu process recommend runs/line3 --recent today.csv --move temp=5
    """
    from bagu.process.commands import recommend_lines

    show(
        recommend_lines(
            run, lang, given=given or (), now=now or (), moves=move or (), recent=recent, probability=probability
        )
    )


@process.command()
def whatif(
    run: Run,
    values: Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE,…", help="Inputs.")] = None,
    lang: Lang = "en",
) -> None:
    """Predict a row: the last one of the data with some inputs changed.

    Examples:
      bagu process whatif runs/line3 --set temp=190
    """
    from bagu.process.commands import whatif_lines

    show(whatif_lines(run, lang, values=values or ()))


@process.command()
def experiments(
    run: Run, given: Given = None, count: Annotated[int, Option(help="How many.", min=1, max=50)] = 6, lang: Lang = "en"
) -> None:
    """Say what to try next, and what each result would teach.

    Examples:
      bagu process experiments runs/line3 --count 6
    """
    from bagu.process.commands import experiment_lines

    show(experiment_lines(run, lang, given=given or (), count=count))


@process.command()
def backtest(run: Run) -> None:
    """Ask a model of the first 70 % about the rest: did runs near the recommendations do better?

    Examples:
      bagu process backtest runs/line3
    """
    from bagu.process.commands import backtest_lines

    show(backtest_lines(run))
