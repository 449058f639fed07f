"""Full speed from the first request: the steps that traffic will have run once before the server reports ready.

On a GPU the first step of a new size compiles kernels (Triton keeps them on disk) and captures a CUDA graph. `WarmUp`
lists these sizes in the order of likely use and runs them for a stated time. The engine's process runs the rest while
it is idle, one at a time: a request waits for one of them at most.

Prompts, sampling and short decodes are rehearsed by real requests. Decodes of longer contexts need no sequence of that
length: their graphs are captured with tables that name one block.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from bagu.serve.engine import Engine
from bagu.serve.graphs import CONTEXT, bucket
from bagu.serve.request import Request, Sampling

SHORTEST_PROMPT = 16  # tokens; shorter ones have its kernels
USUAL_CONTEXT = 4096  # tokens; graphs of longer contexts come last


@dataclass(frozen=True, slots=True)
class Decodes:
    """A decode step."""

    sequences: int
    context: int


def prompt_sizes(max_num_batched_tokens: int) -> Iterator[int]:
    """The tokens of steps with prompts: kernels are tuned for ranges that end at powers of two."""
    tokens = SHORTEST_PROMPT
    while tokens < max_num_batched_tokens:
        yield tokens
        tokens *= 2
    yield max_num_batched_tokens


def decode_sizes(max_num_seqs: int, max_model_len: int) -> list[Decodes]:
    """The buckets of decode steps (graphs.py). Usual contexts first, and of those the smallest batches."""
    counts = sorted({bucket(count) for count in range(1, max_num_seqs + 1)})
    contexts, context = [], CONTEXT
    while context < max_model_len:
        contexts.append(context)
        context *= 2
    contexts.append(max_model_len)
    sizes = [Decodes(count, context) for context in contexts for count in counts]
    return sorted(sizes, key=lambda size: size.context > USUAL_CONTEXT)  # stable


class WarmUp:
    """What is left to warm up in an engine. On a CPU this is nothing: C++ is compiled when the engine is built."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.left: deque[Callable[[], None]] = deque(self._tasks() if engine.runner.graphs is not None else ())

    def run(self, seconds: float) -> None:
        """Run the tasks until this time is over or none is left."""
        end = time.perf_counter() + seconds
        while self.left and time.perf_counter() < end:
            self.next()
        self.engine.blocks.reset_prefix_cache()

    def next(self) -> None:
        """Run the next task. The engine has no requests."""
        self.left.popleft()()

    def _tasks(self) -> Iterator[Callable[[], None]]:
        engine, graphs = self.engine, self.engine.runner.graphs
        assert graphs is not None
        limits, longest = engine.scheduler.config, graphs.max_model_len
        longest_prompt = max(1, engine.max_model_len - 1)
        for token, tokens in enumerate(prompt_sizes(limits.max_num_batched_tokens)):
            parts = [min(longest_prompt, tokens - start) for start in range(0, tokens, longest_prompt)]
            # a token of its own: else the prefix cache would have a part of the prompt
            yield partial(self._requests, parts, token % engine.model.config.vocab_size, new=1)
        sizes = decode_sizes(limits.max_num_seqs, longest)
        for count in sorted({min(size.sequences, limits.max_num_seqs) for size in sizes}):
            yield partial(self._requests, [1] * count, 0, new=3)
        if engine.ranks is None:  # with tp > 1 all ranks capture a graph together, in a step
            yield from (partial(self._capture, size) for size in sizes)

    def _requests(self, prompts: list[int], token: int, *, new: int) -> None:
        """Run requests with prompts of these lengths, as many as the pool has room for."""
        sampling, blocks = Sampling(max_tokens=new, temperature=0.5, ignore_eos=True), self.engine.blocks
        requests, room = [], blocks.num_blocks
        for number, length in enumerate(prompts):
            room -= -(-(length + new) // blocks.block_size)
            if room >= 0:
                requests.append(Request(id=f"warm-up-{number}", prompt=(token,) * length, sampling=sampling))
        self.engine.rehearse(requests)

    def _capture(self, size: Decodes) -> None:
        graphs = self.engine.runner.graphs
        if graphs is not None:
            with self.engine.computing():
                graphs.capture_decodes(size.sequences, size.context)
