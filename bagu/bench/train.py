"""`bagu bench train`: the speed of a full optimizer step, with peers in the same run.

An implementation is a function that runs one step on random tokens and returns its loss on the host. All get the same
tokens per step and a warmup. A sample is one step, with the device idle at both ends.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bagu import ops
from bagu.bench.harness import Rows, StepTimes, check_peers, script_rates, table, time_steps
from bagu.bench.options import BenchSetting, TrainBench
from bagu.bench.train_peers import PEERS as LIBRARIES
from bagu.bench.train_peers import Implementation
from bagu.bench.train_shapes import SHAPES, Shape
from bagu.bench.units import tera
from bagu.data.random_batches import random_batches
from bagu.errors import ArgumentError, UnknownName
from bagu.machine.device import named_device, named_dtype
from bagu.machine.fast_dtype import compute_dtype_name
from bagu.nn import Transformer, count, init_weights
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step
from bagu.train.prepare import prepared


@contextmanager
def bagu_step(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    micro_batches: int,
    compiled: bool,
    recompute: str,
    fp8: bool = False,
) -> Iterator[Callable[[], float]]:
    """One step of bagu's trainer: fp32 master weights, AdamW, clipping, the guard; a real step except for its data."""
    config = TrainConfig(
        steps=10**6,
        compile=compiled,
        activation_checkpointing=recompute,  # type: ignore[arg-type]
        optimizer=OptimizerConfig(kind="adamw", lr=1e-4),
        precision="fp8" if fp8 else None,
    )
    model = Transformer(shape.model, device=device, dtype=dtype)
    init_weights(model, seed=0)
    state = TrainState(model, config)
    batches = random_batches(shape.model.vocab_size, shape.lengths, micro_batches=micro_batches, device=device)
    with prepared(model, config, device):
        yield lambda: step(state, batches).loss
    state.close()


@contextmanager
def _flash_attention_step(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Callable[[], float]]:
    """bagu's step with the torch backend of attention, which is FlashAttention-2 on a GPU, and all else the same."""
    automatic = ops.attention
    ops.attention = partial(automatic, backend="torch")
    try:
        with bagu_step(shape, device, dtype, micro_batches=1, compiled=False, recompute="none") as one_step:
            yield one_step
    finally:
        ops.attention = automatic


PEERS: dict[str, Implementation] = LIBRARIES | {"flash-attention": _flash_attention_step}


def _row(name: str, shape: Shape, times: StepTimes) -> dict[str, Any]:
    flops = sum(count.flops(shape.model, n).training * n for n in shape.lengths)
    samples = times.seconds
    median = statistics.median(samples)
    return {
        "implementation": name,
        "tokens": shape.tokens,
        "tokens_per_s": shape.tokens / median,
        "step_s": median,
        "low_s": min(samples),
        "high_s": max(samples),
        "samples": len(samples),
        "tflop_per_s": flops / median / 1e12,
        "peak_bytes": times.peak_bytes,
    }


def main(given: TrainBench, setting: BenchSetting) -> int:
    """Time bagu and the peers, `rounds` times in turn; print a table and append the rows to the record.

    With `fp8`, bagu without torch.compile is also timed with the products of linear layers in fp8.
    """
    micro_batches = given.micro_batches or (1,)
    counts = [("steps", given.steps), ("rounds", given.rounds), *(("micro_batches", m) for m in micro_batches)]
    for name, value in counts:
        if value < 1:
            raise ArgumentError(f"{name} is {value}", hint="use at least 1")
    where = named_device(setting.device)
    shape = given.shape or ("llama_1b" if where.type == "cuda" else "cpu_6m")
    UnknownName.check("shape", shape, SHAPES)
    check_peers(given.peer, PEERS)
    dtype = setting.dtype or compute_dtype_name(where)
    chosen, as_dtype = SHAPES[shape], named_dtype(dtype)
    rows = Rows.of(setting, "train")
    common = {"system": "train", "shape": shape, "model": asdict(chosen.model), "device": str(where)}
    ways: list[tuple[str, dict[str, Any]]] = [("bagu", {"compiled": False})]
    ways += [("bagu compiled", {"compiled": True})] if given.compile else []
    ways += [("bagu fp8", {"compiled": False, "fp8": True})] if given.fp8 else []
    for _ in range(given.rounds):
        for name, options in ways:
            for m in micro_batches:
                cut: dict[str, Any] = {"micro_batches": m, "recompute": given.recompute}
                settings = {"dtype": dtype, **cut}
                create = partial(bagu_step, chosen, where, as_dtype, **options, **cut)
                times = time_steps(create, where, steps=given.steps)
                rows.add([common | _row(name, chosen, times) | settings])
        for peer in given.peer:
            if peer not in PEERS:
                found = script_rates(Path(peer))[-1]
                rate = {"tokens_per_s": float(found["tokens_per_s"]), "reported": found}
                rows.add([common | {"implementation": Path(peer).name} | rate])
                continue
            times = time_steps(partial(PEERS[peer], chosen, where, as_dtype), where, steps=given.steps)
            rows.add([common | _row(peer, chosen, times) | {"dtype": dtype}])
    rows.finish(_table(chosen, rows.all))
    return 0


def _table(shape: Shape, rows: Sequence[dict[str, Any]]) -> Table:
    peers = [r["tokens_per_s"] for r in rows if not r["implementation"].startswith("bagu")]
    heads = ("implementation", "micro-batches", "tokens/s", "TFLOP/s", "peak memory", "against the fastest peer")
    lines = []
    for row in rows:
        tflops, peak = row.get("tflop_per_s"), row.get("peak_bytes")
        lines.append(
            (
                row["implementation"],
                str(row.get("micro_batches", "–")),
                f"{row['tokens_per_s']:,.0f}",
                tera(tflops) if tflops else "–",
                f"{peak / 2**30:.1f} GiB" if peak else "–",
                f"{row['tokens_per_s'] / max(peers):.2f}×" if peers else "–",
            )
        )
    return table(f"{shape.why}; {shape.words()} per step", heads, lines)
