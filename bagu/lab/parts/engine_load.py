"""The engine under arriving requests, on a clock of its own: the sum of the step times, which skips idle time.

On a CPU the engine has one thread and the time of a step is its CPU time: other programs on the machine, which a wall
clock would count as service, do not change the result. On a GPU it is the wall clock.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from bagu.lab.parts.tiny import tiny
from bagu.nn import Transformer
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling, TokenEvent

MODEL = tiny(512, 128, heads=4, kv_heads=2, ffn=352, max_len=512)
PROMPT = 8  # tokens


@dataclass(frozen=True, kw_only=True)
class Served:
    """Times of each request in seconds on the clock: arrival, submission to the engine (at the next step), first
    token, last token. `in_system` is the average number of requests that the engine holds, by its own count at every
    step; `total` is the whole time."""

    arrival: np.ndarray
    taken: np.ndarray
    first: np.ndarray
    last: np.ndarray
    answers: np.ndarray
    in_system: float
    total: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.last) / self.total

    @property
    def latency(self) -> np.ndarray:
        return self.last - self.arrival

    @property
    def tpot(self) -> np.ndarray:
        many = self.answers > 1
        return (self.last - self.first)[many] / (self.answers[many] - 1)


@contextmanager
def step_clock(model: Transformer) -> Iterator[Callable[[], float]]:
    """The clock for the steps of a model, and one thread while it is used."""
    before = torch.get_num_threads()
    on_cpu = model.embedding.weight.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    try:
        yield time.process_time if on_cpu else time.perf_counter
    finally:
        torch.set_num_threads(before)


def serve(
    model: Transformer, answers: Sequence[int], *, slots: int, arrivals: Sequence[float] | None = None, seed: int = 0
) -> Served:
    """Requests with these numbers of output tokens: at the times `arrivals`, or a closed loop of `slots` clients."""
    engine = Engine(model, None, EngineConfig(num_blocks=slots * 32, max_num_seqs=slots, prefix_cache=False))
    n, closed = len(answers), arrivals is None
    prompts = np.random.default_rng(seed).integers(MODEL.vocab_size, size=(n, PROMPT)).tolist()
    arrival = np.zeros(n) if arrivals is None else np.array(arrivals, dtype=float)
    taken, first, last, made = np.zeros(n), np.zeros(n), np.zeros(n), [0] * n
    queue, clock, area = deque(range(n)), 0.0, 0.0
    with step_clock(model) as tick:
        while queue or engine.has_work:
            if not engine.has_work and not closed:
                clock = max(clock, arrival[queue[0]])
            held = len(engine.scheduler.queues.requests)
            while queue and (held < slots if closed else arrival[queue[0]] <= clock):
                i = queue.popleft()
                held, taken[i] = held + 1, clock
                if closed:
                    arrival[i] = clock
                sampling = Sampling(max_tokens=int(answers[i]), temperature=0.0, ignore_eos=True)
                engine.submit(
                    Request(id=str(i), prompt=tuple(prompts[i]), sampling=sampling, arrival=float(arrival[i]))
                )
            held, began = len(engine.scheduler.queues.requests), tick()
            events = engine.step()
            took = tick() - began
            clock, area = clock + took, area + held * took
            for event in events:
                assert isinstance(event, TokenEvent)
                i = int(event.request_id)
                made[i] += 1
                first[i] = first[i] or clock
                last[i] = clock
    assert made == list(answers), "every request generates all its tokens"
    return Served(
        arrival=arrival,
        taken=taken,
        first=first,
        last=last,
        answers=np.array(answers),
        in_system=area / clock,
        total=clock,
    )
