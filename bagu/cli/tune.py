"""`bagu tune`: search for faster settings on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.bench.options import TuneServe
from bagu.cli.found import check_files, check_model
from bagu.cli.help import Verbs
from bagu.cli.options import AsJson, OpDtype, takes

tune = Verbs("Tune a server, or kernels for this GPU; list calls without a tuning; report what a search gained.")


@tune.command("ops")
def tune_ops(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="The ops to tune. Default: all.")] = None,
    case: Annotated[list[str] | None, Option(help="Tune only this benchmark case; repeatable.")] = None,
    sizes: Annotated[
        list[str] | None,
        Option(metavar="SIZES", help="Sizes instead of the first case's, e.g. M=4096,N=8192; repeatable."),
    ] = None,
    dtype: OpDtype = None,
    budget: Annotated[str, Option(metavar="TIME", help="Time to spend in all, e.g. 300s or 5m.")] = "300s",
    again: Annotated[bool, Option("--again", help="Search also what has a result already.")] = False,
) -> None:
    """Measure the tuning space of Triton kernels and store what is faster than the defaults.

    Examples:
      bagu tune ops rms_norm --budget 5m
      bagu tune ops matmul --sizes M=4096,N=8192,K=4096
    """
    from bagu.bench import tune_ops as part
    from bagu.bench.units import parse_seconds

    status = part.main(
        names or (),
        cases=case or (),
        shapes=sizes or (),
        dtype=dtype,
        budget=parse_seconds(budget),
        again=again,
    )
    raise typer.Exit(status)


@tune.command("missing")
def tune_missing(as_json: AsJson = False) -> None:
    """List the calls that found no tuning on a device that has some.

    Examples:
      bagu tune missing
    """
    from bagu.bench.tune_report import show_missing

    show_missing(as_json=as_json)


@tune.command("report")
def tune_report(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="Show each search of these ops.")] = None,
    as_json: AsJson = False,
) -> None:
    """Report time spent, gain over the defaults, and regret against the whole space.

    Examples:
      bagu tune report
      bagu tune report rms_norm
    """
    from bagu.bench.tune_report import show_report

    show_report(names or (), as_json=as_json)


@tune.command("merge")
def tune_merge(files: Annotated[list[Path], Argument(metavar="FILE", help="Stores of other machines.")]) -> None:
    """Add the records of other stores to this machine's.

    Examples:
      bagu tune merge other/tuning.jsonl
    """
    check_files(*files)
    from bagu.bench.tune_report import merge_stores

    merge_stores(files)


@tune.command("serve")
@takes(TuneServe)
def tune_serve(given: TuneServe) -> None:
    """Find the settings of `bagu serve` with the most requests per second within latency limits.

    Examples:
      bagu tune serve runs/demo/grpo --ttft 300ms --tpot 30ms
      bagu tune serve runs/demo/grpo --try max_num_seqs=4,16 --share 0.5
    """
    check_model(given.model)
    from bagu.bench.tune.roofline import roofline_of
    from bagu.bench.tune.serve import main
    from bagu.recipes.demo_server import running_server
    from bagu.recipes.find import find_model
    from bagu.recipes.models import check_predicts_tokens, model_config

    folder = find_model(given.model)
    check_predicts_tokens(folder, given.model)
    config = model_config(folder)
    raise typer.Exit(main(given, start=running_server, roofline=roofline_of(config), longest=config.max_len))
