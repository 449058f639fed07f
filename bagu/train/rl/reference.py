"""The reference policy: the model as it was when the run started, which DPO, KTO, PPO and GRPO compare with.

For full weights it is a frozen copy in the compute dtype. With LoRA it needs no memory: the base weights are frozen, so
the model without its adapters is the initial policy.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch

from bagu.nn.change import evaluating
from bagu.nn.lora import has_lora, without_lora
from bagu.nn.model import Transformer
from bagu.train.rl.logprobs import token_logprobs
from bagu.types import Batch


class Reference:
    """`Reference.of(model)` takes the initial policy; `Objective.loss` gets a model with those weights, also on resume.

    With LoRA it refers to `model` itself, whose adapters are taken out during each call.
    """

    def __init__(self, model: Transformer, *, shared: bool) -> None:
        self.model, self.shared = model, shared

    @classmethod
    def of(cls, model: Transformer) -> Reference:
        if has_lora(model):
            return cls(model, shared=True)
        return cls(copy.deepcopy(model).requires_grad_(False).eval(), shared=False)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """log p of each target, [T] fp32 and 0 where the target is IGNORE, without dropout."""
        with evaluating(self.model), without_lora(self.model) if self.shared else nullcontext():
            return token_logprobs(self.model, batch)[0]
