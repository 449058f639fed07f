"""The formulas of PPO and GRPO: pure functions of logprobs, rewards and values.

Tensors are [T], one number per token of packed answers; numpy arrays are one number per token of one answer.
`policy` is the trained policy pi, `old` the policy before the updates of this rollout, `engine` what the inference
engine computed when it sampled.

    PPO         https://arxiv.org/abs/1707.06347        GAE        https://arxiv.org/abs/1506.02438
    GRPO        https://arxiv.org/abs/2402.03300        DAPO       https://arxiv.org/abs/2503.14476
    Dr. GRPO    https://arxiv.org/abs/2503.20783        k1 to k3   http://joschu.net/blog/kl-approx.html
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

Estimator = Literal["k1", "k2", "k3"]
Normalization = Literal["token", "sequence", "fixed"]
ROUNDING = 1e-5  # relative: a hundred roundings of fp32
ERROR_CLIP, RATE = 0.2, 0.1  # of the adaptive coefficient, from https://arxiv.org/abs/1909.08593, section 2.2


def kl_estimate(policy: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """An estimate of KL(policy || reference) from the logprobs of a token that the policy sampled, with
    d = reference - policy:

        k1 = -d             unbiased, high variance, may be negative
        k2 = d² / 2         biased, low variance
        k3 = exp(d) - 1 - d unbiased, low variance, never negative

    In a reward all three penalise the distance. As a loss they have different gradients
    (https://arxiv.org/abs/2506.09477): on average that of k1 is 0, that of k2 is the gradient of this KL, and that of
    k3 is the gradient of the reverse, KL(reference || policy).
    """
    d = reference - policy
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(d) - d


def importance_weights(old: torch.Tensor, engine: torch.Tensor, cap: float) -> torch.Tensor:
    """Truncated importance sampling: min(old / engine, cap), without a gradient.

    It corrects for tokens that were sampled from the engine's distribution, which differs from the trainer's by
    rounding, while the loss assumes that the trainer's policy sampled them.
    """
    return torch.exp(old - engine).clamp(max=cap).detach()


def clipped_policy_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> torch.Tensor:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) per token. DAPO's clip-higher is clip_high > clip_low.

    A NaN in the ratio gives a NaN.
    """
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def clipped(ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float) -> torch.Tensor:
    """Whether `clipped_policy_loss` has no gradient at a token because of the clip."""
    return ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))


def clipped_value_loss(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> torch.Tensor:
    """max((V - R)², (clip(V, old - clip, old + clip) - R)²) / 2 per token; without `clip` the first of them."""
    errors = (values - returns).square()
    if clip is not None:
        errors = torch.maximum(errors, (torch.clamp(values, old - clip, old + clip) - returns).square())
    return errors / 2


def token_weights(lengths: Sequence[int], how: Normalization, *, max_tokens: int) -> list[float]:
    """The weight of each token of each answer in the loss of a step, for answers of these lengths.

    token     1 / (tokens of all answers)                  DAPO: a long answer counts more
    sequence  1 / (answers * tokens of this answer)        GRPO: each answer counts the same
    fixed     1 / (answers * max_tokens)                   Dr. GRPO: a token counts the same in every step
    """
    n = len(lengths)
    if how == "token":
        return [1 / sum(lengths)] * n
    if how == "sequence":
        return [1 / (n * length) for length in lengths]
    return [1 / (n * max_tokens)] * n


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by more than rounding. A reward model scores equal answers with last bits that depend on
    their place in its batch, and dividing by the deviation would make advantages of size 1 of them."""
    return max(rewards) - min(rewards) > ROUNDING * max(map(abs, rewards))


def group_advantages(rewards: Sequence[float], *, scale: bool) -> np.ndarray:
    """The rewards of one group minus their mean, with `scale` divided by their standard deviation (of n - 1).

    Dr. GRPO does not scale: dividing gives groups of nearly equal rewards a large weight. Equal rewards give zeros.
    """
    r = np.asarray(rewards, np.float64)
    if not rewards_differ(rewards):
        return np.zeros_like(r)
    centred = r - r.mean()
    return centred / r.std(ddof=1) if scale else centred


def generalized_advantages(rewards: np.ndarray, values: np.ndarray, *, discount: float, decay: float) -> np.ndarray:
    """GAE of one answer: A_t = delta_t + discount decay A_(t+1), delta_t = r_t + discount V_(t+1) - V_t.

    The answer is an episode: the value after its last token is 0.
    """
    advantages = np.zeros(len(rewards))
    following = value = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        following = float(rewards[t]) + discount * value - float(values[t]) + discount * decay * following
        advantages[t], value = following, float(values[t])
    return advantages


def whitened(values: np.ndarray) -> np.ndarray:
    """Mean 0 and standard deviation 1. Equal values give zeros."""
    centred = np.asarray(values, np.float64) - np.mean(values)
    return centred / centred.std() if np.ptp(values) > 0 else np.zeros_like(centred)


def adapted_coefficient(coefficient: float, kl: float, target: float) -> float:
    """The KL coefficient for the next rollout: up to 2 % larger if the KL is above the target, smaller if below."""
    error = min(max(kl / target - 1, -ERROR_CLIP), ERROR_CLIP)
    return coefficient * (1 + RATE * error)
