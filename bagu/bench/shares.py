"""`bagu bench shares`: data-parallel workers of unlike speed, with equal shares and with shares by measured speed.

A worker's speed is emulated: it waits before each micro-batch, so that one takes `wait_ms` over its speed in all. The
small model computes for less than that, the processes hardly compete for the cores of this machine, and everything else
(times, shares, exchange of gradients, updates) is the trainer's. Both kinds of shares are timed in the same processes,
in turn.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from bagu.bench.harness import RESULTS, Rows, table
from bagu.bench.options import SharesBench
from bagu.bench.parallel import CPU
from bagu.data.random_batches import random_batches
from bagu.errors import ArgumentError
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.parallel.local_ranks import on_ranks
from bagu.parallel.mesh import MeshConfig, open_mesh
from bagu.parallel.unlike.shares import TIMED, WARM_UP, divide, slowest
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step
from bagu.train.cross_entropy import CrossEntropy
from bagu.train.loss import MicroBatchLoss

TOKENS = 64  # of a micro-batch
MODEL = ModelConfig(
    vocab_size=256,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    max_len=TOKENS,
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Tokens a second of each kind of shares, medians over rounds, and what was predicted before the rounds."""

    speeds: tuple[float, ...]
    shares: tuple[int, ...]
    equal_tokens_per_s: float
    measured_tokens_per_s: float
    predicted_tokens_per_s: float
    ratio: float  # measured over equal shares, median over the rounds
    possible: float  # the same by the speeds alone, without exchange and with whole micro-batches
    rounds: int


class Waiting(CrossEntropy):
    """Cross-entropy of a worker that takes `wait_s` for each micro-batch, of which it computes for a part."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s
        self._computed = 0.0
        self._begun: float | None = None

    def new_step(self) -> None:
        """What comes before the next micro-batch is not computing of the last."""
        self._begun = None

    def __call__(self, *args: Any, **kwargs: Any) -> MicroBatchLoss:
        if self._begun is not None:
            self._computed = time.perf_counter() - self._begun
        time.sleep(max(0.0, self.wait_s - self._computed))
        self._begun = time.perf_counter()
        return super().__call__(*args, **kwargs)


def main(given: SharesBench) -> int:
    """Time both kinds of shares, print a table and append the row to `out`."""
    try:
        speeds = tuple(float(word) for word in given.speeds.split(","))
    except ValueError:
        raise ArgumentError(f"--speeds {given.speeds!r}", hint="numbers, such as 1,1,1,0.5") from None
    if len(speeds) < 2 or min(speeds) <= 0 or given.wait_ms <= 0 or given.rounds < 1:
        raise ArgumentError(
            f"speeds {given.speeds}, {given.wait_ms:g} ms, {given.rounds} rounds", hint="2 or more speeds, all above 0"
        )
    rows = Rows(given.out, default=RESULTS / "parallel", as_json=given.as_json)
    found = compare(speeds, given.wait_ms / 1e3, given.micro_batches, given.rounds)
    rows.add([{"system": "shares", "wait_ms": given.wait_ms, "micro_batches": given.micro_batches, **asdict(found)}])
    heads = ("speeds", "shares", "equal, tokens/s", "measured, tokens/s", "predicted", "ratio", "by the speeds")
    cells = (
        given.speeds,
        ":".join(map(str, found.shares)),
        f"{found.equal_tokens_per_s:,.0f}",
        f"{found.measured_tokens_per_s:,.0f}",
        f"{found.predicted_tokens_per_s:,.0f}",
        f"{found.ratio:.2f}",
        f"{found.possible:.2f}",
    )
    rows.finish(table(f"speeds emulated: {given.wait_ms:g} ms a micro-batch at speed 1", heads, [cells]))
    return 0


def compare(speeds: Sequence[float], wait_s: float, micro_batches: int, rounds: int) -> Compared:
    """Run both kinds of shares in one process for each speed."""
    if micro_batches % len(speeds):
        raise ArgumentError(
            f"{micro_batches} micro-batches for {len(speeds)} workers", hint="equal shares need a multiple"
        )
    times = on_ranks(len(speeds), timed_rounds, tuple(speeds), wait_s, micro_batches, rounds)[0]
    equal, measured, predicted = times["equal"], times["measured"], times["predicted"]
    tokens, each = TOKENS * micro_batches, [1 / speed for speed in speeds]
    same = (micro_batches // len(speeds),) * len(speeds)
    return Compared(
        speeds=tuple(speeds),
        shares=times["counts"],
        rounds=rounds,
        equal_tokens_per_s=tokens / statistics.median(equal),
        measured_tokens_per_s=tokens / statistics.median(measured),
        predicted_tokens_per_s=tokens / statistics.median(predicted),
        ratio=statistics.median(a / b for a, b in zip(equal, measured, strict=True)),
        possible=slowest(same, each) / slowest(divide(micro_batches, each), each),
    )


def timed_rounds(speeds: Sequence[float], wait_s: float, micro_batches: int, rounds: int) -> dict[str, Any]:
    """The seconds of a step with equal shares, with measured ones, and as predicted for those, by round."""
    batches = random_batches(MODEL.vocab_size, (TOKENS,) * micro_batches, micro_batches=micro_batches, device=CPU)
    mesh = open_mesh(MeshConfig(dp=len(speeds)), CPU)
    loss = Waiting(wait_s / speeds[dist.get_rank()])
    states = {
        kind: TrainState(
            init_weights(Transformer(MODEL), 0),
            TrainConfig(optimizer=OptimizerConfig(kind="adamw"), mesh=mesh.config, steps=10_000, shares=kind),
            loss,
            mesh=mesh,
        )
        for kind in ("equal", "measured")
    }
    found: dict[str, Any] = {"equal": [], "measured": [], "predicted": []}
    shares = states["measured"].shares
    assert shares is not None
    for turn in range(WARM_UP + TIMED + 1 + rounds):
        counts = shares.counts(micro_batches)
        for kind, state in states.items():
            loss.new_step()
            dist.barrier()
            begun = time.perf_counter()
            step(state, batches)
            seconds = time.perf_counter() - begun
            row = shares.row(seconds) if kind == "measured" else {}
            if turn > WARM_UP + TIMED:
                found[kind].append(seconds)
                if "predicted_step_s" in row:
                    found["predicted"].append(row["predicted_step_s"])
    return {**found, "counts": counts}
