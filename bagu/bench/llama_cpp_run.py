"""Time llama.cpp on a GGUF file: one stream, greedy. A script, run in a process of its own by llama_cpp_peer.py.

    python llama_cpp_run.py FILE VOCAB PROMPT NEW REPEATS THREADS

Prints one JSON line per repeat, after one warmup: decode tokens per second after the first token, and prompt tokens per
second up to it. It calls llama.cpp's C functions: the Python class around them costs time for each token.
"""

import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np


class Model:
    def __init__(self, path: str, vocab_size: int, length: int, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.vocab_size = vocab_size
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model: Any = llama_cpp.llama_model_load_from_file(path.encode(), settings)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = length, 2048, 512
        context.n_threads = context.n_threads_batch = threads
        self.context: Any = llama_cpp.llama_init_from_model(self.model, context)

    def next_token(self, tokens: list[int]) -> int:
        """Run the tokens after those before, and return the most probable next one."""
        given = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(given, len(tokens))):
            raise SystemExit("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)


def main() -> None:
    path, vocab_size, prompt, new, repeats, threads = sys.argv[1], *map(int, sys.argv[2:])
    model, drawn = Model(path, vocab_size, prompt + new + 8, threads), np.random.default_rng(0)
    for repeat in range(repeats + 1):
        model.clear()
        ids = drawn.integers(0, vocab_size, prompt).tolist()
        began = time.perf_counter()
        token = model.next_token(ids)
        first = time.perf_counter()
        for _ in range(new - 1):
            token = model.next_token([token])
        done = time.perf_counter()
        row = {
            "streams": 1,
            "tokens_per_s": (new - 1) / (done - first),
            "prompt_tokens_per_s": prompt / (first - began),
            "threads": threads,
            "llama_cpp_python": llama_cpp.__version__,
            "features": llama_cpp.llama_print_system_info().decode(),  # the instructions that it was compiled for
        }
        if repeat:
            print(json.dumps(row))


if __name__ == "__main__":
    main()
