"""TRL judges the losses of GRPO and of distillation: on the same log-probabilities, values and gradients are equal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl")
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss
from trl.trainer.grpo_trainer import GRPOTrainer
from trl_trainer import trainer

from bagu.train.objectives.divergence import Head, divergence_loss
from bagu.train.rl.formulas import clipped_policy_loss, importance_weights, kl_estimate, token_weights

RELATIVE = 1e-5
LENGTHS, MAX_TOKENS, KL = (5, 1, 7, 3), 9, 0.04
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to 1e-5 of the largest value."""
    assert (found - want).abs().max() <= RELATIVE * want.abs().max()


@pytest.mark.parametrize("kl", [0.0, KL], ids=["no_kl", "kl"])
@pytest.mark.parametrize("truncated", [False, True], ids=["on_policy", "truncated"])
@pytest.mark.parametrize(
    ("theirs", "ours"), [("grpo", "sequence"), ("bnpo", "token"), ("dapo", "token"), ("dr_grpo", "fixed")]
)
def test_grpo(theirs: str, ours: str, truncated: bool, kl: float) -> None:
    draw = torch.Generator().manual_seed(1)
    shape = len(LENGTHS), max(LENGTHS)
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)
    old = -3 * torch.rand(shape, generator=draw)
    policy = (old + 0.3 * torch.randn(shape, generator=draw)).requires_grad_()  # some ratios are clipped on both sides
    engine, reference = (old + s * torch.randn(shape, generator=draw) for s in (0.5, 0.2))
    advantages = torch.randn(len(LENGTHS), generator=draw)
    cap = 1.5
    weights = importance_weights(old, engine, cap) if truncated else torch.ones(shape)

    judge = trainer(
        beta=kl, loss_type=theirs, epsilon_low=CLIP["clip_low"], epsilon_high=CLIP["clip_high"],
        max_completion_length=MAX_TOKENS, importance_sampling_level="token", top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, use_vllm=truncated, vllm_importance_sampling_correction=truncated,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False), _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros(shape), None),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(shape[0], 1), "prompt_mask": torch.ones(shape[0], 1),
        "completion_ids": torch.zeros(shape), "completion_mask": mask.long(), "advantages": advantages,
        "old_per_token_logps": old, "ref_per_token_logps": reference, "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": torch.exp(old - engine).clamp(max=cap),
    }  # fmt: skip
    want = GRPOTrainer._compute_loss(judge, None, inputs)

    scale = torch.tensor(token_weights(LENGTHS, ours, max_tokens=MAX_TOKENS)).unsqueeze(1)  # type: ignore[arg-type]
    each = clipped_policy_loss(torch.exp(policy - old), advantages.unsqueeze(1), **CLIP) * weights
    each = each + kl * kl_estimate(policy, reference, "k3")
    loss = (torch.where(mask, each, 0.0) * scale).sum()
    close(loss, want)
    close(*(torch.autograd.grad(x, policy)[0] for x in (loss, want)))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.5), ("jsd", 0.1)])
def test_distillation(kind: str, beta: float, temperature: float) -> None:
    """TRL's GKD, over all logits, and its newer chunked loss. It does not multiply by temperature², nor do we here."""
    draw = torch.Generator().manual_seed(2)
    T, V = 13, 41
    student = Head(*(torch.randn(n, 8, generator=draw).requires_grad_() for n in (T, V)))
    teacher = Head(*(torch.randn(n, 12, generator=draw) for n in (T, V)))
    kept = torch.arange(T) % 4 != 1
    weights = kept / kept.sum()
    loss, _ = divergence_loss(
        student, teacher, weights, kind, beta=beta, temperature=temperature, memory=5 * 8 * V  # type: ignore[arg-type]
    )  # fmt: skip
    found = torch.autograd.grad(loss, student)
    logits = [(head.hidden @ head.weight.T).unsqueeze(0) for head in (student, teacher)]
    labels = torch.where(kept, 0, -100).unsqueeze(0)
    gkd = GKDTrainer.generalized_jsd_loss(*logits, labels=labels, beta=beta, temperature=temperature)
    chunked, _, _ = _chunked_divergence_loss(
        student.hidden.unsqueeze(0), teacher.hidden.unsqueeze(0), student.weight, teacher.weight, kept.unsqueeze(0),
        beta, temperature=temperature,
    )  # fmt: skip
    for want in (gkd, chunked):
        close(loss, want)
        for ours, theirs in zip(found, torch.autograd.grad(want, student), strict=True):
            close(ours, theirs)
