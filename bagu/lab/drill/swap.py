"""`bagu drill try`: run the stack with an answer in place of bagu's part, beside the stack as it is.

Both runs are processes of their own: 50 steps of training on texts that count, then 32 requests to the engine, and what
each gave is compared. An op's answer goes in by `bagu.ops.swap`, another part as an attribute of that process.
It has the learner's rights: the answer has passed its trials in the sandbox before.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from bagu.errors import ArgumentError, BaguError
from bagu.lab.drill import catalogue
from bagu.lab.drill.core import Drill

PACKAGE = Path(__file__).parents[3]
START = "import sys; sys.path.append(sys.argv[1]); from bagu.lab.drill.swap import main; main(*sys.argv[2:])"
SETTINGS = (
    "model.num_layers=2", "model.hidden_size=128", "model.num_heads=2", "model.num_kv_heads=2", "model.vocab_size=384",
    "model.intermediate_size=256", "tokenizer.vocab_size=384", "data.context=64", "data.rows=4", "dedup=null",
)  # fmt: skip
REQUESTS, TOKENS = 32, 8
PLACES = ("sampling", "bpe", "ring_all_reduce")  # besides ops


def run_both(drill: Drill, file: Path, *, steps: int = 50) -> Iterator[str]:
    """The lines of `bagu drill try`: what each run gave, and what moved."""
    if not drill.op and drill.name not in PLACES:
        hint = f"parts that can be tried: the ops, {', '.join(PLACES)}"
        raise ArgumentError(f"{drill.name} has no place in the stack that a run would show", hint=hint)
    with tempfile.TemporaryDirectory() as folder:
        own = _child(drill, "", Path(folder) / "own", steps)
        mine = _child(drill, str(file.absolute()), Path(folder) / "mine", steps)
    yield f"{mine['replaced']}: called {mine['calls']:,} times"
    if "losses" in own:
        moved = max(abs(a - b) for a, b in zip(own["losses"], mine["losses"], strict=True))
        rate = mine["train_s"] / own["train_s"]
        yield f"{len(own['losses'])} training steps: loss {own['losses'][0]:.4f} -> {mine['losses'][-1]:.4f},"
        yield f"  largest difference to bagu's own {moved:.2e}; {rate:.2f} times its time"
    same = sum(a == b for a, b in zip(own["results"], mine["results"], strict=True))
    slower = mine["serve_s"] / own["serve_s"]
    yield f"{same} of {len(own['results'])} {own['kind']} are the same; {slower:.2f} times the time"


def _child(drill: Drill, answer: str, folder: Path, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-c", START, str(PACKAGE), drill.name, answer, str(folder), str(steps)]
    level = "1" if answer and "import triton" in Path(answer).read_text(encoding="utf-8") else ""
    settings = {
        **os.environ,
        "BAGU_NATIVE": "0",
        "OMP_NUM_THREADS": "1",
        **({"TRITON_INTERPRET": level} if level else {}),
    }
    run = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    if run.returncode:
        raise BaguError(
            f"the run with {answer or 'bagu itself'} failed: {(run.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    return dict(json.loads(run.stdout.strip().splitlines()[-1]))


def main(name: str, answer: str, folder: str, steps: str) -> None:
    """In such a process: run, and print what came out as JSON."""
    drill = catalogue.drill(name)
    with replaced(drill, answer) as placed:
        found = ring() if name == "ring_all_reduce" and not answer else None
        found = ring(load(answer)) if name == "ring_all_reduce" and answer else found
        found = found or train_and_serve(Path(folder), int(steps), temperature=0.8 if name == "sampling" else 0.0)
        print(json.dumps(found | {"calls": placed.calls, "replaced": placed.name}))


def train_and_serve(folder: Path, steps: int, *, temperature: float) -> dict[str, Any]:
    from bagu.recipes.fit import fit

    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    texts = [" ".join(words[i % 10] for i in range(start, start + 40)) for start in range(60)]
    began = time.perf_counter()
    run = fit(texts, steps=steps, out=folder, settings=SETTINGS)
    trained = time.perf_counter() - began
    losses = [
        row["loss_nats"]
        for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if "loss_nats" in row
    ]
    prompts = [" ".join(words[(i + k) % 10] for k in range(3)) for i in range(REQUESTS)]
    began = time.perf_counter()
    with run.model() as model:
        results = [model.generate(p, max_tokens=TOKENS, temperature=temperature, seed=7) for p in prompts]
    served = time.perf_counter() - began
    return {
        "losses": losses,
        "train_s": trained,
        "results": results,
        "serve_s": served,
        "kind": "answers of the engine",
    }


def load(file: str) -> ModuleType:
    loader = importlib.util.spec_from_file_location("answer", file)
    assert loader is not None and loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    sys.modules["answer"] = module
    loader.loader.exec_module(module)
    return module


def signature_checked(answer: ModuleType, function: str, parameters: int) -> Callable[..., Any]:
    """A function of the answer that takes this many arguments."""
    found = getattr(answer, function, None)
    if found is None or len(inspect.signature(found).parameters) != parameters:
        raise ArgumentError(f"the answer has no function {function} with {parameters} arguments", hint="see its stub")
    return found


@contextmanager
def replaced(drill: Drill, answer: str) -> Iterator[Any]:
    """The answer in place of bagu's part; yields its name and the number of calls."""
    if not answer or drill.name == "ring_all_reduce":
        yield SimpleNamespace(name="bagu" if not answer else drill.replaces, calls=0)
    elif drill.op:
        from bagu.ops import swap

        module, fixed = load(answer), drill.fixed
        kept = SimpleNamespace(
            forward=lambda **a: module.forward(**{k: v for k, v in a.items() if k not in fixed}),
            supports=lambda a: all(a[k] is v or a[k] == v for k, v in fixed.items()),
        )
        with swap(drill.op, kept) as placed:
            yield placed
    else:
        yield {"sampling": _sampler, "bpe": _tokenizer}[drill.name](load(answer))


