"""A run that is logged to Weights & Biases, offline: the package itself writes and reads the record."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

wandb = pytest.importorskip("wandb")
from bagu.runs.observer import WeightsAndBiases  # noqa: E402


def records(folder: Path, timeout_s: float = 60.0) -> list[dict[str, Any]]:
    """The rows of the offline run in a folder. A process of wandb's writes them, and may end after `finish` returns."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + timeout_s
    found = read(file)
    while not any(r.HasField("exit") for r in found):
        assert time.monotonic() < end, f"the run's last record is not there after {timeout_s} s"
        time.sleep(0.05)
        found = read(file)
    rows = [r.history.item for r in found if r.HasField("history")]
    return [{(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in items} for items in rows]


def read(file: Path) -> list[Any]:
    """The whole records of a file: a header, then records in the format of LevelDB's log, each a protobuf message.
    These are short, so that none is split."""
    from wandb.proto import wandb_internal_pb2

    data, at, found = file.read_bytes(), 7, []
    while at + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a whole record"
        if at + 7 + size > len(data):
            break
        found.append(wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + size]))
        at += 7 + size
    return found


def test_metrics_events_and_samples_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = WeightsAndBiases(tmp_path, project="bagu", config={"steps": 2})
    tracker.on_step(0, {"loss_nats": 2.5, "val_loss_nats": None})
    tracker.on_event("save", 1, path="step-1")
    tracker.on_sample(0, ["once upon"])
    tracker.on_step(1, {"loss_nats": 2.0})
    tracker.close()
    rows = records(tmp_path)
    assert [(r["step"], r["loss_nats"]) for r in rows if "loss_nats" in r] == [(0, 2.5), (1, 2.0)]
    assert [r["sample/0"] for r in rows if "sample/0" in r] == ["once upon"]
    assert [json.loads(r["event/save"]) for r in rows if "event/save" in r] == [{"path": "step-1"}]
    assert not any("val_loss_nats" in r for r in rows)
    first = (tmp_path / WeightsAndBiases.ID).read_text()
    WeightsAndBiases(tmp_path, project="bagu", config={}).close()
    assert (tmp_path / WeightsAndBiases.ID).read_text() == first  # a resume is the same run


def test_without_a_login_it_says_what_to_do(tmp_path: Path) -> None:
    """In a process of its own: wandb reads its settings once."""
    code = (
        "import pathlib; from bagu.runs.observer import WeightsAndBiases; "
        f"WeightsAndBiases(pathlib.Path({str(tmp_path)!r}), project='bagu', config={{}})"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environ |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_SILENT": "true"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert "BackendError: Weights & Biases could not start a run" in done.stderr and "wandb login" in done.stderr
    assert list(tmp_path.iterdir()) == []
