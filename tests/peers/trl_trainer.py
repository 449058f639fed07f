"""TRL's loss functions, called on given log-probabilities.

TRL computes a loss in a method of its trainer, from what the model returns. Here the method gets the settings of a
trainer and a model that returns the given log-probabilities: everything between them and the loss is TRL's code.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator

__all__ = ["model_of", "trainer"]


def trainer(**settings: Any) -> SimpleNamespace:
    """What every method reads of `self`, and `settings`. The mode is evaluation: nothing is accumulated."""
    common = {
        "accelerator": Accelerator(cpu=True), "model": SimpleNamespace(training=False), "aux_loss_enabled": False,
        "_metrics": {"eval": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**common | settings)


def model_of(log_probs: torch.Tensor, mask: torch.Tensor) -> Any:
    """A model that returns `log_probs` [B, T] for the tokens after the first, 0 where `mask` is 0."""
    kept = torch.where(mask.bool(), log_probs, 0.0)
    zeros = torch.zeros_like(kept)  # what TRL only logs
    output = SimpleNamespace(log_probs=kept, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    return lambda **_: output
