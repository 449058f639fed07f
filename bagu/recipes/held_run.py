"""`--resume auto`: one command that starts a run and, when it is given again, resumes it.

torchrun's restarts, a requeued Slurm job and a Kubernetes Job repeat their command. If the folder holds the run that
the command describes, it goes on; if it holds another one, a sentence names the first difference.
"""

from dataclasses import replace
from typing import Any

from bagu import config as configs
from bagu.errors import BaguError
from bagu.machine.device import named_device
from bagu.parallel.launch import code_digest
from bagu.recipes.run import Run, load_run
from bagu.recipes.training import resolved
from bagu.runs.folder import RunFolder

# how a step is divided over ranks: a resume may have another number of them
LAYOUT = ("mesh", "zero", "offload", "pipeline", "stages_per_rank", "context_parallel", "bucket_mb", "shares")
PROCESSES = ("servers", "workers")  # of a parameter server: likewise


def held_run(wanted: Run, folder: RunFolder, *, fitted: bool) -> Run:
    """The run in the folder, on the mesh of `wanted`. Raises if it is not `wanted`, or was made by other code.

    With `fitted` the context of the run was chosen by its data when it started, and is not compared.
    """
    held = load_run(folder.config_path)
    different = configs.diff(
        _compared(held, fitted=fitted), _compared(resolved(wanted, named_device(wanted.device)), fitted=fitted)
    )
    if different:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise BaguError(
            f"--resume auto: {folder.path} holds another run: {different[0]}{more}",
            hint="give another --out; to change a setting of this run: bagu train --resume --out … --set …",
        )
    code = (folder.environment() or {}).get("code")
    if code is not None and code != code_digest():
        raise BaguError(
            f"--resume auto: the run in {folder.path} was made by other code ({code}, and this is {code_digest()})",
            hint=f"to go on with this code: bagu train --resume --out {folder.path}",
        )
    layout = {name: getattr(wanted.train, name) for name in LAYOUT}
    if held.train.served is not None and wanted.train.served is not None:
        numbers = {name: getattr(wanted.train.served, name) for name in PROCESSES}
        layout["served"] = replace(held.train.served, **numbers)
    return replace(held, train=replace(held.train, **layout), wandb=wanted.wandb)


def _compared(run: Run, *, fitted: bool) -> dict[str, Any]:
    """What makes a run the same one: all settings but those of the layout."""
    tree: dict[str, Any] = configs.to_dict(run)
    tree.pop("wandb")
    for name in LAYOUT:
        tree["train"].pop(name)
    for name in PROCESSES if tree["train"]["served"] is not None else ():
        tree["train"]["served"].pop(name)
    tree["data"] |= {"tokens_per_step": run.data.rows_per_step * run.data.context}
    for name in ("rows", "micro_batches"):
        tree["data"].pop(name)
    if fitted:
        tree["data"].pop("context")
        tree["data"].pop("tokens_per_step")
    return tree
