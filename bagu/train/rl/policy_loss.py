"""The clipped policy loss over the answers of a rollout, for GRPO and PPO.

    ratio      = pi(token) / old(token)                 1 at the first step of a rollout
    importance = min(old(token) / engine(token), cap)   1 where the engine computes the bits of the trainer
    loss       = sum of weight * (importance * clipped(ratio, advantage) + beta * estimate of the KL)

`old` is the policy before the updates of the rollout. If a rollout is one step, it is the policy itself, and needs no
forward of its own. Without a cap `old` is the engine, and the ratio contains the difference between both.
"""

import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bagu import ops
from bagu.nn.model import Output, Transformer
from bagu.train.loss import Loss, Metrics, Totals
from bagu.train.rl.formulas import clipped, clipped_policy_loss, importance_weights, kl_estimate, token_weights
from bagu.train.rl.logprobs import token_logprobs
from bagu.train.rl.policy_objective import PolicyObjective
from bagu.train.rl.reference import Reference
from bagu.train.rl.rollout import Answer, PackShape, RolloutBatch, with_columns
from bagu.types import Batch


@dataclass(frozen=True, kw_only=True)
class PolicyTotals(Totals):
    """Adds the sampled tokens of a step, the metrics of its rollout (at its first step), and when the step began."""

    targets: int
    rollout: Mapping[str, float]
    began: float


