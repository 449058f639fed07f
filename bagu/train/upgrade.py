"""Run folders of the older layout, in which a run had `stage`, `mask_rate` and `train.z_loss` instead of `objective`.

    {"stage": "pretrain", "mask_rate": null, "train": {"z_loss": 0.0, …}, …}     older
    {"objective": {"kind": "pretrain", "z_loss": 0.0}, "train": {…}, …}          current

All code that reads such files calls these functions. Files are upgraded when they are read, and never rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bagu.config import ConfigError

__all__ = ["refuse_moved_settings", "upgrade_checkpoint", "upgrade_run"]

MOVED = {"stage": "objective.kind", "mask_rate": "objective.mask_rate", "train.z_loss": "objective.z_loss"}


def upgrade_run(config: Any) -> Any:
    """The content of a run's config.json in the current layout; a config with an `objective` is returned unchanged."""
    if not isinstance(config, Mapping) or "objective" in config:
        return config
    rest = {key: value for key, value in config.items() if key not in ("stage", "mask_rate")}
    stage, mask_rate = config.get("stage", "pretrain"), config.get("mask_rate")
    objective = {"kind": "mlm" if mask_rate is not None and stage == "pretrain" else stage}
    if mask_rate is not None:
        objective["mask_rate"] = mask_rate
    if isinstance(train := config.get("train"), Mapping) and "z_loss" in train:
        objective["z_loss"] = train["z_loss"]
        rest["train"] = {key: value for key, value in train.items() if key != "z_loss"}
    return rest | {"objective": objective}


def upgrade_checkpoint(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings that a checkpoint records, comparable with those of the run that resumes from it.

    Of the objective, an older checkpoint has only the weight of the z-loss: the rest is taken from `now`.
    """
    if "z_loss" not in saved or "objective" not in now:
        return saved
    rest = {key: value for key, value in saved.items() if key != "z_loss"}
    return rest | {"objective": {**now["objective"], "z_loss": saved["z_loss"]}}


def refuse_moved_settings(settings: Iterable[str]) -> None:
    """Raise for `--set` with a key of the older layout, and name the current key."""
    for setting in settings:
        key, _, value = setting.partition("=")
        if (now := MOVED.get(key.strip())) is not None:
            more = " (and objective.kind=mlm)" if key.strip() == "mask_rate" else ""
            raise ConfigError(f"{key.strip()} is now {now}{more}", hint=f"write --set {now}={value.strip()}")
