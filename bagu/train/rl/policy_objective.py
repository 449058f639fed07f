"""The common part of objectives that sample answers and learn from their rewards: settings, prompts, display."""

from dataclasses import dataclass

from bagu.config import ConfigError
from bagu.nn.config import ModelConfig
from bagu.runs.display import Curve, Display, Headline
from bagu.train.objective import check_causal
from bagu.train.rl.formulas import Estimator, Normalization
from bagu.train.rl.loader import RolloutConfig
from bagu.train.rl.prompt_data import PromptObjective
from bagu.train.rl.reward_function import reward_specs
from bagu.train.rl.tally import ANSWER_CURVES, part_metric


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(PromptObjective):
    """Settings of GRPO and PPO.

    `reward` is FILE.py:FUNCTION, the name of a built-in reward, or the folder of a reward model; or a list of these,
    each with a weight after a colon if that is not 1 ("python:0.8"): the reward is then their weighted sum, and the
    mean of each is logged. An answer that a reward cannot score (it raises, takes longer than `reward_timeout_s`, or
    returns no finite number) has `reward_default`.

    A rollout has `samples` answers of at most `max_tokens` tokens to each of `prompts` prompts, sampled at temperature
    1; they are trained on in `epochs` passes of `minibatches` steps. The ratio is clipped to 1 - `clip_low` and
    1 + `clip_high`.

    `importance_cap` bounds the weights that correct for the rounding of the engine (truncated importance sampling);
    null takes the ratio to the engine's probabilities instead. `invariant` computes training and sampling so that both
    have the same bits (on a CPU, slower).

    `kl` is the coefficient of the KL to the initial policy, by the estimator `kl_estimator`; 0 needs no reference.
    `normalization` is the weight of a token: by token, sequence, or fixed length (see `token_weights`). If nothing can
    be learned from a rollout, other prompts are drawn, at most `max_draws` times in all.

    The run ends once the mean reward of the last `stop_rollouts` rollouts is `stop_reward` or more; null never ends it.
    """

    reward: str | tuple[str, ...] = ""
    reward_default: float = 0.0
    reward_timeout_s: float = 10.0
    prompts: int = 32
    samples: int = 8
    max_tokens: int = 128
    epochs: int = 1
    minibatches: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.2
    importance_cap: float | None = 2.0
    kl: float = 0.0
    kl_estimator: Estimator = "k3"
    normalization: Normalization = "token"
    max_draws: int = 4
    stop_reward: float | None = None
    stop_rollouts: int = 10
    invariant: bool = False

    def __post_init__(self) -> None:
        reward_specs(self.reward)
        for name in ("prompts", "samples", "max_tokens", "epochs", "minibatches", "max_draws", "stop_rollouts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"objective.{name} is {getattr(self, name)}", hint="at least 1")
        if not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise ConfigError(
                f"clip_low is {self.clip_low} and clip_high {self.clip_high}",
                hint="0 < clip_low < 1 and clip_high > 0; 0.2 is usual, DAPO has 0.2 and 0.28",
            )
        if self.importance_cap is not None and self.importance_cap < 1:
            raise ConfigError(f"importance_cap is {self.importance_cap}", hint="at least 1 (2 is usual), or null")
        if self.kl < 0:
            raise ConfigError(f"objective.kl is {self.kl}", hint="0 or more; with 0 there is no reference")

    @property
    def steps_per_rollout(self) -> int:
        return self.epochs * self.minibatches

    @property
    def fills(self) -> bool:
        """Whether a group that teaches nothing is replaced by a group of another prompt."""
        return False

    def check_model(self, model: ModelConfig) -> None:
        check_causal(self.kind, model)
        if model.dropout:
            raise ConfigError(
                f"the model has dropout={model.dropout}, and answers are sampled without: every ratio would be wrong",
                hint="use a model with dropout=0",
            )

    def rollout_config(self, seed: int) -> RolloutConfig:
        if not self.reward:
            raise ConfigError(
                f"objective {self.kind!r} needs a reward, and objective.reward is empty",
                hint="give one with --reward, such as my_file.py:score",
            )
        return RolloutConfig(
            prompts=self.prompts,
            samples=self.samples,
            max_tokens=self.max_tokens,
            epochs=self.epochs,
            minibatches=self.minibatches,
            max_draws=self.max_draws,
            fill=self.fills,
            seed=seed,
        )

    def display(self) -> Display:
        several = [] if isinstance(self.reward, str) else reward_specs(self.reward)
        return Display(
            curves=(
                Curve(title="Reward", unit="", metrics={"reward_mean": "training", "val_reward_mean": "validation"}),
                *(
                    Curve(
                        title=f"Reward {one.name}", unit=f"before its weight, {one.weight:g}",
                        metrics={part_metric(one.name): "training", f"val_{part_metric(one.name)}": "validation"},
                    )
                    for one in several
                ),
                Curve(title="Policy loss", unit="", metrics={"policy_loss": "policy loss"}),
                Curve(
                    title="KL", unit="nats per token",
                    metrics={"kl_nats": "to the reference", "update_kl_nats": "of the updates of a rollout"},
                ),
                *ANSWER_CURVES,
                Curve(title="Clipped tokens", unit="%", metrics={"clip_share_percent": "clipped"}, zero=True),
                Curve(title="Ratio", unit="", metrics={"ratio_mean": "mean", "ratio_max": "largest"}),
                Curve(
                    title="Difference of trainer and engine", unit="nats", metrics={"parity_nats": "largest"}, zero=True
                ),
                Curve(
                    title="Groups left out, rewards that failed", unit="per rollout", zero=True,
                    metrics={"skipped_groups": "groups of equal rewards", "reward_faults": "rewards that failed"},
                ),
                Curve(
                    title="Time by phase", unit="s", zero=True,
                    metrics={
                        "rollout_s": "sampling", "reward_s": "rewards", "prepare_s": "logprobs and advantages",
                        "update_s": "forward and backward",
                    },
                ),
                Curve(
                    title="Throughput by phase", unit="tokens/s", zero=True,
                    metrics={"rollout_tokens_per_s": "sampling", "update_tokens_per_s": "forward and backward"},
                ),
            ),
            headlines=(
                Headline(metric="val_reward_mean", name="Reward of held-out prompts", unit=""),
                Headline(metric="reward_mean", name="Reward", unit="", note="mean of the last rollout"),
                Headline(metric="parity_nats", name="Trainer against engine", unit="nats", note="largest difference"),
            ),
            progress={
                "reward_mean": "reward {:.3f}",
                "length_tokens": "{:.0f} tokens",
                "entropy_nats": "entropy {:.2f} nats",
                "val_reward_mean": "validation {:.3f}",
            },
        )  # fmt: skip
