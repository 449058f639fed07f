"""The error of a worker's cost (parallel/unlike/profile.py) on steps that it was not fitted to, three kinds of workers.

>>> python -m benchmarks.tools.step_cost

Each worker is a process with an engine of one random model: one thread, two threads, and one thread with int8 weights.
It measures itself as a replica does and then times other shapes, of each the fastest of some rounds. Two errors are
printed. `seconds` is that of the whole time. `busy` is that of the time that the core spent on the step, which other
processes have no part in, with the scale of the median step: the error of the formula on a machine of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from bagu.bench.harness import RESULTS, Rows, table
from bagu.parallel.unlike.profile import Step, Took

KINDS = ("cpu:1", "cpu:2", "cpu:1 int8")
PROMPTS = (16, 48, 100, 200, 320)
BATCHES = ((1, 100), (2, 32), (2, 192), (3, 64), (6, 40), (12, 100), (8, 200))


def errors(kind: str, rounds: int, hidden: int) -> dict[str, object]:
    """Measure an engine of this kind, then time the other shapes."""
    import torch

    from bagu.nn import ModelConfig, Transformer, init_weights
    from bagu.serve.config import EngineConfig
    from bagu.serve.engine import Engine
    from bagu.serve.worker.measure import measure_engine, step_times

    threads = int(kind[4])
    torch.set_num_threads(threads)
    config = ModelConfig(
        vocab_size=4096, hidden_size=hidden, num_layers=6, num_heads=hidden // 64, num_kv_heads=hidden // 128,
        head_dim=64, intermediate_size=3 * hidden, max_len=2048,
    )  # fmt: skip
    options = EngineConfig(
        threads=threads, quantization="int8" if "int8" in kind else None, max_num_seqs=64, kv_memory=200 << 20
    )
    engine = Engine(init_weights(Transformer(config), 0).eval(), None, options)
    cost, found = measure_engine(engine).cost, dict[Step, Took]()

    def keep(step: Step, took: Took) -> None:
        found[step] = Took(*map(min, took, found.get(step, took)))

    for turn in range(rounds):
        for n in PROMPTS:
            times = step_times(engine, [(turn, n, *[1] * (n - 2))], 1)
            keep(Step.of_prompt(n), Took(*map(sum, zip(*times, strict=True))))
        for n, context in BATCHES:
            times = step_times(engine, [(turn, n, i, *[1] * (context - 3)) for i in range(n)], 8)
            keep(Step.of_decodes([context + 4] * n), Took(*map(min, zip(*times[1:-1], strict=True))))
        engine.blocks.reset_prefix_cache()
    predicted = {step: cost.seconds(step) for step in found}
    scale = statistics.median(predicted[step] / took.busy for step, took in found.items())
    return {
        "worker": kind,
        "busy": statistics.mean(abs(predicted[s] / scale / took.busy - 1) for s, took in found.items()),
        "seconds": statistics.mean(abs(predicted[s] / took.seconds - 1) for s, took in found.items()),
        "left_out": cost.error, "load": os.getloadavg()[0],
        "steps": [{**step._asdict(), "predicted_s": predicted[step], **took._asdict()} for step, took in found.items()],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(errors(given.worker, given.rounds, given.hidden)))
        return
    rows, lines = Rows(given.out, default=RESULTS / "serve", as_json=False), list[tuple[str, ...]]()
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.tools.step_cost", "--worker", kind]
        command += ["--rounds", str(given.rounds), "--hidden", str(given.hidden)]
        environ = {**os.environ, "OMP_NUM_THREADS": kind[4]}
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout)
        rows.add([{"system": "step cost", "hidden": given.hidden, "rounds": given.rounds, **found}])
        lines.append((kind, *(f"{100 * found[name]:.1f} %" for name in ("busy", "seconds")), f"{found['load']:.1f}"))
    rows.finish(table("mean error of the cost of held-out steps", ("worker", "busy", "seconds", "load"), lines))


if __name__ == "__main__":
    main()
