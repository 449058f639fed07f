"""The interface between the training step and a loss: counts, a loss per micro-batch, metrics.

    totals  = loss.totals(micro_batches)              host counts over the whole step
    part    = loss(model, micro_batch, totals)        loss and metrics, divided by those counts: parts sum to the step's
    metrics = loss.metrics(value, sums, totals)       the logged values, from the summed parts, on the host

A step reads the sums of all micro-batches from the device once, together with the gradient norm.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import torch

from bagu.errors import BaguError
from bagu.nn.model import Transformer
from bagu.types import Batch

Metrics = dict[str, float | None]  # by name; None if a value is not known


class MicroBatch(Protocol):
    """The fields of a micro-batch that the step uses. Only the objective's data and loss use its other fields."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes, for tokens per second and MFU."""
        ...

    @property
    def num_padding(self) -> int:
        """Number of padding tokens."""
        ...

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """The same micro-batch with its tensors on `device`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Host counts over all micro-batches of a step. A loss adds the counts that it divides by in a subclass.

    `idle` means that there is nothing to learn from the step (rollouts whose rewards are all equal): it is counted, its
    metrics are logged, and the weights do not change.
    """

    tokens: int
    padding: int
    idle: bool = False


class MicroBatchLoss(NamedTuple):
    """The contribution of one micro-batch to its step: loss and metrics sum to the step's values."""

    loss: torch.Tensor  # for backward
    metrics: Mapping[str, torch.Tensor] = {}  # scalars without a gradient, the same names in every micro-batch
    peaks: Mapping[str, torch.Tensor] = {}  # the same, but the step's value is the largest instead of the sum
    expert_load: tuple[torch.Tensor, ...] = ()  # tokens per expert, for each MoE layer


BatchT = TypeVar("BatchT", bound=MicroBatch)
BatchT_co = TypeVar("BatchT_co", bound=MicroBatch, covariant=True)
TotalsT = TypeVar("TotalsT", bound=Totals)


class Loss(ABC, Generic[BatchT, TotalsT]):
    """A loss over micro-batches of one type. An instance belongs to one run and may keep state between its steps."""

    validation_metric = "val_loss_nats"  # marks the best checkpoint (train.keep_best)
    higher_is_better = False  # of that metric

    @abstractmethod
    def totals(self, batches: Sequence[BatchT]) -> TotalsT:
        """The counts of a step. Reads nothing from the device."""

    @abstractmethod
    def __call__(self, model: Transformer, batch: BatchT, totals: TotalsT) -> MicroBatchLoss:
        """Run the forward of one micro-batch, and divide by the totals of the whole step."""

    @abstractmethod
    def metrics(self, loss: float, sums: Mapping[str, float], totals: TotalsT) -> Metrics:
        """The logged metrics of a step, from its loss and metrics, summed over micro-batches. Names end in units.

        Values that cannot be summed, such as a ratio of two sums, are computed here. `sums` also has the peaks by name.
        An idle step has no sums.
        """

    def evaluate(self, model: Transformer, batches: Iterable[BatchT]) -> Metrics:
        """The metrics of held-out batches, computed as those of one step, with names that begin with `val_`."""
        batches = list(batches)
        if not batches:
            raise BaguError("there is no held-out batch to evaluate on", hint="hold out more documents")
        totals, device = self.totals(batches), next(model.parameters()).device
        loss, sums = 0.0, dict[str, float]()
        with torch.no_grad():
            for batch in batches:
                part = self(model, batch.to(device, non_blocking=True), totals)
                loss += float(part.loss)
                for name, value in part.metrics.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                for name, value in part.peaks.items():
                    sums[name] = max(sums.get(name, -math.inf), float(value))
        return {f"val_{name}": value for name, value in self.metrics(loss, sums, totals).items()}

    def updated(self, metrics: Mapping[str, float | None]) -> None:
        """Called after each update of the weights with the step's metrics, for a loss that adapts to them."""

    def idle_reason(self, metrics: Mapping[str, float | None]) -> str:
        """Why an idle step with these metrics has no update."""
        return "there is nothing to learn from it"

    def stepped(self, metrics: Mapping[str, float | None]) -> None:
        """Called after each step that counts, also an idle one, with its metrics."""

    @property
    def ended(self) -> Mapping[str, float | int] | None:
        """Why the run ends before its last step, as facts of an event; None: it goes on. A function of `state`."""
        return None

    def state(self) -> dict[str, Any]:
        """The state of this loss between steps, as JSON. Checkpoints contain it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""


# (hidden, head weight, targets) -> (target_logit, lse) of each token, as ops.linear_cross_entropy
TokenValues = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class TokenLoss(Loss[Batch, TotalsT]):
    """A sum over target tokens, plus the model's MoE balance loss.

    It depends on the model only through the hidden states and the head, so a model divided over ranks can run it: a
    rank of tp has a part of the head's rows, the last stage of a pipeline the head without the model before it, and a
    rank of cp some of the tokens. `of_hidden` is all that each of them needs.
    """

    metric_names: ClassVar[tuple[str, ...]]  # of the metrics that `of_hidden` returns

    @abstractmethod
    def of_hidden(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        totals: TotalsT,
        values: TokenValues | None = None,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
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
