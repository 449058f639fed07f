"""Direct preference optimization and its variants: a policy learns from pairs of answers without a reward model.

`variant` chooses the loss (formulas.py): dpo, ipo, simpo, or kto, which takes single answers with labels
and also splits pairs into such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from bagu.config import ConfigError
from bagu.data.preference_batch import PreferenceBatch
from bagu.data.preference_loader import PreferenceLoader, evaluation_rows
from bagu.machine.cache import cache_folder
from bagu.nn import ModelConfig, Transformer
from bagu.runs.display import Curve, Display, Headline
from bagu.train.loss import Loss, Metrics, MicroBatchLoss
from bagu.train.objective import NO_MODELS, TrainingData, WholeModel, check_causal
from bagu.train.preference import formulas as losses
from bagu.train.preference.preference_objective import (
    PreferenceData,
    PreferenceObjective,
    PreferenceTotals,
    preference_data,
    right_share,
)
from bagu.train.preference.reference_cache import model_digest, with_reference
from bagu.train.rl.logprobs import segment_sums, token_logprobs
from bagu.train.rl.reference import Reference
from bagu.types import Batch

Variant = Literal["dpo", "ipo", "kto", "simpo"]
BETA: dict[Variant, float] = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "simpo": 2.0}
SPARE_STEPS = 8  # batches that the guard may refuse: a refused step uses up its pairs
GAMMA = 1.0  # of SimPO: half of beta, the paper's first choice


@dataclass(frozen=True, kw_only=True)
class PreferenceOptimization(PreferenceObjective):
    """`beta` is the strength of the reference, or for SimPO the scale of the log-probabilities (null: 0.1, SimPO 2).
    `label_smoothing` is the assumed probability of a wrong label (dpo, simpo), `gamma` SimPO's margin (null: 1).
    `reference`: "cached" computes its log-probabilities once before the first step, "live" at every step from a frozen
    copy (null: cached, and live for kto, whose KL term pairs prompts with other answers). `desirable_weight` and
    `undesirable_weight` balance good and bad answers of kto.
    """

    kind: Literal["dpo"] = "dpo"
    variant: Variant = "dpo"
    beta: float | None = None
    label_smoothing: float = 0.0
    gamma: float | None = None
    reference: Literal["cached", "live"] | None = None
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.beta is not None and not self.beta > 0:
            raise ConfigError(f"beta is {self.beta}", hint="more than 0; 0.1 is usual")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing is {self.label_smoothing}", hint="a probability from 0 to below 0.5")
        for name, given, variants in (
            ("label_smoothing", self.label_smoothing != 0, ("dpo", "simpo")),
            ("gamma", self.gamma is not None, ("simpo",)),
            ("reference", self.reference is not None, ("dpo", "ipo", "kto")),
            ("desirable_weight", self.desirable_weight != 1, ("kto",)),
            ("undesirable_weight", self.undesirable_weight != 1, ("kto",)),
        ):
            if given and self.variant not in variants:
                raise ConfigError(
                    f"objective.{name} has no effect with variant {self.variant!r}",
                    hint=f"leave it out, or use variant {' or '.join(variants)}",
                )
        if self.variant == "kto" and self.reference == "cached":
            raise ConfigError(
                "reference is 'cached', and kto also needs the reference for prompts with other answers",
                hint="leave it out, or set objective.reference=live",
            )
        if not (self.desirable_weight > 0 and self.undesirable_weight > 0):
            raise ConfigError("desirable_weight and undesirable_weight must be more than 0", hint="1 is usual")

    @property
    def paired(self) -> bool:
        return self.variant != "kto"

    @property
    def strength(self) -> float:
        return BETA[self.variant] if self.beta is None else self.beta

    @property
    def keeps_reference(self) -> Literal["cached", "live"] | None:
        """How reference log-probabilities are obtained; None where the loss has no reference."""
        if self.variant == "simpo":
            return None
        return self.reference or ("live" if self.variant == "kto" else "cached")

    @property
    def whole_model(self) -> WholeModel:
        kept = self.keeps_reference
        if kept == "live":
            return "loss"
        return "never" if kept is None else "prepare"

    def check_model(self, model: ModelConfig) -> None:
        check_causal(self.kind, model)

    def prepare(
        self, data: TrainingData[PreferenceBatch], model: Transformer, *, steps: int, eval_batches: int
    ) -> TrainingData[PreferenceBatch]:
        """With a cached reference: the data with its log-probabilities, for the pairs that the run uses."""
        if self.keeps_reference != "cached":
            return data
        assert isinstance(data, PreferenceData)
        digest, folder, config = model_digest(model), cache_folder() / "reference", data.config
        loader, last = PreferenceLoader(data.train, config), steps + max(SPARE_STEPS, steps // 10)
        train = {
            name: with_reference(found, loader.rows_before(name, last), model, digest, config, folder)
            for name, found in data.train.items()
        }
        held = {
            name: with_reference(
                found, evaluation_rows(found, config, limit=eval_batches), model, digest, config, folder
            )
            for name, found in data.held.items()
        }
        return replace(preference_data(train, held, {}, config, mismatched=False), facts=data.facts)

    def loss(self, model: Transformer, auxiliary: Mapping[str, Transformer] = NO_MODELS) -> PolicyPreferenceLoss:
        reference = Reference.of(model) if self.keeps_reference == "live" else None
        return PolicyPreferenceLoss(self, reference)

    def display(self) -> Display:
        unit = {"dpo": "nats per pair", "simpo": "nats per pair", "ipo": "nats² per pair", "kto": "per answer"}
        both = {"preference_loss": "training", "val_preference_loss": "validation"}
        rewards = {
            "chosen_reward_nats": "chosen",
            "rejected_reward_nats": "rejected",
            "val_chosen_reward_nats": "chosen, validation",
            "val_rejected_reward_nats": "rejected, validation",
        }
        return Display(
            curves=(
                Curve(title="Loss", unit=unit[self.variant], metrics=both),
                Curve(
                    title="Accuracy", unit="% of pairs" if self.paired else "% of answers",
                    metrics={"accuracy_percent": "training", "val_accuracy_percent": "validation"},
                ),
                Curve(
                    title="Reward margin", unit="nats",
                    metrics={"margin_nats": "training", "val_margin_nats": "validation"},
                ),
                Curve(title="Implicit rewards", unit="nats", metrics=rewards),
                Curve(
                    title="Log-probability of answers", unit="nats per token",
                    metrics={"chosen_logprob_nats": "chosen", "rejected_logprob_nats": "rejected"},
                ),
                Curve(title="KL to the reference", unit="nats per answer", metrics={"kl_nats": "training"}),
            ),
            headlines=(
                Headline(
                    metric="val_accuracy_percent", name="Held-out accuracy", unit="%",
                    note="the implicit reward ranks the answers as labelled",
                ),
                Headline(metric="val_margin_nats", name="Reward margin", unit="nats", note="of held-out answers"),
                Headline(metric="val_preference_loss", name="Validation loss", unit=""),
            ),
            progress={
                "preference_loss": "loss {:.3f}", "accuracy_percent": "{:.0f} % right", "margin_nats": "margin {:.2f}",
                "val_accuracy_percent": "validation {:.1f} % right",
            },
        )  # fmt: skip


class PolicyPreferenceLoss(Loss[PreferenceBatch, PreferenceTotals]):
    """The mean loss of the pairs (kto: of the answers) of a step.

    KTO's KL is that of the step before, so that it does not depend on how a step is split into micro-batches; before
    the first update it is 0, since the policy is the reference.
    """

    validation_metric = "val_preference_loss"

    def __init__(self, objective: PreferenceOptimization, reference: Reference | None) -> None:
        self.objective, self.reference, self.kl = objective, reference, 0.0

    def totals(self, batches: Sequence[PreferenceBatch]) -> PreferenceTotals:
        return PreferenceTotals.of(batches, paired=self.objective.paired)

    def __call__(self, model: Transformer, batch: PreferenceBatch, totals: PreferenceTotals) -> MicroBatchLoss:
        logprobs, out = token_logprobs(model, batch.batch)
        sums = segment_sums(logprobs, batch.batch.cu_seqlens, batch.num_sequences)
        if self.objective.keeps_reference is None:
            values = sums / batch.lengths
        else:
            values = sums - self._reference_sums(batch)
            if self.objective.variant == "ipo":
                values = values / batch.lengths
        loss = self._losses(values, batch.chosen).sum() / totals.units
        nll = loss.detach()
        if out.aux_loss is not None:
            loss = loss + out.aux_loss * (batch.num_tokens / totals.tokens)
        return MicroBatchLoss(
            loss=loss,
            metrics={"loss": nll, **self._sums(model, values, sums, batch, totals)},
            expert_load=out.expert_load,
        )

    def _losses(self, values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The loss of each pair or answer. `values` are log-ratios, their means (ipo) or mean logprobs (simpo)."""
        o, first, second = self.objective, values[0::2], values[1::2]
        match o.variant:
            case "dpo":
                return losses.dpo(first, second, beta=o.strength, smoothing=o.label_smoothing)
            case "ipo":
                return losses.ipo(first, second, beta=o.strength)
            case "simpo":
                gamma = GAMMA if o.gamma is None else o.gamma
                return losses.simpo(first, second, beta=o.strength, gamma=gamma, smoothing=o.label_smoothing)
            case "kto":
                weights = torch.where(chosen, o.desirable_weight, o.undesirable_weight)
                return weights * losses.kto(values, chosen, kl=self.kl, beta=o.strength)

    @torch.no_grad()
    def _sums(
        self,
        model: Transformer,
        values: torch.Tensor,
        logprobs: torch.Tensor,
        batch: PreferenceBatch,
        totals: PreferenceTotals,
    ) -> dict[str, torch.Tensor]:
        """The metrics of a micro-batch, as parts of the means of its step."""
        rewards, per_token = self.objective.strength * values, logprobs / batch.lengths
        good, bad = batch.chosen, ~batch.chosen
        sums = {
            "chosen": (rewards * good).sum() / max(totals.chosen, 1),
            "rejected": (rewards * bad).sum() / max(totals.rejected, 1),
            "chosen_logprob": (per_token * good).sum() / max(totals.chosen, 1),
            "rejected_logprob": (per_token * bad).sum() / max(totals.rejected, 1),
        }
        if self.objective.paired:
            return {**sums, "right": right_share(rewards[0::2] - rewards[1::2]).sum() / totals.units}
        distance = rewards - self.objective.strength * self.kl
        right = right_share(torch.where(good, distance, -distance)).sum() / totals.units
        return {**sums, "right": right, "kl": self._kl(model, batch).sum() / totals.units}

    def _kl(self, model: Transformer, batch: PreferenceBatch) -> torch.Tensor:
        """The log-ratio of each prompt with the answer of another: an estimate of the KL that needs no sampling."""
        other = batch.mismatched
        assert other is not None and self.reference is not None
        ratios = token_logprobs(model, other)[0] - self.reference.logprobs(other)
        return segment_sums(ratios, other.cu_seqlens, batch.num_sequences)

    def _reference_sums(self, batch: PreferenceBatch) -> torch.Tensor:
        if self.reference is None:
            assert batch.reference is not None, "PreferenceOptimization.prepare adds them"
            return batch.reference
        packed: Batch = batch.batch
        return segment_sums(self.reference.logprobs(packed), packed.cu_seqlens, batch.num_sequences)

    def metrics(self, loss: float, sums: Mapping[str, float], totals: PreferenceTotals) -> Metrics:
        def known(name: str, count: int) -> float | None:
            return sums[name] if count else None

        both = totals.chosen and totals.rejected
        values: Metrics = {
            "preference_loss": sums["loss"],
            "accuracy_percent": 100 * sums["right"],
            "margin_nats": sums["chosen"] - sums["rejected"] if both else None,
            "chosen_reward_nats": known("chosen", totals.chosen),
            "rejected_reward_nats": known("rejected", totals.rejected),
            "chosen_logprob_nats": known("chosen_logprob", totals.chosen),
            "rejected_logprob_nats": known("rejected_logprob", totals.rejected),
            "pairs" if self.objective.paired else "answers": totals.units,
        }
        return values if self.objective.paired else {**values, "kl_nats": max(sums["kl"], 0.0)}

    def updated(self, metrics: Mapping[str, float | None]) -> None:
        if not self.objective.paired:
            self.kl = metrics["kl_nats"] or 0.0

    def state(self) -> dict[str, Any]:
        return {} if self.objective.paired else {"kl": self.kl}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl = state.get("kl", 0.0)
