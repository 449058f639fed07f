"""`bagu bench grpo`: where the time of a GRPO step goes, on random weights and random prompts.

The engine alone is measured first, on the same prompts: sampling inside training should be about as fast. The reward is
a constant pattern, so that every group has a gradient and no time is spent on rewards.
"""

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from bagu.bench.engine import random_model
from bagu.bench.engine_timing import measure_throughput
from bagu.bench.harness import Place, Rows, table
from bagu.bench.options import BenchSetting, GrpoBench
from bagu.bench.workload import Lengths, Workload, random_workload
from bagu.data.prompts import Prompt
from bagu.errors import ArgumentError
from bagu.machine.timing import reset_device
from bagu.nn.model import Transformer
from bagu.recipes.rollout import EngineSampler, engine_config
from bagu.runs.observer import Observer
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.train import OptimizerConfig, TrainConfig, fit
from bagu.train.rl.grpo import GroupRelative
from bagu.train.rl.loader import PromptLoader, RolloutConfig, RolloutLoader
from bagu.train.rl.reward_function import Sample, Scored
from bagu.train.rl.rollout import PackShape

PHASES = ("rollout_s", "reward_s", "prepare_s", "update_s", "step_s")
MICRO_BATCH = 16384  # tokens, at most


class Alternating:
    """1 for every other answer."""

    name = "alternating"

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        return [Scored(reward=float(i % 2)) for i in range(len(samples))]

    def close(self) -> None:
        pass


class Steps(Observer):
    """Keeps the metrics of each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_step(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        self.rows.append(dict(metrics))


def main(given: GrpoBench, setting: BenchSetting) -> int:
    """Time `steps` GRPO steps of `prompts` x `samples` answers of `new` tokens, after one to warm up."""
    place, samples, prompt, steps = Place.of(setting), given.samples, given.prompt, given.steps
    where, gpu = place.device, place.on_gpu
    prompts = (64 if gpu else 4) if given.prompts is None else given.prompts
    new = (256 if gpu else 32) if given.new is None else given.new
    if min(prompts, prompt, new, steps) < 1 or samples < 2:
        raise ArgumentError(
            f"{prompts} prompts of {prompt} tokens, {samples} samples of {new} tokens, {steps} steps",
            hint="each must be 1 or more, samples 2 or more",
        )
    rows = Rows.of(setting, "grpo")
    model, shape = random_model(given.shape, place)
    objective = GroupRelative(prompts=prompts, samples=samples, max_tokens=new, reward="alternating")
    lengths = Lengths(prompt, prompt), Lengths(new, new)
    asked = random_workload(prompts, *lengths, tokens=model.config.vocab_size, seed=0).prompts
    facts = {
        "system": "grpo",
        "implementation": "bagu",
        "model": shape,
        **place.facts,
        "objective": asdict(objective),
        "prompt_tokens": prompt,
    }
    measured = _measured(model, objective, asked, prompt + new, steps, where)
    rows.add([facts | measured])
    title = f"{shape}, {facts['dtype']}, {where}: {prompts} prompts × {samples} answers of {new} tokens"
    rows.finish(_table(title, measured), single=True)
    return 0


def _measured(
    model: Transformer,
    objective: GroupRelative,
    asked: Sequence[tuple[int, ...]],
    context: int,
    steps: int,
    device: torch.device,
) -> dict[str, Any]:
    answers, new = objective.prompts * objective.samples, objective.max_tokens
    config = engine_config(answers=answers, max_len=context, invariant=False)
    requests = tuple(p for p in asked for _ in range(objective.samples))
    alone = Workload(prompts=requests, max_tokens=(new,) * answers)
    rates = [_engine_rate(model, config, alone)]
    gc.collect()
    reset_device(device)
    before = _allocated(device)
    sampler = EngineSampler(model, None, config)
    beside = _allocated(device) - before - sampler.engine.runner.kv.num_bytes
    source = PromptLoader(
        sources={"random": [Prompt(id=str(i), ids=ids, text="", facts={}) for i, ids in enumerate(asked)]},
        held_out_prompts=(),
        config=RolloutConfig(
            prompts=objective.prompts,
            samples=objective.samples,
            max_tokens=new,
            epochs=1,
            minibatches=1,
            max_draws=1,
            fill=False,
            seed=0,
        ),
        shape=PackShape(tokens=max(min(MICRO_BATCH, answers * context), context), segments=answers, context=context),
    )
    loss, seen = objective.loss(model), Steps()  # type: ignore[abstract] # the other reports are not used
    loader = RolloutLoader(
        source, model=model, sampler=sampler, reward=Alternating(), learner=loss, decode=lambda ids: ""
    )
    train = TrainConfig(steps=steps + 1, optimizer=OptimizerConfig(lr=1e-6))
    fit(train, model, loader, loss=loss, observers=[seen])
    counted = [row | {"step_s": row["tokens"] / row["tokens_per_s"]} for row in seen.rows[1:]]
    median = {name: statistics.median(row[name] for row in counted) for name in (*PHASES, "rollout_tokens_per_s")}
    swap_s = _swap_seconds(sampler, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    del loader, sampler
    gc.collect()
    rates.append(_engine_rate(model.eval(), config, alone))
    return {
        **median,
        "engine_tokens_per_s": max(rates),  # before and after: Python's share of a step differs by 2 on a busy host
        "parity_nats": max(row["parity_nats"] for row in counted),
        "swap_s": swap_s,
        "engine_bytes_besides_kv": beside if device.type == "cuda" else None,
        "peak_bytes": peak,
    }


def _engine_rate(model: Transformer, config: EngineConfig, workload: Workload) -> float:
    """Output tokens/s of an engine that does nothing but sample."""
    measured = measure_throughput(Engine(model, None, config), [workload, workload])[-1]
    return measured.output_tokens / measured.seconds


def _swap_seconds(sampler: EngineSampler, device: torch.device, repeats: int = 5) -> float:
    """The time in which the engine takes notice of new weights, the median."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        sampler.weights_changed()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _table(title: str, row: Mapping[str, Any]) -> Table:
    whole = row["step_s"]
    lines = [
        (name, f"{row[key]:.3f} s", f"{100 * row[key] / whole:.0f} %")
        for name, key in (
            ("sampling", "rollout_s"),
            ("rewards", "reward_s"),
            ("logprobs, advantages", "prepare_s"),
            ("forward and backward", "update_s"),
            ("step", "step_s"),
        )
    ]
    share = row["rollout_tokens_per_s"] / row["engine_tokens_per_s"]
    lines += [
        ("sampling, tokens/s", f"{row['rollout_tokens_per_s']:,.0f}", f"{100 * share:.0f} % of the engine alone"),
        ("engine alone, tokens/s", f"{row['engine_tokens_per_s']:,.0f}", ""),
        ("weight swap", f"{1e3 * row['swap_s']:.1f} ms", ""),
        ("trainer against engine", f"{row['parity_nats']:.2g} nats", "at most"),
    ]
    if row["engine_bytes_besides_kv"] is not None:
        lines.append(("engine besides its KV cache", f"{row['engine_bytes_besides_kv'] / 2**20:.1f} MiB", ""))
    return table(title, ("phase", "median", "share"), lines)
