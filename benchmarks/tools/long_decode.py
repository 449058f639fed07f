"""The time of a decode step behind a long text on a CPU: attention to all tokens, and to chosen blocks of them.

    taskset -c 0,1 python -m benchmarks.tools.long_decode --threads 2

Both engines have the same weights (8M, random: the time depends on sizes only) and the same text of --length tokens in
their KV cache. Their steps alternate, so that other work on the machine slows both.
"""

import argparse
import json
import statistics
import time
from typing import Literal

import torch

from bagu.machine.device import this_machine
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling, TokenEvent

MODEL = ModelConfig(
    vocab_size=4096, hidden_size=256, num_layers=8, num_heads=4, num_kv_heads=4, head_dim=64, intermediate_size=704,
    max_len=65536,
)  # fmt: skip


def prefilled(model: Transformer, prompt: list[int], new: int, config: EngineConfig) -> Engine:
    engine = Engine(model, config=config)
    sampling = Sampling(max_tokens=new, temperature=0.0, ignore_eos=True)
    engine.submit(Request(id="text", prompt=tuple(prompt), sampling=sampling))
    while not any(isinstance(event, TokenEvent) for event in engine.step()):
        pass
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32_768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    prompt = torch.randint(MODEL.vocab_size, (given.length,), generator=torch.Generator().manual_seed(0)).tolist()
    engines: dict[str, Engine] = {}
    filled: dict[str, float] = {}
    ways: tuple[Literal["softmax", "blocks"], ...] = ("softmax", "blocks")
    for attention in ways:
        began = time.perf_counter()
        config = EngineConfig(
            attention=attention, block_size=64, threads=given.threads, max_model_len=given.length + 256,
            num_blocks=given.length // 64 + 8, prefix_cache=False,
        )  # fmt: skip
        model = init_weights(Transformer(MODEL), 0)
        engines[attention] = prefilled(model, prompt, given.steps + 8, config)
        filled[attention] = time.perf_counter() - began
        print(f"{attention}: {given.length:,} tokens in the cache after {filled[attention]:.1f} s", flush=True)
    wall: dict[str, list[float]] = {name: [] for name in engines}
    cpu: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(given.steps + 4):
        for name, engine in engines.items():
            began, used = time.perf_counter(), time.process_time()
            engine.step()
            if number >= 4:
                wall[name].append(1e3 * (time.perf_counter() - began))
                cpu[name].append(1e3 * (time.process_time() - used))
    row = {
        "machine": this_machine().name, "threads": given.threads, "length": given.length, "steps": given.steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        **{f"{name}_{kind}_ms": round(statistics.median(times[name]), 2)
           for kind, times in (("wall", wall), ("cpu", cpu)) for name in engines},
        **{f"{name}_least_ms": round(min(wall[name]), 2) for name in engines},
        "dense_over_sparse": round(statistics.median(wall["softmax"]) / statistics.median(wall["blocks"]), 2),
        "prefill_s": {name: round(s, 1) for name, s in filled.items()},
    }  # fmt: skip
    print(json.dumps(row))


if __name__ == "__main__":
    main()
