"""`bagu drill try`: run the stack with an answer in place of bagu's part, beside the stack as it is.

One process imports torch and forks the runs, which go on side by side: training on texts that count, then 32 requests
to the engine. What they gave is compared. The answer has the learner's rights: it has passed its trials in the sandbox
before.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bagu.errors import ArgumentError, BaguError
from bagu.lab.drill import catalogue
from bagu.lab.drill.core import Drill
from bagu.lab.drill.places import PLACES, replaced

PACKAGE = Path(__file__).parents[3]
START = "import sys; sys.path.append(sys.argv[1]); from bagu.lab.drill.swap import main; main(*sys.argv[2:])"
SETTINGS = (
    "model.num_layers=2", "model.hidden_size=128", "model.num_heads=2", "model.num_kv_heads=2", "model.vocab_size=384",
    "model.intermediate_size=256", "tokenizer.vocab_size=384", "data.context=64", "data.rows=4", "dedup=null",
)  # fmt: skip
EXPERTS = ("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.expert_size=128")
TWO_RANKS = ("train.mesh.dp=2", "data.rows=2", "data.micro_batches=2")  # a + b has the same bits in any order
MORE = {"softmax": EXPERTS, "ring_all_reduce": TWO_RANKS}  # what makes the model call the part
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
REQUESTS, TOKENS = 32, 8


def run_both(drill: Drill, file: Path, *, steps: int = 50) -> Iterator[str]:
    """The lines of `bagu drill try`: progress, what each run gave, and what moved."""
    check_place(drill, drill.levels[0])
    yield f"{steps} training steps and {REQUESTS} requests, with bagu's own part and with {file}:"
    said = yield from _child(drill.name, file.absolute(), steps)
    own, mine = said["own"], said["mine"]
    yield f"{mine['replaced']}: called {mine['calls']:,} times" + (
        "" if mine["calls"] else ": this run needs no such part"
    )
    moved = max(abs(a - b) for a, b in zip(own["losses"], mine["losses"], strict=True))
    rate = mine["train_s"] / own["train_s"]
    yield f"{len(own['losses'])} training steps: loss {own['losses'][0]:.4f} -> {mine['losses'][-1]:.4f},"
    yield f"  largest difference to bagu's own {moved:.2e}; {rate:.2f} times its time"
    same = sum(a == b for a, b in zip(own["results"], mine["results"], strict=True))
    slower = mine["serve_s"] / own["serve_s"]
    yield f"{same} of {len(own['results'])} answers of the engine are the same; {slower:.2f} times the time"


def check_place(drill: Drill, level: str) -> None:
    """Raise if an answer of this level cannot take the place of a part."""
    hint = f"parts that can be tried: the ops in Python, {', '.join(PLACES)}"
    if not drill.op and drill.name not in PLACES:
        raise ArgumentError(f"{drill.name} has no place in the stack that a run would show", hint=hint)
    if level == "cuda":
        raise ArgumentError("a kernel in CUDA C has no host code that the stack could call", hint=hint)


def _child(name: str, answer: Path, steps: int) -> Generator[str, None, dict[str, Any]]:
    """Yields the progress of the run with the answer; returns what both runs gave."""
    settings = {**os.environ, "BAGU_NATIVE": "0", "OMP_NUM_THREADS": "1"}
    if "import triton" in answer.read_text(encoding="utf-8"):
        settings["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", START, str(PACKAGE), name, str(answer), str(steps)]
    last = "?"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=settings) as child:
        assert child.stdout is not None
        for line in map(str.rstrip, child.stdout):
            if line.startswith("pretrain "):
                yield f"  {line}"
            last = line or last
    if child.returncode:
        raise BaguError(f"the runs with {answer} failed: {last}")
    return dict(json.loads(last))


def main(name: str, answer: str, steps: str) -> None:
    """In that process: run both, and print what came out as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        print("\n" + json.dumps(both(catalogue.drill(name), answer, Path(folder), int(steps))), flush=True)


def both(drill: Drill, answer: str, folder: Path, steps: int) -> dict[str, Any]:
    """What the run of bagu's own part and that of the answer gave, each in processes of their own."""
    import bagu.recipes.language_model
    import bagu.recipes.training  # noqa: F401  imported before the fork, for all runs

    rows = (json.dumps({"text": " ".join(WORDS[i % 10] for i in range(n, n + 40))}) for n in range(60))
    (folder / "texts.jsonl").write_text("\n".join(rows))
    ranks = 2 if drill.name == "ring_all_reduce" else 1
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2 * ranks, mp_context=forked) as pool:
        started = {}
        for kind, file in (("own", ""), ("mine", answer)):
            port = free_port()
            for rank in range(ranks):
                started[kind, rank] = pool.submit(one, drill, file, folder / kind, steps, rank, ranks, port)
        return {kind: started[kind, 0].result() for kind in ("own", "mine")}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def one(drill: Drill, answer: str, folder: Path, steps: int, rank: int, ranks: int, port: int) -> Mapping[str, Any]:
    """One rank of a run: train and, on rank 0, serve."""
    from bagu.parallel.launch import Place

    if rank or not answer:  # one run shows its progress
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
    os.environ["BAGU_CACHE"] = f"{folder}_cache"  # tokens that bagu's own part made are not read again
    place = Place(rank=rank, ranks=ranks, local_rank=None, host="127.0.0.1", port=port) if ranks > 1 else None
    with replaced(drill, answer) as placed:
        found = trained(folder, steps, MORE.get(drill.name, ()), place)
        if rank == 0:
            found |= served(folder, temperature=0.8 if drill.name == "sampling" else 0.0)
        return found | {"calls": placed.calls, "replaced": placed.name}


def trained(folder: Path, steps: int, more: tuple[str, ...], place: Any) -> dict[str, Any]:
    from bagu.recipes.catalogue import recipe, with_data
    from bagu.recipes.length import progress_of, with_steps
    from bagu.recipes.ranks import opened_mesh
    from bagu.recipes.run import with_settings
    from bagu.recipes.training import train

    run = with_data(recipe("small"), [str(folder.parent / "texts.jsonl")])
    run = with_steps(with_settings(run, [*SETTINGS, *more, "eval_batches=2"]), steps)
    began = time.perf_counter()
    with opened_mesh(run, place, folder) as mesh:
        train(run, folder, progress=progress_of(run, None), mesh=mesh)
    seconds = time.perf_counter() - began
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {"losses": [row["loss_nats"] for row in rows if "loss_nats" in row], "train_s": seconds}


def served(folder: Path, *, temperature: float) -> dict[str, Any]:
    from bagu.recipes.language_model import load

    prompts = [" ".join(WORDS[(i + k) % 10] for k in range(3)) for i in range(REQUESTS)]
    began = time.perf_counter()
    with load(folder) as model:
        results = model.generate(prompts, max_tokens=TOKENS, temperature=temperature, seed=7)
    return {"results": results, "serve_s": time.perf_counter() - began}
