"""The speed of training and decode beside one busy process, of their speed on an idle machine.

>>> python -m benchmarks.tools.busy_machine [train | decode] --rounds 3

Each round measures the same work three times in turn: idle; beside a process that computes without end, with the number
of threads adjusted (bagu/machine/busy.py); and beside it with the number kept. Training is the step of `bagu bench
train` with a quarter of its tokens, decode is an engine of the 8M shape with 8 streams. The first seconds of each are
not counted: the number of threads changes in them. The machine must be idle.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from bagu.machine.openmp import wait_briefly

SETTLE_S = 2.5
STREAMS = 8
Work = Callable[[bool], int]  # one step, with the threads adjusted or not; its tokens


@contextmanager
def busy_process(wanted: bool) -> Iterator[None]:
    """A process that computes without end, if it is wanted."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def training() -> Work:
    import torch

    from bagu.bench.train import bagu_step
    from bagu.bench.train_shapes import SHAPES
    from bagu.machine.busy import ThreadCount

    shape = replace(SHAPES["cpu_6m"], lengths=SHAPES["cpu_6m"].lengths[:4])
    threads = ThreadCount()
    steps = bagu_step(shape, torch.device("cpu"), torch.float32, micro_batches=1, compiled=False, recompute="none")
    one_step = steps.__enter__()

    def work(adjusted: bool) -> int:
        if adjusted:
            threads.adjust()
        else:
            torch.set_num_threads(threads.most)
        one_step()
        return shape.tokens

    return work


def decoding() -> Work:
    import torch

    from bagu.nn import Transformer, init_weights, preset
    from bagu.serve.config import EngineConfig
    from bagu.serve.engine import Engine
    from bagu.serve.request import Request, Sampling, TokenEvent

    model = init_weights(Transformer(preset("cpu_8m")), 0).eval()
    engines = {
        adjusted: Engine(model, None, EngineConfig(max_model_len=512, num_blocks=512, adjust_threads=adjusted))
        for adjusted in (True, False)
    }
    most, number = torch.get_num_threads(), 0

    def work(adjusted: bool) -> int:
        nonlocal number
        engine = engines[adjusted]
        if not adjusted:
            torch.set_num_threads(most)
        while engine.stats().running + engine.stats().waiting < STREAMS:
            number += 1
            prompt = (number % 1000, *range(1, 64))
            engine.submit(Request(id=str(number), prompt=prompt, sampling=Sampling(max_tokens=400)))
        return sum(isinstance(event, TokenEvent) and event.token is not None for event in engine.step())

    return work


def speed(work: Work, seconds: float, *, busy: bool, adjusted: bool) -> float:
    """Tokens per second."""
    with busy_process(busy):
        began, tokens = time.perf_counter(), 0
        while time.perf_counter() - began < SETTLE_S:
            work(adjusted)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            tokens += work(adjusted)
        return tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("train", "decode"), default="train")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    if given.what == "decode":
        wait_briefly()  # as `bagu serve` does; `bagu train` leaves OpenMP's own setting
    work = {"train": training, "decode": decoding}[given.what]()
    cases = {
        "idle": {"busy": False, "adjusted": True},
        "busy, adjusted": {"busy": True, "adjusted": True},
        "busy, kept": {"busy": True, "adjusted": False},
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(given.rounds):
        for name, case in cases.items():
            found[name].append(speed(work, given.seconds, **case))
            print(f"{given.what}, round {turn + 1}, {name}: {found[name][-1]:,.0f} tokens/s", flush=True)
    idle = statistics.median(found["idle"])
    for name, speeds in found.items():
        middle = statistics.median(speeds)
        span = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        print(f"{given.what}, {name}: {middle:,.0f} tokens/s ({span}), {middle / idle:.2f} of idle")


if __name__ == "__main__":
    main()
