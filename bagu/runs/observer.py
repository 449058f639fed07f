"""What a training loop reports while it runs, and two programs that show it: TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bagu.config import write_whole
from bagu.errors import BackendError

__all__ = ["Metrics", "Observer", "TensorBoard", "WeightsAndBiases"]

Metrics = Mapping[str, float | int | None]


class Observer(Protocol):
    """What a training loop reports. Names of metrics end in their unit: `loss_nats`, `tokens_per_s`.

    Every step has lr, grad_norm, tokens, tokens_per_s, mfu_percent, memory_bytes, padding_percent, data_wait_s, and
    the metrics of its objective; held-out metrics begin with `val_`. What was not measured at a step is left out or
    None.
    """

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Step `step` is done. Steps ascend, except after `rewind`."""

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        """Something worth knowing happened at `step`; `facts` are JSON values."""

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        """What the model writes after `step`."""

    def rewind(self, step: int) -> None:
        """The next step is `step`: what was told of it and of later ones is void. Called at every resume."""

    def close(self) -> None:
        """The run is over, in whatever way."""


class TensorBoard(Observer):
    """Event files for TensorBoard: a scalar a metric, a text a sample."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BackendError("TensorBoard cannot be imported", hint="pip install 'bagu[tensorboard]'") from error
        self._new = lambda step: SummaryWriter(str(folder), purge_step=step, flush_secs=10)
        self._writer = self._open(None, folder)

    def on_step(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        self._writer.add_text(f"event/{kind}", json.dumps(facts, ensure_ascii=False), step)

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        for number, text in enumerate(texts):
            self._writer.add_text(f"sample/{number}", "    " + text.replace("\n", "\n    "), step)  # a Markdown block

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step, Path(self._writer.log_dir))

    def _open(self, step: int | None, folder: Path) -> Any:
        """A new file; with a step it tells the reader to forget `step` and after.

        Readers take files in the order of their names, which hold the second they were made in and then a counter that
        does not sort (9 comes after 10): two files must not be of one second.
        """
        while any(f".{int(time.time()):010d}." in f.name for f in folder.glob("events.*")):
            time.sleep(0.02)
        return self._new(step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Observer):
    """A run at Weights & Biases: metrics against `step`, samples as text. What WANDB_MODE and WANDB_DIR say holds.

    The run's id is kept in the folder, so that a resume goes on with the same one. Its history cannot be taken back:
    steps that are made again after a rewind are there twice.
    """

    ID = "wandb-id"

    def __init__(self, folder: Path, *, project: str, config: Mapping[str, Any]) -> None:
        self.check()
        import wandb

        kept = folder / self.ID
        id = kept.read_text(encoding="utf-8").strip() if kept.is_file() else secrets.token_hex(4)
        try:
            self._run = wandb.init(
                project=project, name=folder.resolve().name, id=id, resume="allow", config=dict(config),
                dir=os.environ.get("WANDB_DIR", str(folder)),
            )  # fmt: skip
        except wandb.errors.Error as error:
            raise BackendError(
                f"Weights & Biases did not begin a run: {str(error).splitlines()[0]}",
                hint="run `wandb login`, set WANDB_MODE=offline, or leave wandb out",
            ) from error
        write_whole(kept, id + "\n")
        self._run.define_metric("*", step_metric="step")

    @staticmethod
    def check() -> None:
        """Refuse where the package is missing, before any work is done."""
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise BackendError(
                "wandb is set, and the package wandb cannot be imported",
                hint="pip install 'bagu[wandb]', or leave wandb out",
            ) from error

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **{name: value for name, value in metrics.items() if value is not None}})

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        self._run.log({"step": step, f"event/{kind}": json.dumps(facts, ensure_ascii=False)})

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        self._run.log({"step": step, **{f"sample/{number}": text for number, text in enumerate(texts)}})

    def rewind(self, step: int) -> None:
        """Nothing to do: see the class."""

    def close(self) -> None:
        self._run.finish()
