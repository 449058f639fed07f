"""The implementation of `bagu train` and `bagu export`."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.text import Text

from bagu import config as configs
from bagu.config.options import to_arguments
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.machine.device import named_dtype
from bagu.machine.terminal import Terminal, counted
from bagu.nn.onnx_export import check_onnx, export_onnx
from bagu.parallel.launch import Place, find_place, use_own_gpu
from bagu.parallel.mesh import Mesh
from bagu.parallel.server.place import read_place
from bagu.recipes.catalogue import recipe as find_recipe
from bagu.recipes.catalogue import with_data, with_start
from bagu.recipes.explanation import Explanation
from bagu.recipes.find import find_model
from bagu.recipes.held_run import held_run
from bagu.recipes.length import progress_of, train_for, with_steps
from bagu.recipes.models import load_model, save_as_gguf, save_model, tokenizer_folder
from bagu.recipes.ranks import (
    asked_ranks,
    asked_workers,
    mesh_settings,
    one_sentence,
    opened_mesh,
    shares_said,
    start_ranks,
)
from bagu.recipes.run import Run, load_run, with_settings
from bagu.recipes.served import as_worker, start_group, with_servers
from bagu.recipes.summary import Summary
from bagu.recipes.training import Trained, check, train
from bagu.recipes.verbs import ExportOptions, TrainOptions
from bagu.runs.folder import RunFolder
from bagu.train.objective import Objective
from bagu.train.report import ReportData, read_run, write_report
from bagu.train.rl.policy_objective import PolicyObjective

PROMPTS = ("def ", "The ")
FILES = {"gguf": "a GGUF", "onnx": "an ONNX"}  # formats of one file
FORMATS = ("safetensors", *FILES)  # of `bagu export`
IDLE_STATUS = 3  # the exit status of a run that has learned nothing; 2 is an error
DEFAULT = "small"  # the recipe of a run that names none


def train_main(given: TrainOptions) -> int:
    """Build a run from the options, train it, and write its report. With `dry_run`, only check and print the run.

    With `resume` the run is read from the folder's config.json; if there is none, a new run starts from data, config or
    start. With `resume_auto` the options describe a run, which goes on if the folder holds it. With `nproc` this
    process starts so many ranks and waits for them.
    """
    if given.recipe == "token_table":  # a table has no model to run
        from bagu.recipes.token_table import main

        return main(given)
    place = find_place(os.environ)
    if place is not None:
        use_own_gpu(place)
    with one_sentence(place):
        if given.resume and given.resume_auto:
            raise ArgumentError("--resume and --resume auto are both given", hint="leave one out")
        divide = not given.resume and not _shapes_steps(given.settings)
        say = partial(print, "bagu:", file=sys.stderr, flush=True)
        run = _built(given, partial(mesh_settings, given=given, place=place, divide=divide))
        server_place = read_place()
        quiet = server_place is not None  # the launcher has said it
        run = with_servers(run, given, divide=divide, say=(lambda _: None) if quiet else say)
        if given.resume_auto and RunFolder(given.out).is_run():
            run = held_run(run, RunFolder(given.out), fitted=not _context_chosen(given))
            given = replace(given, resume=True)
        run.train.mesh.check_ranks(asked_ranks(run, given, place))
        if run.train.served is not None and server_place is None and not given.dry_run:
            again = to_arguments(given, without=("ray",))
            resume = given.resume or given.resume_auto  # one sentence before processes are started
            check(run, given.out, resume=resume, accept_data_change=given.accept_data_change)
            return start_group(run, given, again, say)
        alone = given.nproc is None and not asked_workers(run, given, place)
        if alone or place is not None or given.dry_run:
            return _train(run, replace(given, resume=given.resume or given.resume_auto), place)
        without = ("mesh", "nproc", "max_restarts", "hang_timeout", *(("resume",) if given.resume_auto else ()))
        again = to_arguments(given, without=without)
        return start_ranks(run, given, lambda mesh: ["train", *again, "--mesh", str(mesh)], say)


def _context_chosen(given: TrainOptions) -> bool:
    """Whether the options name the context of the run: that of a recipe is a default."""
    return given.config is not None or any(s.startswith("data.context=") for s in given.settings)


def _shapes_steps(settings: Sequence[str]) -> bool:
    """Whether settings say how a step is divided into micro-batches."""
    return any(setting.startswith(("data.micro_batches=", "data.rows=")) for setting in settings)


def _built(given: TrainOptions, on_mesh: Callable[[Run], list[str]]) -> Run:
    """The run that the options describe. `on_mesh` gives the settings that move it to the mesh that was asked for."""
    data, recipe, config, start, out = given.data, given.recipe, given.config, given.start, given.out
    resumed = given.resume and RunFolder(out).is_run()
    if recipe is not None and (config is not None or resumed):
        what = "the config of " + str(out if config is None else config)
        raise BaguError(
            f"--recipe {recipe} is given beside {what}", hint="leave --recipe out, and change settings with --set"
        )
    if resumed:
        if data or config is not None or start is not None:
            raise BaguError(
                "--resume is given with data, --config or --from, and a resumed run keeps its own",
                hint="leave them out; other settings can be changed with --set",
            )
        run = load_run(RunFolder(out).config_path)
    elif given.resume and not data and config is None and start is None:  # probably a mistyped --out, not a new run
        raise BaguError(f"{out} holds no run to resume", hint="check --out, or leave --resume out")
    elif config is not None:
        run = with_start(with_data(load_run(config), data), start)
    else:
        run = with_start(with_data(find_recipe(recipe or DEFAULT), data), start)
    if given.steps is not None:
        run = replace(run, train=replace(run.train, steps=given.steps)) if resumed else with_steps(run, given.steps)
    run = with_settings(run, [*on_mesh(run), *_named_settings(given), *given.settings])
    if given.reward:
        run = replace(run, objective=_with_reward(run.objective, given.reward))
    if given.wandb is not None:
        run = replace(run, wandb=given.wandb)
    if given.accept_data_change and not resumed:
        raise BaguError("--accept-data-change is given without a run to resume", hint="leave it out")
    if given.prompt and isinstance(run.objective, PolicyObjective):
        raise BaguError(
            f"--prompt is given, and objective {run.objective.kind!r} shows answers to its own prompts",
            hint="leave --prompt out, or give other prompts as data",
        )
    if given.prompt and run.train.sample_every is None:
        raise BaguError(
            "--prompt is given, and this run continues no prompts: train.sample_every is null",
            hint="leave --prompt out, or set train.sample_every",
        )
    return run


def _named_settings(given: TrainOptions) -> list[str]:
    """The settings that have an option of their own."""
    keys = {"train.steps": given.steps, "train.optimizer.lr": given.lr, "device": given.device}
    for setting in given.settings:
        key = setting.partition("=")[0].strip()
        if keys.get(key) is not None:
            raise ArgumentError(f"--{key.rpartition('.')[2]} and --set {key} are both given", hint="leave one out")
    if given.minutes is not None:
        others = ("steps", "resume", "resume_auto", "nproc", "mesh", "workers", "dry_run", "explain")
        if clash := next((name for name in others if getattr(given, name)), None):
            raise ArgumentError(f"--minutes is given with --{clash.replace('_', '-')}", hint="leave one of them out")
        if not 0 < given.minutes < float("inf"):
            raise ArgumentError(f"--minutes {given.minutes}", hint="more than 0")
    return [f"{key}={value}" for key, value in keys.items() if value is not None and key != "train.steps"]


def _train(run: Run, given: TrainOptions, place: Place | None) -> int:
    """Train a run, alone or as one of its ranks, and write its report."""
    out, resume, accept_data_change = given.out, given.resume, given.accept_data_change
    server_place = read_place()
    console = Terminal(stderr=True)
    explanation = Explanation(run, partial(console.print, highlight=False, soft_wrap=True, markup=False))

    def announce(mesh: Mesh | None, summary: Summary) -> None:
        for line in summary.lines():
            style = "yellow" if line.startswith("warning") else None
            console.print(Text(line, style=style or ""), highlight=False, soft_wrap=True)
        if given.explain:
            explanation.before(summary, mesh)

    chosen = _context_chosen(given) or (resume and RunFolder(out).is_run())
    if given.dry_run:
        summary = check(run, out, resume=resume, accept_data_change=accept_data_change, fit_context=not chosen)
        print(json.dumps(configs.to_dict(replace(run, data=summary.data)), indent=2))
        announce(None, summary)
        return 0
    with opened_mesh(run, place, out) as mesh:

        def start(run: Run, resume: bool, pause_after: int | None) -> Trained:
            return train(
                run,
                out,
                resume=resume,
                accept_data_change=accept_data_change,
                pause_after=pause_after,
                announce=partial(announce, mesh) if pause_after is None else None,
                prompts=given.prompt or PROMPTS,
                mesh=mesh,
                timeline=given.explain,
                fit_context=not chosen,
                progress=None if given.minutes is None else progress_of(run, pause_after),
                served=as_worker(run, server_place),
            )

        if given.minutes is None:
            done = start(run, resume, None)
        else:
            run, done = train_for(given.minutes, run, time.monotonic(), start)
    if given.explain and (place is None or place.rank == 0):
        explanation.after(mesh, done.fit)
    if (place is not None and place.rank > 0) or (server_place is not None and server_place.number > 0):
        return 130 if done.fit.interrupted else 0
    report = report_of(run, done)
    again = f"bagu train --resume --out {out}"
    steps = f"{done.fit.step} of {counted(run.train.steps, 'step')}"
    early = "" if done.fit.step == run.train.steps or done.fit.ended is None else f" after {steps}: {_why(done)}"
    state = f"stopped after {steps}; go on: {again}" if done.fit.interrupted else f"done{early}"
    state += "" if done.idle is None else f", and nothing was learned: {done.idle}"
    if run.train.shares == "measured" and (shares := shares_said(done.folder.metrics())) is not None:
        state += f"\n{shares}"
    after = "" if done.fit.interrupted else f"\nnext: {_next_command(run, done, out)}"
    said = f"{state}\nmodel: {out / 'model'}\nreport: {report}{after}"
    console.print(said, highlight=False, soft_wrap=True, markup=False)
    return 130 if done.fit.interrupted else 0 if done.idle is None else IDLE_STATUS


def _next_command(run: Run, done: Trained, out: Path) -> str:
    """What to do with the model of a finished run."""
    if run.objective.kind == "contrastive":
        return f"bagu index DOCUMENTS --out idx --embedder {out}"
    if run.objective.kind in ("mlm", "reward"):
        return f"bagu serve {out}"
    if done.tokenizer.chat_template is not None and (run.init_from is not None or run.objective.kind == "sft"):
        return f"bagu chat {out}"
    return f"bagu eval {out} continue4, or bagu train CHATS --recipe sft --from {out} --out runs/sft"


def _why(done: Trained) -> str:
    """Why a run ended before its last step."""
    ended = done.fit.ended or {}
    if "metric" not in ended:
        return "the reward has reached objective.stop_reward"
    return (
        f"{ended['metric']} was best at step {ended['best_step']} ({ended['best']:.4g}), "
        f"{ended['evaluations_since']} evaluations ago"
    )


def _with_reward(objective: Objective, reward: tuple[str, ...]) -> Objective:
    if not isinstance(objective, PolicyObjective):
        raise BaguError(
            f"--reward is given, and objective {objective.kind!r} has no reward",
            hint="use --recipe grpo or ppo, or leave it out",
        )
    return replace(objective, reward=reward[0] if len(reward) == 1 else reward)


def report_of(run: Run, done: Trained) -> Path:
    """Write the report of a run, with the tables of its objective."""
    shown = read_run(done.folder)
    tables = run.objective.tables(done.data, run.eval_batches)
    return write_report(ReportData(title=shown.name, runs=[shown], tables=tables), done.folder.report)


def export_main(given: ExportOptions) -> None:
    """Write MODEL as a Hugging Face folder, a GGUF file, or an ONNX graph."""
    out, dtype, quantization = given.out, given.dtype, given.quantization
    ending = out.suffix.removeprefix(".")
    format = given.format or (ending if ending in FILES else "safetensors")
    if format not in FORMATS:
        raise UnknownName.among("format", format, FORMATS)
    if quantization is not None and format != "gguf":
        raise ArgumentError(
            f"--gguf-type {quantization} is for GGUF, and the format is {format}", hint="name a .gguf file"
        )
    if format in FILES and (out.suffix != f".{format}" or out.is_dir()):
        hint = f"name a file, such as {out / f'model.{format}'}"
        raise ArgumentError(f"{out} is not the name of {FILES[format]} file", hint=hint)
    if format == "onnx":
        check_onnx(dtype)
    if RunFolder(out).environment_path.is_file():
        raise BaguError(f"{out} is a run, and an export would write over its config.json", hint="give another folder")
    as_dtype = None if dtype is None else named_dtype(dtype)
    found = find_model(given.model)
    loaded = load_model(found, dtype=torch.float32 if format == "onnx" else as_dtype)
    place = tokenizer_folder(found)
    tokenizer = None if place is None else BpeTokenizer.load(place)
    if format == "gguf":
        save_as_gguf(loaded, tokenizer, out, quantization or "f16")
    elif format == "onnx":
        export_onnx(loaded, out)
    else:
        save_model(loaded, tokenizer, out, start=found)
    Terminal().print(
        f"{sum(p.numel() for p in loaded.parameters()):,} parameters → {out}", highlight=False, soft_wrap=True
    )
    if format != "onnx":
        Terminal().print(f"next: bagu serve {out}", highlight=False, soft_wrap=True)
