"""A reward model: a score for an answer, such that of two answers the preferred one scores higher (Bradley-Terry).

The score head replaces the head of the language model that the run starts from, and reads the last token of an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from bagu.config import ConfigError
from bagu.data.preference_batch import PreferenceBatch
from bagu.nn import ModelConfig, Output, Transformer
from bagu.runs.display import Curve, Display, Headline, Table
from bagu.train.loss import Loss, Metrics, MicroBatchLoss
from bagu.train.objective import NO_MODELS, RunSettings, WholeModel
from bagu.train.preference.calibration import BINS, brier_score, calibration_error, reliability
from bagu.train.preference.formulas import bradley_terry
from bagu.train.preference.preference_objective import PreferenceObjective, PreferenceTotals, right_share


@dataclass(frozen=True, kw_only=True)
class RewardModelling(PreferenceObjective):
    """`label_smoothing` is the assumed probability of a wrong label. `center` is the weight of (s_w + s_l)², which
    keeps scores near 0: the Bradley-Terry loss itself does not determine their mean.
    """

    kind: Literal["reward"] = "reward"
    label_smoothing: float = 0.0
    center: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing is {self.label_smoothing}", hint="a probability from 0 to below 0.5")
        if self.center < 0:
            raise ConfigError(f"center is {self.center}", hint="0 or more; 0.01 is usual")

    @property
    def whole_model(self) -> WholeModel:
        return "never"

    def check_run(self, run: RunSettings) -> None:
        super().check_run(run)
        if run.sample_every is not None:
            raise ConfigError(
                f"train.sample_every is {run.sample_every}, and a reward model writes no text",
                hint="set train.sample_every=null",
            )

    def check_model(self, model: ModelConfig) -> None:
        if not model.causal or model.mlm_head:
            raise ConfigError(
                f"objective {self.kind!r} scores the last token of a text, and this model is not causal",
                hint="start from a causal language model",
            )

    def model_config(self, start: ModelConfig) -> ModelConfig:
        self.check_model(start)
        return replace(start, score_head=True)

    def loss(self, model: Transformer, auxiliary: Mapping[str, Transformer] = NO_MODELS) -> RewardLoss:
        return RewardLoss(smoothing=self.label_smoothing, center=self.center)

    def display(self) -> Display:
        return Display(
            curves=(
                Curve(
                    title="Loss",
                    unit="nats per pair",
                    metrics={"preference_loss": "training", "val_preference_loss": "validation"},
                ),
                Curve(
                    title="Accuracy",
                    unit="% of pairs ranked as labelled",
                    metrics={"accuracy_percent": "training", "val_accuracy_percent": "validation"},
                ),
                Curve(title="Margin", unit="score", metrics={"margin": "training", "val_margin": "validation"}),
                Curve(title="Scores", unit="score", metrics={"chosen_score": "chosen", "rejected_score": "rejected"}),
                Curve(title="Calibration error", unit="%", metrics={"val_calibration_error_percent": "validation"}),
            ),
            headlines=(
                Headline(metric="val_accuracy_percent", name="Held-out pairs ranked as labelled", unit="%"),
                Headline(metric="val_preference_loss", name="Validation loss", unit="nats"),
                Headline(
                    metric="val_calibration_error_percent",
                    name="Calibration error",
                    unit="%",
                    note="expected calibration error of held-out pairs",
                ),
            ),
            progress={
                "preference_loss": "loss {:.3f} nats",
                "accuracy_percent": "{:.0f} % right",
                "val_accuracy_percent": "validation {:.1f} % right",
            },
        )

    def metric_tables(self, metrics: Sequence[Mapping[str, Any]]) -> Sequence[Table]:
        last = next((row for row in reversed(metrics) if row.get("val_bin_0_pairs") is not None), None)
        if last is None:
            return ()
        rows = [
            (
                f"{50 + 50 * i / BINS:.0f} to {50 + 50 * (i + 1) / BINS:.0f} %",
                int(last[f"val_bin_{i}_pairs"]),
                *(
                    f"{last[f'val_bin_{i}_{what}_percent']:.1f} %" if last[f"val_bin_{i}_pairs"] else "–"
                    for what in ("confidence", "accuracy")
                ),
            )
            for i in range(BINS)
        ]
        note = (
            "Held-out pairs by the probability that the model gives to the answer it prefers. Where the model is "
            f"calibrated, mean confidence and accuracy are equal. Brier score {last['val_brier']:.3f} (0.25 for a "
            "model that cannot tell)."
        )
        columns = ("confidence", "pairs", "mean confidence", "accuracy")
        return (Table(title="Reliability", columns=columns, rows=rows, note=note),)


class RewardLoss(Loss[PreferenceBatch, PreferenceTotals]):
    """The mean Bradley-Terry loss of the pairs of a step."""

    validation_metric = "val_preference_loss"

    def __init__(self, *, smoothing: float = 0.0, center: float = 0.0) -> None:
        self.smoothing, self.center = smoothing, center

    def totals(self, batches: Sequence[PreferenceBatch]) -> PreferenceTotals:
        return PreferenceTotals.of(batches, paired=True)

    def __call__(self, model: Transformer, batch: PreferenceBatch, totals: PreferenceTotals) -> MicroBatchLoss:
        out, scores = answer_scores(model, batch)
        chosen, rejected = scores[0::2], scores[1::2]
        nll = bradley_terry(chosen, rejected, smoothing=self.smoothing).sum() / totals.units
        loss = nll
        if self.center:
            loss = loss + self.center * (chosen + rejected).square().sum() / totals.units
        if out.aux_loss is not None:
            loss = loss + out.aux_loss * (batch.num_tokens / totals.tokens)
        margin = (chosen - rejected).detach()
        sums = {
            "nll": nll.detach(),
            "right": right_share(margin).sum() / totals.units,
            "chosen": chosen.detach().sum() / totals.units,
            "rejected": rejected.detach().sum() / totals.units,
        }
        return MicroBatchLoss(loss=loss, metrics=sums, expert_load=out.expert_load)

    def metrics(self, loss: float, sums: Mapping[str, float], totals: PreferenceTotals) -> Metrics:
        return {
            "preference_loss": sums["nll"],
            "accuracy_percent": 100 * sums["right"],
            "margin": sums["chosen"] - sums["rejected"],
            "chosen_score": sums["chosen"],
            "rejected_score": sums["rejected"],
            "pairs": totals.units,
        }

    def evaluate(self, model: Transformer, batches: Iterable[PreferenceBatch]) -> Metrics:
        """The metrics of a step, and the calibration of the pair probabilities."""
        batches, device = list(batches), next(model.parameters()).device
        values = super().evaluate(model, batches)
        margins: list[float] = []
        with torch.no_grad():
            for batch in batches:
                scores = answer_scores(model, batch.to(device, non_blocking=True))[1]
                margins += (scores[0::2] - scores[1::2]).tolist()
        bins = reliability(margins)
        values |= {"val_brier": brier_score(margins), "val_calibration_error_percent": 100 * calibration_error(bins)}
        for i, found in enumerate(bins):
            values |= {
                f"val_bin_{i}_pairs": found.pairs,
                f"val_bin_{i}_confidence_percent": 100 * found.confidence if found.pairs else None,
                f"val_bin_{i}_accuracy_percent": 100 * found.accuracy if found.pairs else None,
            }
        return values


def answer_scores(model: Transformer, batch: PreferenceBatch) -> tuple[Output, torch.Tensor]:
    """The output of the model, and the score at the last token of each sequence, [S] fp32."""
    assert model.score is not None, "the objective's model_config has a score head"
    packed = batch.batch
    out: Output = model(packed.ids, packed.positions, packed.cu_seqlens, packed.max_len)
    last = packed.cu_seqlens[1 : batch.num_sequences + 1].long() - 1
    return out, model.score(out.hidden[last])
