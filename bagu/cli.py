"""The command line: one verb per job. It parses, looks up and calls; a part is imported when its verb runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bagu import __version__
from bagu.errors import BaguError

__all__ = ["main"]


def _group(help: str) -> typer.Typer:
    return typer.Typer(help=help, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


app = typer.Typer(
    help="bagu (八股): the canon of LLM infrastructure as one package, every number measured.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = _group("Measure: every op against its peers and the machine's ceilings.")
ops = _group("The catalogue of ops: what each means, costs and should take here.")
lab = _group("Labs: a textbook claim, measured with the real parts.")
app.add_typer(bench, name="bench")
app.add_typer(ops, name="ops")
app.add_typer(lab, name="lab")

AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else there.")]
Dtype = Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp64; by default bf16 on a GPU, fp32 on a CPU.")]
LabOut = Annotated[Path, typer.Option(help="The folder of results.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"bagu {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def doctor(
    as_json: AsJson = False,
    measure: Annotated[bool, typer.Option(help="Measure bandwidth and matmul rate, 2 s.")] = True,
) -> None:
    """What this machine is, and what is wrong with it."""
    from bagu import doctor as part

    raise typer.Exit(part.main(as_json=as_json, measure=measure))


@bench.command("ops")
def bench_ops(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Ops to time; all by default.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this bench case; may be repeated.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend of bagu; may be repeated.")] = None,
    dtype: Dtype = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One case an op, small sizes; recorded only with --out.")
    ] = False,
    compile: Annotated[
        bool | None, typer.Option(help="torch.compile as a peer, seconds a case; by default unless --quick.")
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[bool, typer.Option(help="Draw a picture per op beside the record.")] = True,
    out: Annotated[Path | None, typer.Option(help="The folder of the record; by default benchmarks/results.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default the first GPU.")] = None,
) -> None:
    """Every op and backend against torch eager, torch.compile and Liger, as a share of the measured ceiling."""
    from bagu.ops import bench as part

    raise typer.Exit(
        part.main(
            names or (),
            cases=case or (),
            backends=backend or (),
            dtype=dtype,
            quick=quick,
            compiled=compile,
            as_json=as_json,
            draw=plot,
            out=out,
            device=device,
        )
    )


@ops.command("list")
def ops_list() -> None:
    """Every op: signature, backends, gradients, what bounds it."""
    from rich.console import Console

    from bagu.ops import show

    show.list_ops(Console())


@ops.command("show")
def ops_show(
    name: str,
    size: Annotated[
        str, typer.Option(help="Sizes of the cost, e.g. M=4096,N=4096; by default the first timed case.")
    ] = "",
    dtype: Dtype = None,
    as_json: AsJson = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the ceilings now, even if some are recorded.")
    ] = False,
) -> None:
    """One op: formula, arguments, backends, cases, cost, predicted time on this machine."""
    from rich.console import Console

    from bagu.ops import show

    show.show_op(name, Console(), size=size, dtype=dtype, as_json=as_json, measure=measure)


@lab.command("list")
def lab_list() -> None:
    """Every lab with its claim."""
    from rich.console import Console

    from bagu.lab import list_labs

    list_labs(Console())


@lab.command("run")
def lab_run(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Labs to run; all by default.")] = None,
    out: LabOut = Path("labs"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, a few seconds a lab.")] = False,
) -> None:
    """Measure a claim, draw it, and say whether it held."""
    from bagu.lab import run_labs

    raise typer.Exit(run_labs(names or (), out=out, quick=quick))


@lab.command("report")
def lab_report(out: LabOut = Path("labs")) -> None:
    """One HTML page with all results of this machine."""
    from bagu.lab import write_report

    typer.echo(write_report(out))


def main(argv: Sequence[str] | None = None) -> None:
    """The program `bagu`. A BaguError is told without a traceback, with exit status 2; BAGU_TRACEBACK=1 shows it."""
    try:
        app(args=argv, prog_name="bagu")
    except BaguError as error:
        if os.environ.get("BAGU_TRACEBACK", "0") not in ("", "0"):
            raise
        print(f"bagu: {error}" + (f"\n  -> {error.hint}" if error.hint else ""), file=sys.stderr)
        raise SystemExit(2) from None
