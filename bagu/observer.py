"""What a training loop tells of itself, and TensorBoard as one that listens."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bagu.errors import BackendError

__all__ = ["Metrics", "Observer", "TensorBoard"]

Metrics = Mapping[str, float | int | None]


class Observer(Protocol):
    """What a training loop tells of itself. Names of metrics end in their unit: `loss_nats`, `tokens_per_s`.

    The loop's names: loss_nats, bits_per_byte, lr, grad_norm, tokens_per_s, mfu_percent, memory_bytes, padding_percent,
    data_wait_s, val_loss_nats, val_bits_per_byte. A metric that was not measured at a step is left out or None.
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
