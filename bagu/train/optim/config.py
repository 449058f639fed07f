"""The kind of optimizer and its options. An option that the kind does not use raises an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.machine.fast_dtype import compute_dtype_name

Kind = Literal["sgd", "momentum", "nesterov", "adagrad", "adadelta", "rmsprop", "adam", "adamw", "lion", "muon"]

# The options of each kind besides the learning rate, with their defaults: torch's defaults for the older rules, and the
# values of language-model training (GPT-3, Llama: betas 0.9, 0.95 and decay 0.1) for AdamW and the rules after it.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"weight_decay": 0.0},
    "momentum": {"momentum": 0.9, "weight_decay": 0.0},
    "nesterov": {"momentum": 0.9, "weight_decay": 0.0},
    "adagrad": {"eps": 1e-10, "weight_decay": 0.0},
    "adadelta": {"rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    "rmsprop": {"rho": 0.99, "eps": 1e-8, "weight_decay": 0.0},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.1},
    "muon": {
        "momentum": 0.95,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "newton_schulz_steps": 5,
        "newton_schulz_dtype": None,
    },
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`lr` is the schedule's peak. An option that is None takes the kind's default, see `options`.

    `rho` is the decay factor of the running average of squared gradients (Adadelta, RMSprop). Muon updates the
    matrices, and AdamW with `betas` and `eps` the embeddings and vectors, at the same learning rate.
    `newton_schulz_dtype` None selects the dtype in which this machine's matrix products are fast; `resolved` records
    it, because a run that resumes on another machine must compute in the same dtype.
    """

    kind: Kind = "adamw"
    lr: float = 1e-3
    weight_decay: float | None = None
    momentum: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    rho: float | None = None
    newton_schulz_steps: int | None = None
    newton_schulz_dtype: Literal["bf16", "fp32", "fp64"] | None = None

    def __post_init__(self) -> None:
        if self.kind not in DEFAULTS:
            raise UnknownName.among("optimizer", self.kind, get_args(Kind))
        known = DEFAULTS[self.kind]
        for name in self._given():
            if name not in known:
                raise ArgumentError(
                    f"{name} is set, and {self.kind} has no {name}", hint=f"{self.kind} takes lr, {', '.join(known)}"
                )
        options = self.options()
        shares = {"momentum": options.get("momentum"), "rho": options.get("rho")}
        shares |= {f"betas[{i}]": b for i, b in enumerate(options.get("betas", ()))}
        for name, share in shares.items():
            if share is not None and not 0 <= share < 1:
                raise ArgumentError(f"{name} is {share}", hint="it is the share of the past that stays: 0 <= x < 1")
        for name, least in (("lr", self.lr), ("weight_decay", options["weight_decay"]), ("eps", options.get("eps", 0))):
            if least < 0:
                raise ArgumentError(f"{name} is {least}, and must not be negative")
        if options.get("newton_schulz_steps", 1) < 1:
            raise ArgumentError(f"newton_schulz_steps is {self.newton_schulz_steps}", hint="5 is usual")

    def options(self) -> dict[str, Any]:
        """Every option of this kind with its value."""
        return {**DEFAULTS[self.kind], **self._given()}

    def resolved(self, device: torch.device) -> OptimizerConfig:
        """The same config with every machine-dependent value set."""
        if self.kind != "muon" or self.newton_schulz_dtype is not None:
            return self
        return replace(self, newton_schulz_dtype=compute_dtype_name(device))

    def _given(self) -> dict[str, Any]:
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("kind", "lr")}
        return {name: value for name, value in named.items() if value is not None}
