"""`bagu bench train`: how fast a whole optimizer step runs, beside peers in the same run.

An implementation is a function that makes one step on random tokens and returns when its loss is on the host. Each gets
the same tokens a step, a warm-up, and the same clock: a sample is one step, the device idle at both ends.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bagu.bench.train_peers import PEERS
from bagu.bench.train_shapes import SHAPES, Shape
from bagu.data.random_batches import random_batches
from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.machine.device import named_device, named_dtype
from bagu.machine.environment import environment
from bagu.machine.fast_dtype import compute_dtype_name
from bagu.machine.timing import forget
from bagu.nn import count
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.runs.record import append_rows, record_file
from bagu.train.optim import OptimizerConfig
from bagu.train.prepare import prepared
from bagu.train.state import TrainConfig, TrainState
from bagu.train.step import step

__all__ = ["main"]

RESULTS = Path("benchmarks/results/train")


@contextmanager
def bagu_step(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, micro_batches: int, compiled: bool, recompute: str
) -> Iterator[Callable[[], float]]:
    """One step of bagu's trainer: fp32 masters, AdamW, clipping, the guard; all that a real run does but its data."""
    config = TrainConfig(
        steps=10**6, compile=compiled, activation_checkpointing=recompute,  # type: ignore[arg-type]
        optimizer=OptimizerConfig(kind="adamw", lr=1e-4),
    )  # fmt: skip
    model = Transformer(shape.model, device=device, dtype=dtype)
    init_weights(model, seed=0)
    state = TrainState(model, config)
    batches = random_batches(shape.model.vocab_size, shape.lengths, micro_batches=micro_batches, device=device)
    with prepared(model, config, device):
        yield lambda: step(state, batches).loss
    state.close()


def timed(one_step: Callable[[], float], device: torch.device, *, steps: int, warmup: int = 3) -> list[float]:
    """Seconds of each of `steps` steps after the warm-up; a loss that is not finite is an error, not a time."""
    samples = []
    for i in range(warmup + steps):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        loss = one_step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - start)
        if not loss < float("inf"):
            raise BaguError(f"the loss of step {i} is {loss}", hint="a benchmark of a broken run means nothing")
    return samples[warmup:]


def _row(name: str, shape: Shape, samples: Sequence[float], device: torch.device, settings: dict[str, Any]) -> dict:
    flops = sum(count.flops(shape.model, n).training * n for n in shape.lengths)
    median = statistics.median(samples)
    return {
        "system": "train", "implementation": name, "tokens": shape.tokens, "tokens_per_s": shape.tokens / median,
        "step_s": median, "low_s": min(samples), "high_s": max(samples), "samples": len(samples),
        "tflop_per_s": flops / median / 1e12,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None, **settings,
    }  # fmt: skip


def _script(path: Path) -> dict[str, Any]:
    """Run a peer's own script, unmodified; the last line of its output is JSON with `tokens_per_s`."""
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    try:
        found = json.loads(run.stdout.strip().splitlines()[-1])
        rate = float(found["tokens_per_s"])
    except (IndexError, ValueError, KeyError, TypeError) as error:
        last = (run.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise BaguError(
            f"{path} (exit status {run.returncode}) did not end in a line of JSON with tokens_per_s: {last}"
        ) from error
    return {"system": "train", "implementation": path.name, "tokens_per_s": rate, "reported": found}


def main(
    shape: str | None,
    *,
    peers: Sequence[str] = (),
    steps: int = 20,
    micro_batches: Sequence[int] = (1,),
    compiled: Sequence[bool] = (False,),
    recompute: str = "none",
    rounds: int = 1,
    dtype: str | None = None,
    device: str | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> int:
    """Time bagu and the peers, `rounds` times in turn, print a table and append the rows to `out`.

    Without `dtype` they compute in the one that is fast here.
    """
    for name, value in [("steps", steps), ("rounds", rounds), *(("micro_batches", m) for m in micro_batches)]:
        if value < 1:
            raise ArgumentError(f"{name} is {value}", hint="at least 1")
    where = named_device(device)
    shape = shape or ("llama_1b" if where.type == "cuda" else "cpu_6m")
    if shape not in SHAPES:
        raise UnknownName.among("shape", shape, SHAPES)
    unknown = [p for p in peers if p not in PEERS and not Path(p).is_file()]
    if unknown:
        raise UnknownName.among("peer", unknown[0], [*PEERS, "PATH.py"])
    dtype = dtype or compute_dtype_name(where)
    chosen, as_dtype = SHAPES[shape], named_dtype(dtype)
    record = record_file(out or RESULTS)
    rows: list[dict[str, Any]] = []
    for _ in range(rounds):
        for c in compiled:
            for m in micro_batches:
                name = "bagu compiled" if c else "bagu"
                settings = {"dtype": dtype, "micro_batches": m, "recompute": recompute}
                forget(where)
                with bagu_step(
                    chosen, where, as_dtype, micro_batches=m, compiled=c, recompute=recompute
                ) as one_step:  # fmt: skip
                    rows.append(_row(name, chosen, timed(one_step, where, steps=steps), where, settings))
        for peer in peers:
            if peer in PEERS:
                forget(where)
                with PEERS[peer](chosen, where, as_dtype) as one_step:
                    rows.append(_row(peer, chosen, timed(one_step, where, steps=steps), where, {"dtype": dtype}))
            else:
                rows.append(_script(Path(peer)))
    env, common = environment(), {"shape": shape, "model": asdict(chosen.model), "device": str(where)}
    rows = [row | common | {"env": env} for row in rows]
    append_rows(record, rows)
    if as_json:
        print(json.dumps(rows))
    else:
        _show(chosen, rows)
    return 0


def _show(shape: Shape, rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{shape.why}; {shape.words()} a step", title_justify="left")
    for head in ("implementation", "micro-batches", "tokens/s", "TFLOP/s", "peak memory", "against the fastest peer"):
        table.add_column(head, justify="left" if head == "implementation" else "right")
    peers = [r["tokens_per_s"] for r in rows if not r["implementation"].startswith("bagu")]
    for row in rows:
        tflops, peak = row.get("tflop_per_s"), row.get("peak_bytes")
        table.add_row(
            row["implementation"], str(row.get("micro_batches", "–")), f"{row['tokens_per_s']:,.0f}",
            f"{tflops:,.1f}" if tflops else "–", f"{peak / 2**30:.1f} GiB" if peak else "–",
            f"{row['tokens_per_s'] / max(peers):.2f}×" if peers else "–",
        )  # fmt: skip
    Console().print(table)
