"""A loss that depends on the model only through the hidden states and the head: a model divided over ranks can run it.

A rank of tp has a part of the head's rows, the last stage of a pipeline the head without the model before it, and a
rank of cp some of the tokens. `of_hidden` is all that each of them needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from bagu.nn.model import Transformer
from bagu.train.loss import Loss, MicroBatchLoss, TotalsT
from bagu.types import Batch

__all__ = ["TokenLoss", "TokenValues"]

# (hidden, head weight, targets) -> (target_logit, lse) of each token, as ops.linear_cross_entropy
TokenValues = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class TokenLoss(Loss[Batch, TotalsT]):
    """A sum over target tokens, plus the model's MoE balance loss."""

    metric_names: ClassVar[tuple[str, ...]]  # of the metrics that `of_hidden` returns

    @abstractmethod
    def of_hidden(
        self, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, totals: TotalsT,
        values: TokenValues | None = None,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:  # fmt: skip
        """The loss of some tokens, divided by the totals of the whole step, and its metrics. `values` computes the two
        numbers of a token if `head` is not the whole head."""

    def __call__(
        self, model: Transformer, batch: Batch, totals: TotalsT, values: TokenValues | None = None
    ) -> MicroBatchLoss:
        out = model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len)
        loss, metrics = self.of_hidden(out.hidden, model.head_weight, batch.targets, totals, values)
        if out.aux_loss is not None:
            loss = loss + out.aux_loss * (batch.num_tokens / totals.tokens)
        return MicroBatchLoss(loss=loss, metrics=metrics, expert_load=out.expert_load)
