"""What `bagu train` and `bagu export` do with their arguments."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console

from bagu import config as configs
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError, UnknownName
from bagu.recipes.catalogue import recipe as find_recipe
from bagu.recipes.catalogue import with_data, with_start
from bagu.recipes.models import find_model, load_model, save_model
from bagu.recipes.run import Run
from bagu.recipes.training import DTYPES, train
from bagu.run import RunFolder
from bagu.train.report import write_report

__all__ = ["export_main", "train_main"]

PROMPTS = ("def ", "The ")


def train_main(
    data: list[str], *, recipe: str, config: Path | None, start: str | None, settings: list[str], out: Path,
    resume: bool, prompts: list[str], dry_run: bool,
) -> int:  # fmt: skip
    """Put a run together, carry it out, write its report. With `resume` the folder's own config is where it starts."""
    console = Console(stderr=True)
    if resume and RunFolder(out).is_run():
        if data or config is not None or start is not None:
            raise BaguError("a run that goes on keeps its data and start", hint="change the rest with --set")
        run = configs.load(Run, RunFolder(out).config_path)
    elif config is not None:
        run = with_start(with_data(configs.load(Run, config), data), start)
    else:
        run = with_start(with_data(find_recipe(recipe), data), start)
    run = configs.override(run, settings)
    if dry_run:
        print(json.dumps(configs.to_dict(run), indent=2))
        return 0
    done = train(run, out, resume=resume, prompts=prompts or PROMPTS)
    report = write_report(done.folder)
    again = f"bagu train --resume --out {out}"
    state = (
        f"stopped after {done.fit.step} of {run.train.steps} steps; go on: {again}" if done.fit.interrupted else "done"
    )
    console.print(f"{state}\nmodel: {out / 'model'}\nreport: {report}", highlight=False, soft_wrap=True)
    return 130 if done.fit.interrupted else 0


def export_main(model: str, out: Path, *, dtype: str | None) -> None:
    """Read MODEL, write a folder that other programs read."""
    if dtype is not None and dtype not in DTYPES:
        raise UnknownName.among("dtype", dtype, DTYPES)
    found = find_model(model)
    as_dtype: torch.dtype | None = None if dtype is None else DTYPES[dtype]
    loaded = load_model(found, dtype=as_dtype)
    places = (found, found.parent.parent / "tokenizer")  # of a checkpoint it is beside the run
    place = next((p for p in places if (p / "tokenizer.json").is_file()), None)
    save_model(loaded, None if place is None else BpeTokenizer.load(place), out)
    Console().print(f"{sum(p.numel() for p in loaded.parameters()):,} parameters → {out}", highlight=False)
