"""The formulas of preference learning: pure functions of log-probabilities or scores, one value per pair or answer.

`ratio` is log pi(y | x) - log pi_ref(y | x), summed over the tokens of an answer (for IPO: their mean).

    Bradley-Terry    -log sigmoid(s_w - s_l)                          the reward model of https://arxiv.org/abs/2203.02155
    DPO              -log sigmoid(beta (ratio_w - ratio_l))           https://arxiv.org/abs/2305.18290
    IPO              (ratio_w - ratio_l - 1 / (2 beta))²              https://arxiv.org/abs/2310.12036
    SimPO            -log sigmoid(beta (mean_w - mean_l) - gamma)     https://arxiv.org/abs/2405.14734
    KTO              1 - sigmoid(±beta (ratio - kl))                  https://arxiv.org/abs/2402.01306

`smoothing` is the assumed probability that a label is wrong: the loss is (1 - smoothing) times that of the pair plus
smoothing times that of the swapped pair (conservative DPO, https://ericmitchell.ai/cdpo.pdf).
"""

import torch
from torch.nn import functional as F


def preference_nll(logits: torch.Tensor, smoothing: float) -> torch.Tensor:
    """-log of the probability of the labels, where sigmoid(logits) is that of the pair as it is labelled."""
    loss = -F.logsigmoid(logits)
    if smoothing == 0:
        return loss
    return (1 - smoothing) * loss - smoothing * F.logsigmoid(-logits)


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor, *, smoothing: float = 0.0) -> torch.Tensor:
    return preference_nll(chosen - rejected, smoothing)


def dpo(
    chosen_ratio: torch.Tensor, rejected_ratio: torch.Tensor, *, beta: float, smoothing: float = 0.0
) -> torch.Tensor:
    return preference_nll(beta * (chosen_ratio - rejected_ratio), smoothing)


def ipo(chosen_ratio: torch.Tensor, rejected_ratio: torch.Tensor, *, beta: float) -> torch.Tensor:
    return (chosen_ratio - rejected_ratio - 1 / (2 * beta)).square()


def simpo(
    chosen_mean: torch.Tensor, rejected_mean: torch.Tensor, *, beta: float, gamma: float, smoothing: float = 0.0
) -> torch.Tensor:
    """`chosen_mean` is the mean log-probability of a token of the answer; there is no reference."""
    return preference_nll(beta * (chosen_mean - rejected_mean) - gamma, smoothing)


def kto(ratio: torch.Tensor, good: torch.Tensor, *, kl: float | torch.Tensor, beta: float) -> torch.Tensor:
    """The loss of single answers, `good` or not. `kl` estimates the divergence from the reference, and has no
    gradient."""
    sign = torch.where(good, 1.0, -1.0).to(ratio.dtype)
    return 1 - torch.sigmoid(sign * beta * (ratio - kl))
