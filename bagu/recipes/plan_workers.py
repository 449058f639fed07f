"""`bagu plan --workers`: time a few steps on all workers at once, and predict a step with equal and measured shares.

Workers run together, each on its cores, because cores share caches and memory: a worker that is timed alone looks
faster than it is in the run.
"""

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from bagu.data.random_batches import random_batches
from bagu.errors import ArgumentError
from bagu.machine.cores import usable_cores
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.parallel.local_ranks import on_ranks
from bagu.parallel.mesh import MeshConfig, open_mesh
from bagu.parallel.planner.models import model_of
from bagu.parallel.unlike.shares import TIMED, WARM_UP, divide, slowest
from bagu.parallel.unlike.workers import Cores, Worker, divide_cores, parse_workers
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """`seconds` of each worker for a micro-batch, its `shares` of a step, and the tokens a second with those shares and
    with equal ones. `rest_s` of a step are the exchange of gradients and the update."""

    workers: tuple[Worker, ...]
    seconds: tuple[float, ...]
    rest_s: float
    shares: tuple[int, ...]
    tokens_per_s: float
    equal_tokens_per_s: float

    @classmethod
    def of(
        cls, workers: Sequence[Worker], seconds: Sequence[float], rest_s: float, batch: int, tokens: int
    ) -> "Prediction":
        """For a step of `batch` micro-batches of `tokens` each."""
        shares, equal = divide(batch, seconds), divide(batch, (1.0,) * len(seconds))
        times = [slowest(counts, seconds) + rest_s for counts in (shares, equal)]
        return cls(
            workers=tuple(workers),
            seconds=tuple(seconds),
            rest_s=rest_s,
            shares=shares,
            tokens_per_s=batch * tokens / times[0],
            equal_tokens_per_s=batch * tokens / times[1],
        )

    def lines(self) -> list[str]:
        each = [
            f"worker {number} {worker!s:<6} {1e3 * seconds:8.1f} ms a micro-batch, {share} of {sum(self.shares)}"
            for number, (worker, seconds, share) in enumerate(zip(self.workers, self.seconds, self.shares, strict=True))
        ]
        gain = self.tokens_per_s / self.equal_tokens_per_s
        rates = f"{self.tokens_per_s:,.0f} tokens/s by speed, {self.equal_tokens_per_s:,.0f} with equal shares"
        return [*each, f"exchange and update {1e3 * self.rest_s:.1f} ms a step", f"predicted: {rates} ({gain:.2f}×)"]


def plan_workers(text: str, *, model: str, seq: int | None, batch: int, as_json: bool) -> None:
    """Print the prediction for a model; a micro-batch is one sequence of `seq` tokens (None: its context)."""
    workers = parse_workers(text, kinds=("cpu",))
    config = model_of(model)
    tokens = config.max_len if seq is None else seq
    if tokens > config.max_len or batch < len(workers):
        raise ArgumentError(
            f"{batch} sequences of {tokens} tokens for {len(workers)} workers and a context of {config.max_len}",
            hint="give --seq up to the context, and a --batch of one for each worker or more",
        )
    found = predicted(workers, config, tokens, batch)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
        return
    print(*found.lines(), sep="\n")
    print(f'\nbagu train DATA --workers "{text}"')


def predicted(workers: Sequence[Worker], model: ModelConfig, tokens: int, batch: int) -> Prediction:
    """Time the workers on this machine's cores."""
    cores = divide_cores(workers, usable_cores())
    times = on_ranks(len(workers), timed_steps, cores.of, model, tokens)
    seconds = [statistics.median(each["compute"]) for each in times]
    slow = [max(computed) for computed in zip(*(each["compute"] for each in times), strict=True)]
    rest = statistics.median(max(0.0, s - c) for s, c in zip(times[0]["step"], slow, strict=True))
    return Prediction.of(workers, seconds, rest, batch, tokens)


def timed_steps(cores: Sequence[Cores], model: ModelConfig, tokens: int) -> dict[str, list[float]]:
    """The seconds that this rank computes, and those of the whole step, of steps with one micro-batch a worker."""
    rank, device = dist.get_rank(), torch.device("cpu")
    cores[rank].pin(os.getpid())
    torch.set_num_threads(cores[rank].threads)
    mesh = open_mesh(MeshConfig(dp=len(cores)), device)
    config = TrainConfig(optimizer=OptimizerConfig(kind="adamw"), mesh=mesh.config, shares="measured")
    state = TrainState(init_weights(Transformer(model), 0), config, mesh=mesh)
    batches = random_batches(model.vocab_size, (tokens,) * len(cores), micro_batches=len(cores), device=device)
    found: dict[str, list[float]] = {"compute": [], "step": []}
    for number in range(WARM_UP + TIMED):
        dist.barrier()
        begun = time.perf_counter()
        step(state, batches)
        if number >= WARM_UP and state.shares is not None:
            found["step"].append(time.perf_counter() - begun)
            found["compute"].append(state.shares.computed[rank])
    return found
