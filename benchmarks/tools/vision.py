"""Measure the recipes with pictures: train each for so many minutes on so many cores, and score it beside what needs no
learning. A line of JSON per run goes to --out.

    python -m benchmarks.tools.vision clip --minutes 8 --threads 2
    python -m benchmarks.tools.vision groupvit --minutes 6 --threads 2 --seeds 3
    python -m benchmarks.tools.vision vlm --minutes 12 --threads 2
    python -m benchmarks.tools.vision all --threads 2                # these three, one after another
"""

import argparse
import json
import platform
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bagu import config as configs
from bagu.nn.vision.group import GroupViTConfig
from bagu.nn.vision.towers import TowersConfig
from bagu.recipes.vision.evaluate import clip_scores, segment_scores, vlm_scores
from bagu.recipes.vision.run import Seeing, VisionRun, steps_in, train_vision, vision_recipe, with_steps

MINUTES = {"clip": 8.0, "groupvit": 6.0, "vlm": 12.0}


def plain(run: VisionRun) -> VisionRun:
    """The run with a ViT of the same layers instead of the GroupViT: what its patches know without groups."""
    assert isinstance(run.model, TowersConfig) and isinstance(run.model.image, GroupViTConfig)
    group = run.model.image
    layers = group.vit.num_layers + sum(s.layers for s in group.stages)
    return replace(run, kind="groupvit", model=replace(run.model, image=replace(group.vit, num_layers=layers)))


def one(name: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    run = configs.override(vision_recipe(name), given.set)
    run = replace(run, device=given.device, train=replace(run.train, seed=seed))
    steps = given.steps or steps_in(run, given.minutes or MINUTES[name])
    run = with_steps(run, steps)
    with tempfile.TemporaryDirectory() as scratch:
        keep = Path(given.keep) if given.keep else Path(scratch)
        began = time.monotonic()
        done = train_vision(run, keep / f"{name}-{seed}")
        scores: dict[str, Any]
        if name == "clip":
            scores = clip_scores(done)
        elif name == "vlm":
            scores = vlm_scores(done)
        else:
            other: Seeing = train_vision(plain(run), keep / f"plain-{seed}")
            scores = segment_scores(done, other)
    return {
        "recipe": name, "seed": seed, "steps": steps, "rows": run.rows, "set": given.set, "threads": given.threads,
        "train_s": round(done.seconds, 1), "train_cpu_s": round(done.cpu_seconds, 1),
        "all_s": round(time.monotonic() - began, 1),
        "parameters": sum(p.numel() for p in done.model.parameters()),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "machine": platform.processor() or platform.machine(), "device": str(next(done.model.parameters()).device),
        "torch": torch.__version__, "scores": scores,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=[*MINUTES, "all"])
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--keep", help="a folder for the runs")
    parser.add_argument("--out", type=Path, default=Path("vision.jsonl"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name in MINUTES if given.recipe == "all" else (given.recipe,):
        seeds = 3 if given.recipe == "all" and name == "groupvit" else given.seeds
        for seed in range(given.seed, given.seed + seeds):
            row = one(name, given, seed)
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