class PolicyPart(NamedTuple):
    """The policy loss of one micro-batch, and the output of the model."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    peaks: dict[str, torch.Tensor]
    output: Output


class PolicyLoss(Loss[RolloutBatch, PolicyTotals]):
    """Implements `Learner` of loader.py; a subclass defines the advantages."""

    validation_metric = "val_reward_mean"
    higher_is_better = True

    def __init__(self, config: PolicyObjective, model: Transformer) -> None:
        self.config = config
        self.reference = Reference.of(model) if config.kl > 0 else None
        self._recent: list[float] = []  # the means of the last rollouts, for `stop_reward`

    # --- a rollout ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def useful(self, rewards: Sequence[float]) -> bool:
        """Whether answers to one prompt with these rewards have a gradient."""

    @abstractmethod
    def advantages(self, answers: Sequence[Answer]) -> list[Answer]:
        """Add the column `advantages` to answers that have those of `columns`."""

    @property
    def needs_old(self) -> bool:
        """Whether the logprobs of the old policy are computed. A rollout of one step is its own old policy."""
        return self.config.steps_per_rollout > 1

    def rollout_metrics(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Further metrics of a rollout, from the columns of its answers."""
        return {}

    def columns(self, model: Transformer, batch: Batch) -> dict[str, torch.Tensor]:
        """What is computed for each token before the first update of a rollout."""
        found = {}
        if self.needs_old:
            found["old"] = token_logprobs(model, batch)[0]
        if self.reference is not None:
            found["reference"] = self.reference.logprobs(batch)
        return found

    def prepare(self, model: Transformer, answers: Sequence[Answer], shape: PackShape) -> list[Answer]:
        if not self.needs_old and self.reference is None:
            return self.advantages(answers)
        device = next(model.parameters()).device
        with self.arithmetic():
            ready = with_columns(answers, shape, device, lambda batch: self.columns(model, batch))
        return self.advantages(ready)

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return token_weights(lengths, self.config.normalization, max_tokens=self.config.max_tokens)

    # --- a step -------------------------------------------------------------------------------------------------------

    def arithmetic(self) -> AbstractContextManager[None]:
        return ops.invariant() if self.config.invariant else nullcontext()

    def totals(self, batches: Sequence[RolloutBatch]) -> PolicyTotals:
        return PolicyTotals(
            tokens=sum(b.num_tokens for b in batches),
            padding=sum(b.num_padding for b in batches),
            targets=sum(b.num_targets for b in batches),
            idle=all(b.batch is None for b in batches),
            rollout=batches[0].rollout,
            began=time.perf_counter(),
        )

    def policy(self, model: Transformer, batch: RolloutBatch, totals: PolicyTotals, kl: float) -> PolicyPart:
        """The policy loss of a micro-batch, with `kl` times the KL to the reference."""
        assert batch.batch is not None, "an idle step has no forward"
        config, columns = self.config, batch.columns
        with self.arithmetic():
            logprobs, output = token_logprobs(model, batch.batch)
        now, engine = logprobs.detach(), columns["engine"]
        trainer = columns.get("old", now)  # the old policy, as the trainer computes it
        old = engine if config.importance_cap is None else trainer
        weights, advantages = columns["weights"], columns["advantages"]
        ratio = torch.exp(logprobs - old)
        bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        losses = clipped_policy_loss(ratio, advantages, **bounds)
        targets = totals.targets
        metrics = {}
        if config.importance_cap is not None:
            importance = importance_weights(trainer, engine, config.importance_cap)
            losses = losses * importance
            metrics["importance"] = _mean(importance, weights, targets)
        loss = (weights * losses).sum()
        metrics |= {
            "policy": loss.detach(),
            "ratio": _mean(ratio.detach(), weights, targets),
            "clipped": _mean(clipped(ratio.detach(), advantages, **bounds).float(), weights, targets),
            "update_kl": _mean(kl_estimate(trainer, now, "k3"), weights, targets),
        }
        if "reference" in columns:
            distance = kl_estimate(logprobs, columns["reference"], config.kl_estimator)
            metrics["kl"] = _mean(distance.detach(), weights, targets)
            if kl > 0:
                loss = loss + kl * (weights * distance).sum()
        if output.aux_loss is not None:
            loss = loss + output.aux_loss * (batch.num_tokens / totals.tokens)
        peaks = {"ratio_max": ratio.detach().amax(), "parity": (trainer - engine).abs().amax()}
        return PolicyPart(loss, metrics, peaks, output)

    def metrics(self, loss: float, sums: Mapping[str, float], totals: PolicyTotals) -> Metrics:
        """Of an idle step only the rollout is known. `update_s` is the time of the forward and backward passes."""
        if totals.idle:
            return dict(totals.rollout)
        seconds = time.perf_counter() - totals.began
        values: Metrics = {
            **totals.rollout,
            "policy_loss": sums["policy"],
            "ratio_mean": sums["ratio"],
            "ratio_max": sums["ratio_max"],
            "clip_share_percent": 100 * sums["clipped"],
            "update_kl_nats": sums["update_kl"],
            "parity_nats": sums["parity"],
            "update_s": seconds,
            "update_tokens_per_s": totals.tokens / max(seconds, 1e-9),
        }
        if "importance" in sums:
            values["importance_mean"] = sums["importance"]
        if "kl" in sums:
            values["kl_nats"] = sums["kl"]
        return values

    def idle_reason(self, metrics: Mapping[str, float | None]) -> str:
        faults = metrics.get("reward_faults")
        failed = f"; the reward failed for {faults:g} answers" if faults else ""
        return f"the answers to each prompt have equal rewards, {metrics.get('reward_mean') or 0:g} on average{failed}"

    def stepped(self, metrics: Mapping[str, float | None]) -> None:
        """Only the first step of a rollout has its reward."""
        reward = metrics.get("reward_mean")
        if self.config.stop_reward is not None and reward is not None:
            self._recent = [*self._recent, reward][-self.config.stop_rollouts :]

    @property
    def ended(self) -> Mapping[str, float | int] | None:
        wanted, recent = self.config.stop_reward, self._recent
        if wanted is None or len(recent) < self.config.stop_rollouts or sum(recent) / len(recent) < wanted:
            return None
        return {"reward_mean": sum(recent) / len(recent), "rollouts": len(recent), "stop_reward": wanted}

    def state(self) -> dict[str, Any]:
        return {} if self.config.stop_reward is None else {"rewards": self._recent}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._recent = list(state.get("rewards", ()))[-self.config.stop_rollouts :]

    def evaluate(self, model: Transformer, batches: Iterable[RolloutBatch]) -> Metrics:
        """The metrics of answers to held-out prompts."""
        return {f"val_{name}": value for batch in batches for name, value in batch.rollout.items()}


def _mean(values: torch.Tensor, weights: torch.Tensor, targets: int) -> torch.Tensor:
    """The sum over the sampled tokens of a micro-batch, divided by those of the step."""
    return torch.where(weights > 0, values, 0).sum() / targets
