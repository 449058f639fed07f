"""One optimizer step: the function the trainer is about.

Forward and backward of each micro-batch, the gradient norm, one look at both numbers on the host (the only time the
host waits for the device), the guard, the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bagu.train.objective import Totals
from bagu.train.state import TrainState
from bagu.types import Batch

__all__ = ["StepResult", "seed_step", "step"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did. `skipped` says why there was no update, and is None when there was one."""

    loss: float  # nats per target: what was minimised
    nll: float  # nats per target, without z-loss and balance loss
    bits_per_byte: float | None
    grad_norm: float  # before clipping
    lr: float
    totals: Totals
    skipped: str | None


def step(state: TrainState, batches: Sequence[Batch]) -> StepResult:
    """Make one update from the micro-batches of one global step, or refuse to (see `stability`)."""
    seed_step(state.config.seed, state.data_step)
    totals, lr = Totals.of(batches), state.lr
    state.flat.begin()
    shares = []
    for batch in batches:
        share = state.objective(state.model, batch.to(state.device, non_blocking=True), totals)
        share.loss.backward()
        shares.append(share._replace(loss=share.loss.detach()))  # the graph is done with
    norm_on_device = state.flat.finish()
    sums = torch.stack([sum(s.loss for s in shares), sum(s.nll for s in shares), norm_on_device])  # type: ignore[list-item]
    loss, nll, grad_norm = sums.tolist()
    skipped = state.guard.judge(loss, grad_norm)
    if skipped is None:
        clip = state.config.clip
        scale = clip / grad_norm if clip is not None and grad_norm > clip else 1.0
        state.optimizer.update(lr=lr, step=state.step + 1, scale=scale)
        state.flat.publish()
        if shares[0].expert_load:
            state.model.update_balance([sum(layer) for layer in zip(*(s.expert_load for s in shares), strict=True)])
        state.step += 1
    state.data_step += 1
    return StepResult(
        loss=loss, nll=nll, bits_per_byte=totals.bits_per_byte(nll), grad_norm=grad_norm, lr=lr, totals=totals,
        skipped=skipped,
    )  # fmt: skip


def seed_step(seed: int, data_step: int) -> None:
    """Make dropout a function of the seed and the data's place, so that a resumed run draws what the first one drew."""
    torch.manual_seed(int(np.random.SeedSequence([seed, data_step]).generate_state(1, np.uint64)[0] >> 1))