def _sampler(answer: ModuleType) -> Any:
    """bagu.ops.sample by the answer's distribution, with the engine's own random numbers."""
    import torch

    from bagu import ops

    distribution = signature_checked(answer, "distribution", 4)
    placed = SimpleNamespace(name="bagu.ops.sample", calls=0)

    def sample(logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, u: Any, **_: Any) -> Any:
        placed.calls += len(logits)
        out = []
        for row in range(len(logits)):
            p = distribution(logits[row].double(), float(temperature[row]), int(top_k[row]), float(top_p[row]))
            edges = p.cumsum(0)
            out.append(int(torch.searchsorted(edges, u[row].double() * edges[-1], right=True).clamp(max=len(p) - 1)))
        return torch.tensor(out)

    ops.sample = sample  # type: ignore[assignment]
    return placed


def _tokenizer(answer: ModuleType) -> Any:
    """BpeTokenizer.encode by the answer's encode, word by word, with the merges of the tokenizer."""
    from tokenizers import Tokenizer, pre_tokenizers

    from bagu.data.tokenizer import BpeTokenizer

    encode = signature_checked(answer, "encode", 2)
    placed = SimpleNamespace(name="bagu.data.tokenizer:BpeTokenizer.encode", calls=0)
    alphabet = _byte_alphabet()
    known: dict[tuple[str, str], list[int]] = {}
    merges: dict[str, list[tuple[bytes, bytes]]] = {}
    own = BpeTokenizer.encode

    def by_answer(self: BpeTokenizer, text: str, *args: Any, **options: Any) -> Any:
        if args or options or any(s in text for s in ("<|", "|>")):
            return own(self, text, *args, **options)
        spec = json.loads(self.spec)
        vocab = spec["model"]["vocab"]
        if self.spec not in merges:
            pairs = [m.split(" ") if isinstance(m, str) else m for m in spec["model"]["merges"]]
            merges[self.spec] = [(_bytes(a, alphabet), _bytes(b, alphabet)) for a, b in pairs]
        back = {v: k for k, v in alphabet.items()}
        pre = Tokenizer.from_str(self.spec).pre_tokenizer or pre_tokenizers.ByteLevel()
        ids: list[int] = []
        for word, _ in pre.pre_tokenize_str(text):
            if (self.spec, word) not in known:
                placed.calls += 1
                pieces = encode(_bytes(word, alphabet), merges[self.spec])
                known[self.spec, word] = [vocab["".join(back[b] for b in p)] for p in pieces]
            ids += known[self.spec, word]
        return ids

    BpeTokenizer.encode = by_answer  # type: ignore[method-assign]
    return placed


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for 256 and on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def _bytes(word: str, alphabet: dict[str, int]) -> bytes:
    return bytes(alphabet[c] for c in word)


def ring(answer: ModuleType | None = None) -> dict[str, Any]:
    """The sums of three processes over Gloo, by bagu's ring or by the answer's, at several sizes."""
    import torch.multiprocessing as processes

    sizes = [10, 1000, 100_003]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        file = None if answer is None else answer.__file__
        processes.spawn(ring_rank, (folder, file, sizes), nprocs=3)
        seconds = time.perf_counter() - began
        results = json.loads((Path(folder) / "sums").read_text())
    return {"results": results, "serve_s": seconds, "kind": "sums over three processes (rounded to 1e-4)"}


def ring_rank(rank: int, folder: str, file: str | None, sizes: list[int]) -> None:
    """One of the processes."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
    sums = []
    for size in sizes:
        x = torch.randn(size, generator=torch.Generator().manual_seed(size + rank))
        y = x.clone()
        if file is None:
            dist.all_reduce(y)
        else:
            y = _ring_over_gloo(signature_checked(load(file), "all_reduce", 5), x, rank, dist, torch)
        sums.append([round(float(v), 4) for v in y[:64]])
    if rank == 0:
        (Path(folder) / "sums").write_text(json.dumps(sums))
    dist.destroy_process_group()


def _ring_over_gloo(all_reduce: Callable[..., Any], x: Any, rank: int, dist: Any, torch: Any) -> Any:
    pending = []

    def send(to: int, tensor: Any) -> None:
        held = tensor.detach().clone()
        size = torch.tensor([held.numel()])
        pending.append((dist.isend(size, to), size, dist.isend(held, to) if held.numel() else None, held))

    def recv(source: int) -> Any:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source)
        got = torch.empty(int(size))
        if len(got):
            dist.recv(got, source)
        return got

    y = all_reduce(x, rank, 3, send, recv)
    for size_sent, _, sent, _ in pending:
        size_sent.wait()
        if sent is not None:
            sent.wait()
    return y
