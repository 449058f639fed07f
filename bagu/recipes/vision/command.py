"""`bagu train --recipe clip | groupvit | vlm | scenes` and `bagu demo --vision`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bagu import config as configs
from bagu.config import write_atomic
from bagu.data.pictures.glyphs import UNSEEN, imports
from bagu.errors import ArgumentError, BaguError
from bagu.recipes.verbs import TrainOptions
from bagu.recipes.vision.budget import SHARES, Budget
from bagu.recipes.vision.evaluate import answer_scores, clip_scores, segment_scores, vlm_scores
from bagu.recipes.vision.report import section, write_page
from bagu.recipes.vision.run import (
    Seeing,
    VisionRun,
    pace_of,
    steps_in,
    train_vision,
    vision_recipe,
    with_steps,
)
from bagu.runs.folder import RunFolder
from bagu.runs.stages import Stages

TAKEN = {"recipe", "data", "start", "steps", "minutes", "lr", "device", "settings", "out", "resume"}


def train_main(given: TrainOptions) -> int:
    """Train a recipe with pictures from the options of `bagu train`, and write its page."""
    imports()
    for name, value in configs.to_dict(given).items():
        if name not in TAKEN and value != getattr(TrainOptions(), name) and value not in ([], ()):
            raise ArgumentError(
                f"--{name.replace('_', '-')} is given, and recipe {given.recipe} has no use for it", hint="leave it out"
            )
    run = _built(given)
    done = train_vision(run, given.out, resume=given.resume, start=None if given.start is None else Path(given.start))
    scores = scores_of(done)
    write_atomic(given.out / "scores.json", json.dumps(scores, indent=2) + "\n")
    page = write_page([section(done, given.out, scores)], given.out / "report.html", f"{run.kind}: {given.out}")
    print(f"done\nmodel: {given.out / 'model'}\nscores: {given.out / 'scores.json'}\nreport: {page}", file=sys.stderr)
    return 0


def _built(given: TrainOptions) -> VisionRun:
    if given.resume:
        file = RunFolder(given.out).config_path
        if not file.is_file():
            raise BaguError(f"{given.out} holds no run to resume", hint="check --out, or leave --resume out")
        return configs.from_dict(VisionRun, json.loads(file.read_text("utf-8")))
    if given.minutes is not None and given.steps is not None:
        raise ArgumentError("--minutes is given with --steps", hint="leave one out")
    if len(given.data) > 1:
        raise ArgumentError(f"{len(given.data)} sources of pictures", hint="join them in one file of JSON lines")
    run = replace(vision_recipe(str(given.recipe)), data=given.data[0] if given.data else None, device=given.device)
    lr = [] if given.lr is None else [f"train.optimizer.lr={given.lr}"]
    run = configs.override(run, [*lr, *given.settings])
    if given.minutes is not None:
        return with_steps(run, steps_in(run, given.minutes))
    return run if given.steps is None else with_steps(run, given.steps)


def scores_of(done: Seeing) -> dict[str, Any]:
    """What the built-in data say about a model. A model of other pictures has no score here."""
    if done.run.data is not None:
        return {}
    match done.run.kind:
        case "clip":
            return clip_scores(done)
        case "groupvit":
            return segment_scores(done, None)
        case "vlm" | "scenes":
            return vlm_scores(done)


def demo_vision(out: Path, *, minutes: float = 5.0, seed: int = 0, console: Console | None = None) -> Path:
    """Train the recipes that fit in so many minutes on this machine's fonts, and write one page of what they see. A
    recipe whose share does not pay for its fewest steps is left out, and the others get its time."""
    imports()
    if out.exists() and any(out.iterdir()):
        raise BaguError(f"{out} is not empty", hint="give another folder with --out, or delete it")
    budget, sections = Budget(60 * minutes), []
    stages = Stages(len(SHARES) + 1, console=console)
    results: dict[str, Mapping[str, Any]] = {}
    left_out: dict[str, str] = {}
    for name in SHARES:
        run = vision_recipe(name)
        run = replace(run, train=replace(run.train, seed=seed))
        with stages.stage(f"Train and score {name}") as stage:
            pace = pace_of(run)
            steps = budget.steps(name, pace)
            if not steps:
                stage.result = left_out[name] = f"left out: {budget.reason(name, pace)}"
                continue
            run = with_steps(run, steps)
            done = train_vision(
                run, out / name, progress=stage.training(steps, formats={"loss_nats": "loss {:.3f} nats"})
            )
            results[name] = quick_scores(done)
            sections.append(section(done, out / name, results[name]))
            stage.result = f"{steps:,} steps of {run.rows} pictures, {done.seconds:.0f} s; "
            stage.result += headline(name, results[name])
    if not results:
        why = next(iter(left_out.values()))
        raise BaguError(f"{minutes:g} minutes are too few for any recipe: {why}", hint="give more --minutes")
    with stages.stage("Write the report") as stage:
        page = write_page(sections, out / "report.html", "bagu demo --vision", left_out)
        spent = budget.spent
        about = {"seconds": spent, "left_out": left_out, **results}
        write_atomic(out / "scores.json", json.dumps(about, indent=2) + "\n")
        stage.result = f"{page}, {spent:.0f} s in all"
    return page


def quick_scores(done: Seeing) -> dict[str, Any]:
    """The scores of a demo: fewer scenes, styles and languages than those of a run."""
    if done.run.kind == "groupvit":
        return segment_scores(done, None, count=12)
    if done.run.kind == "vlm":
        return {"answers": [answer_scores(done, count=32)]}
    return clip_scores(done, styles=UNSEEN[:1], languages=("en",))


def headline(name: str, scores: Mapping[str, Any]) -> str:
    if name == "clip":
        row = scores["unseen_style"][0]
        return f"name first for {row['r1']:.0%} of {row['style']}, nearest pixels {row['pixels_r1']:.0%}"
    if name == "groupvit":
        return f"mIoU {scores['groupvit']:.2f}, k-means of colours {scores['colours']:.2f}"
    row = scores["answers"][0]
    chance = row["chance_relation"]
    return f"captions exact {row['caption_exact']:.0%}, neighbours named {row['relation']:.0%}, chance {chance:.0%}"
