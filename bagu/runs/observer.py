"""The interface through which a training loop reports, and two implementations: TensorBoard and Weights & Biases."""

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bagu.config import write_atomic
from bagu.errors import BackendError

# recorded in the table of events; neither printed nor marked on charts
ROUTINE_EVENTS = frozenset({"start", "save", "threads"})

Metrics = Mapping[str, float | int | None]


class Observer(Protocol):
    """Receives the reports of a training loop. Names of metrics end in their unit: `loss_nats`, `tokens_per_s`.

    Every step has lr, grad_norm, tokens, tokens_per_s, mfu_percent, memory_bytes, padding_percent, data_wait_s, and
    the metrics of its objective; held-out metrics start with `val_`. A metric that was not measured at a step is
    missing or None.
    """

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Step `step` has finished. Steps ascend, except after `rewind`."""

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        """An event at `step`; the values of `facts` are JSON."""

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        """Texts that the model generated after `step`."""

    def rewind(self, step: int) -> None:
        """The next step is `step`: discard reports of this step and later ones. Called at every resume."""

    def close(self) -> None:
        """The run has ended, successfully or not."""


class TensorBoard(Observer):
    """Writes TensorBoard event files: one scalar per metric, one text per sample."""

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
        """Open a new file; with a step, it tells the reader to discard `step` and later.

        Readers sort files by name. A name holds the second of its creation and then a counter that does not sort (9
        comes after 10), so two files must not be created in the same second.
        """
        while any(f".{int(time.time()):010d}." in f.name for f in folder.glob("events.*")):
            time.sleep(0.02)
        return self._new(step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Observer):
    """Logs to Weights & Biases: metrics against `step`, samples as text. Respects WANDB_MODE and WANDB_DIR.

    The folder stores the id of the W&B run, so that a resume continues it. W&B cannot delete history: steps that run
    again after a rewind appear twice.
    """

    ID = "wandb-id"

    def __init__(self, folder: Path, *, project: str, config: Mapping[str, Any]) -> None:
        self.check()
        import wandb

        kept = folder / self.ID
        id = kept.read_text(encoding="utf-8").strip() if kept.is_file() else secrets.token_hex(4)
        try:
            self._run = wandb.init(
                project=project,
                name=folder.resolve().name,
                id=id,
                resume="allow",
                config=dict(config),
                dir=os.environ.get("WANDB_DIR", str(folder)),
            )
        except wandb.errors.Error as error:
            raise BackendError(
                f"Weights & Biases could not start a run: {str(error).splitlines()[0]}",
                hint="run `wandb login`, set WANDB_MODE=offline, or leave wandb out",
            ) from error
        write_atomic(kept, id + "\n")
        self._run.define_metric("*", step_metric="step")

    @staticmethod
    def check() -> None:
        """Raise now if the package is missing, before any work is done."""
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise BackendError(
                "wandb is set, but the package wandb cannot be imported",
                hint="pip install 'bagu[wandb]', or leave wandb out",
            ) from error

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **{name: value for name, value in metrics.items() if value is not None}})

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        self._run.log({"step": step, f"event/{kind}": json.dumps(facts, ensure_ascii=False)})

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        self._run.log({"step": step, **{f"sample/{number}": text for number, text in enumerate(texts)}})

    def rewind(self, step: int) -> None:
        """Nothing to do: W&B cannot delete history."""

    def close(self) -> None:
        self._run.finish()
