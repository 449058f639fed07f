"""PPO: a critic predicts the return after each token, and the advantage of a token is what came out better than that.

    reward of token t    -beta * KL estimate of token t (kl_in="reward"), and the reward of the answer at its last token
    advantages           GAE of these rewards and the critic's values, whitened over the rollout
    loss                 clipped policy loss + value_weight * clipped value loss (+ beta * KL, kl_in="loss")

Paper: https://arxiv.org/abs/1707.06347; for language models https://arxiv.org/abs/1909.08593
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bagu.config import ConfigError
from bagu.nn.change import attach, detach
from bagu.nn.config import ModelConfig
from bagu.nn.model import Transformer
from bagu.nn.score import with_score_head
from bagu.runs.display import Curve, Display
from bagu.train.loss import Metrics, MicroBatchLoss
from bagu.train.objective import NO_MODELS
from bagu.train.rl.formulas import (
    Estimator,
    adapted_coefficient,
    clipped_value_loss,
    generalized_advantages,
    kl_estimate,
    whitened,
)
from bagu.train.rl.policy_loss import PolicyLoss, PolicyTotals
from bagu.train.rl.policy_objective import PolicyObjective
from bagu.train.rl.reward_function import reward_specs
from bagu.train.rl.rollout import Answer, RolloutBatch
from bagu.types import Batch


@dataclass(frozen=True, kw_only=True)
class ProximalPolicy(PolicyObjective):
    """`kl` is the coefficient beta, applied in the reward or in the loss (`kl_in`). With `kl_target` beta is adapted
    after each rollout, to keep the KL near this number of nats per token.

    `discount` and `decay` are gamma and lambda of GAE. `whiten` scales the advantages of a rollout to mean 0 and
    standard deviation 1. `value_clip` limits how far a value moves in the updates of one rollout; null does not.

    The critic starts from `critic`, a model with a score head; null starts from the reward if that is a model, else
    from the policy with a score head of zeros. With LoRA it has the policy's frozen weights and adapters of its own.
    """

    kind: Literal["ppo"] = "ppo"
    samples: int = 1
    epochs: int = 4
    kl: float = 0.05
    kl_estimator: Estimator = "k1"
    kl_in: Literal["reward", "loss"] = "reward"
    kl_target: float | None = None
    discount: float = 1.0
    decay: float = 0.95
    whiten: bool = True
    value_clip: float | None = 0.2
    value_weight: float = 0.1
    critic: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl > 0 and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ConfigError(
                "objective.kl_estimator is k1 with kl_in=loss, and as a loss its expected gradient is 0",
                hint="use k2 or k3, or objective.kl_in=reward",
            )
        if self.kl_target is not None and (self.kl_target <= 0 or self.kl == 0):
            raise ConfigError(
                f"objective.kl_target is {self.kl_target} and objective.kl {self.kl}",
                hint="both are positive: kl is where the coefficient starts",
            )
        for name in ("discount", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"objective.{name} is {getattr(self, name)}", hint="a number from 0 to 1")
        if self.value_weight <= 0 or (self.value_clip is not None and self.value_clip <= 0):
            raise ConfigError(
                f"objective.value_weight is {self.value_weight} and objective.value_clip {self.value_clip}",
                hint="both are positive; value_clip may be null",
            )

    def auxiliary(self) -> Mapping[str, str]:
        models = [one.spec for one in reward_specs(self.reward) if one.spec and Path(one.spec).is_dir()]
        start = self.critic or next(iter(models), None)
        return {} if start is None else {"critic": start}

    def check_auxiliary(self, role: str, auxiliary: ModelConfig, model: ModelConfig) -> None:
        if not auxiliary.score_head or not auxiliary.causal:
            found = "no score head" if auxiliary.causal else "causal=false, and sees the tokens it must judge"
            raise ConfigError(
                f"the critic has {found}",
                hint="give a reward model (--recipe reward), or objective.critic=null to start from the policy",
            )

    def loss(self, model: Transformer, auxiliary: Mapping[str, Transformer] = NO_MODELS) -> ProximalPolicyLoss:
        return ProximalPolicyLoss(self, model, auxiliary.get("critic"))

    def finish(self, model: Transformer) -> None:
        detach(model, "critic")

    def display(self) -> Display:
        common = super().display()
        own = (
            Curve(title="Value loss", unit="", metrics={"value_loss": "value loss"}, zero=True),
            Curve(
                title="Explained variance of the returns", unit="%", metrics={"explained_variance_percent": "critic"}
            ),
            Curve(title="KL coefficient", unit="", metrics={"kl_coefficient": "beta"}),
        )
        return replace(common, curves=(*common.curves, *own))


class ProximalPolicyLoss(PolicyLoss):
    """Attaches the critic to the model as `critic`: optimizer and checkpoints then contain it."""

    config: ProximalPolicy

    def __init__(self, config: ProximalPolicy, model: Transformer, critic: Transformer | None) -> None:
        super().__init__(config, model)  # takes the reference, before the critic is attached
        self.beta = config.kl
        self.critic = critic_of(model) if critic is None else critic.requires_grad_(True)
        attach(model, "critic", self.critic)

    # --- a rollout ----------------------------------------------------------------------------------------------------

    @property
    def needs_old(self) -> bool:
        return True

    def useful(self, rewards: Sequence[float]) -> bool:
        return True

    def columns(self, model: Transformer, batch: Batch) -> dict[str, torch.Tensor]:
        return {**super().columns(model, batch), "values": self._values(batch)[0]}

    def advantages(self, answers: Sequence[Answer]) -> list[Answer]:
        raw = [
            generalized_advantages(
                self._rewards(a), a.columns["values"], discount=self.config.discount, decay=self.config.decay
            )
            for a in answers
        ]
        used = np.concatenate(raw)
        used = whitened(used) if self.config.whiten else used
        pieces = np.split(used, np.cumsum([len(x) for x in raw])[:-1])
        return [
            a.plus(advantages=piece, returns=x + a.columns["values"])
            for a, piece, x in zip(answers, pieces, raw, strict=True)
        ]

    def _rewards(self, answer: Answer) -> np.ndarray:
        """The reward of each token."""
        rewards = np.zeros(answer.tokens.num_targets)
        if self.reference is not None and self.config.kl_in == "reward":
            old, reference = (torch.from_numpy(answer.columns[name]) for name in ("old", "reference"))
            rewards -= self.beta * kl_estimate(old, reference, self.config.kl_estimator).numpy()
        rewards[-1] += answer.reward
        return rewards

    def rollout_metrics(self, answers: Sequence[Answer]) -> dict[str, float]:
        returns, values = (np.concatenate([a.columns[name] for a in answers]) for name in ("returns", "values"))
        found, spread = {"kl_coefficient": self.beta}, float(np.var(returns))
        if spread > 0:
            found["explained_variance_percent"] = 100 * (1 - float(np.var(returns - values)) / spread)
        return found

    # --- a step -------------------------------------------------------------------------------------------------------

    def __call__(self, model: Transformer, batch: RolloutBatch, totals: PolicyTotals) -> MicroBatchLoss:
        assert batch.batch is not None, "an idle step has no forward"
        part = self.policy(model, batch, totals, kl=self.beta if self.config.kl_in == "loss" else 0.0)
        values, aux_loss = self._values(batch.batch)
        columns = batch.columns
        errors = clipped_value_loss(values, columns["values"], columns["returns"], self.config.value_clip)
        value_loss = (columns["weights"] * errors).sum()
        loss = part.loss + self.config.value_weight * value_loss
        if aux_loss is not None:
            loss = loss + aux_loss * (batch.num_tokens / totals.tokens)
        metrics = {**part.metrics, "value": value_loss.detach()}
        return MicroBatchLoss(loss, metrics, part.peaks, part.output.expert_load)

    def _values(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The value before each token, [T] at the positions of the targets, and the critic's balance loss."""
        assert self.critic.score is not None
        with self.arithmetic():
            out = self.critic(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len)
        return self.critic.score(out.hidden), out.aux_loss

    def metrics(self, loss: float, sums: Mapping[str, float], totals: PolicyTotals) -> Metrics:
        values = super().metrics(loss, sums, totals)
        return values if totals.idle else {**values, "value_loss": sums["value"]}

    def updated(self, metrics: Mapping[str, float | None]) -> None:
        """Adapt beta once per rollout: only its first step has the metrics of the rollout."""
        kl, target = metrics.get("kl_nats"), self.config.kl_target
        if target is not None and kl is not None and "kl_coefficient" in metrics:
            self.beta = adapted_coefficient(self.beta, kl, target)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "beta": self.beta}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.beta = state["beta"]


def critic_of(model: Transformer) -> Transformer:
    """A copy of the model with a score head of zeros instead of its head. Frozen weights are shared, not copied."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    return with_score_head(copy.deepcopy(model, shared))
