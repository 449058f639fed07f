"""`bagu ops`: list the ops, and show one."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bagu.cli.help import Verbs
from bagu.cli.options import AsJson, OpDtype, collector_paused
from bagu.errors import ArgumentError

ops = Verbs("List the ops; show the formula, cost and predicted time of one.")


@ops.command("list")
def ops_list() -> None:
    """List every op with its backends, gradients and bound (memory or compute).

    Examples:
      bagu ops list
    """
    with collector_paused():
        from bagu.bench import show
        from bagu.machine.terminal import Terminal

        show.list_ops(Terminal())


@ops.command("show")
def ops_show(
    name: Annotated[str, Argument(help="The op.")],
    sizes: Annotated[str, Option(help="Sizes, e.g. M=4096,N=4096. Default: the first benchmark case.")] = "",
    dtype: OpDtype = None,
    as_json: AsJson = False,
    measure: Annotated[bool, Option("--measure", help="Measure the ceilings again, even if recorded.")] = False,
    kernel: Annotated[
        bool, Option("--kernel", help="Compile its Triton kernels, without a GPU, and show registers, occupancy …")
    ] = False,
    arch: Annotated[str, Option(help="With --kernel: architecture to compile for.")] = "sm_90",
    config: Annotated[str, Option(help="With --kernel: a tuning, e.g. num_warps=8 or backward.block=1024.")] = "",
    diff: Annotated[
        tuple[str, str] | None,
        Option(metavar="A B", help="Two tunings to compare, '' is the default; implies --kernel."),
    ] = None,
    out: Annotated[Path | None, Option(help="With --kernel: folder for the stages. Default: kernels/NAME.")] = None,
) -> None:
    """Show one op: formula, arguments, backends, cases, cost and predicted time on this machine; or its kernels.

    Examples:
      bagu ops show rms_norm --sizes M=4096,N=4096
      bagu ops show softmax --kernel --arch sm_90
    """
    from bagu.bench import show
    from bagu.machine.terminal import Terminal

    if kernel or diff:
        show.show_op_kernels(
            name,
            Terminal(),
            out or Path("kernels") / name,
            size=sizes,
            dtype=dtype,
            arch=arch,
            config=config,
            diff=diff,
            as_json=as_json,
        )
    else:
        if config or out is not None:
            raise ArgumentError("--config and --out describe kernels", hint="add --kernel")
        show.show_op(name, Terminal(), size=sizes, dtype=dtype, as_json=as_json, measure=measure)
