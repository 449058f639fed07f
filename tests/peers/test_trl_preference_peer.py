"""TRL judges the losses of preferences: on the same log-probabilities, values and gradients are equal."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl")
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl_trainer import model_of, trainer

from bagu.train.preference.formulas import bradley_terry, dpo, ipo, kto, simpo

RELATIVE, BETA = 1e-5, 0.3
LENGTHS = (4, 2, 7, 1, 3, 3, 6, 5)  # of answers; the first half is chosen over the second
Ratios = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def answers() -> Ratios:
    """Log-probabilities [B, T] of the tokens of the answers by the policy and the reference, and which tokens count.

    A prompt of one token comes before each answer."""
    draw = torch.Generator().manual_seed(3)
    shape = len(LENGTHS), max(LENGTHS)
    policy = (-2 * torch.rand(shape, generator=draw)).requires_grad_()
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)
    return policy, policy.detach() + 0.7 * torch.randn(shape, generator=draw), mask


def judged(loss: torch.Tensor, want: torch.Tensor, leaf: torch.Tensor) -> None:
    """Loss and gradient equal TRL's to 1e-5 of the largest value."""
    pairs = [(loss, want), tuple(torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (loss, want))]
    for found, theirs in pairs:
        assert (found - theirs).abs().max() <= RELATIVE * theirs.abs().max()


def inputs_of(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    completion = torch.nn.functional.pad(mask.long(), (1, 0))
    return {"input_ids": torch.zeros_like(completion), "attention_mask": completion, "completion_mask": completion}


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_and_ipo(kind: str) -> None:
    policy, reference, mask = answers()
    judge = trainer(
        loss_types=[kind], loss_weights=[1.0], beta=BETA, ld_alpha=None, f_divergence_type="reverse_kl",
        precompute_ref_logps=True, use_weighting=False, label_smoothing=0.0,
    )  # fmt: skip
    sums = (reference * mask).sum(1)
    given = {"ref_chosen_logps": sums[:4], "ref_rejected_logps": sums[4:]}
    want = DPOTrainer._compute_loss(judge, model_of(policy, mask), inputs_of(mask) | given, False)
    ratio = ((policy - reference) * mask).sum(1)
    if kind == "sigmoid":
        losses = dpo(ratio[:4], ratio[4:], beta=BETA)
    else:
        ratio = ratio / mask.sum(1)
        losses = ipo(ratio[:4], ratio[4:], beta=BETA)
    judged(losses.mean(), want, policy)


def test_kto() -> None:
    policy, reference, mask = answers()
    draw = torch.Generator().manual_seed(4)
    good = torch.tensor([True, False, True, True, False, False, True, False])
    drift = torch.rand(len(LENGTHS), generator=draw)  # of mismatched answers, from which TRL estimates the KL
    judge = trainer(
        beta=BETA, loss_type="kto", calculate_KL=True, precompute_ref_logps=True, desirable_weight=1.0,
        undesirable_weight=1.0, _compute_kl_logps=lambda model, batch: drift,
    )  # fmt: skip
    sums = (reference * mask).sum(1)
    given = {"label": good, "ref_logps": sums, "ref_KL_logps": torch.zeros_like(drift)}
    want = KTOTrainer._compute_loss(judge, model_of(policy, mask), inputs_of(mask) | given, False)
    losses = kto(((policy - reference) * mask).sum(1), good, kl=drift.mean(), beta=BETA)
    judged(losses.mean(), want, policy)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["simpo", "sigmoid"])
def test_simpo_and_smoothed_dpo(kind: str, smoothing: float) -> None:
    """TRL's DPO has no label smoothing of this form, its CPO has: without a reference, on what it is given."""
    policy, reference, mask = answers()
    ratio = ((policy - reference) * mask).sum(1) / mask.sum(1)
    judge = trainer(loss_type=kind, beta=BETA, simpo_gamma=0.5, label_smoothing=smoothing, alpha=0.0)
    want, _, _ = CPOTrainer.cpo_loss(judge, ratio[:4], ratio[4:])
    losses: dict[str, Callable[[], torch.Tensor]] = {
        "simpo": lambda: simpo(ratio[:4], ratio[4:], beta=BETA, gamma=0.5, smoothing=smoothing),
        "sigmoid": lambda: dpo(ratio[:4], ratio[4:], beta=BETA, smoothing=smoothing),
    }
    judged(losses[kind]().mean(), want.mean(), policy)


def test_reward() -> None:
    scores = torch.randn(8, 1, generator=torch.Generator().manual_seed(5), requires_grad=True)
    judge = trainer(args=SimpleNamespace(center_rewards_coefficient=None))
    want = RewardTrainer.compute_loss(judge, lambda **_: SimpleNamespace(logits=scores), {})
    judged(bradley_terry(scores[:4, 0], scores[4:, 0]).mean(), want, scores)
