"""`bagu bench layers` on a CPU: rows of every implementation, with errors that fit the dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bagu.bench.layer_list import LAYERS
from bagu.cli import main
from bagu.nn import drop_in


def run(*args: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "layers", *args])
    assert stopped.value.code == 0


NAMES = ("int8_linear", "conv2d", "swiglu")


@pytest.mark.slow
def test_layers_are_timed_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(*NAMES, "--no-compile", "--batch", "1", "--seconds", "0", "--device", "cpu", "--out", str(tmp_path), "--json")
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert {row["layer"] for row in rows} == set(NAMES)
    for row in rows:
        assert 0 < row["low_s"] <= row["median_s"] <= row["high_s"] and row["per_s"] == pytest.approx(
            1 / row["median_s"]
        )
        if row["pass"] == "forward":
            rounded = row["layer"] == "int8_linear" and row["implementation"] == "bagu"
            assert row["error"] < (0.05 if rounded else 1e-5)
    pairs = {(row["layer"], row["pass"]) for row in rows if row["implementation"] == "bagu"}
    assert pairs == {(row["layer"], row["pass"]) for row in rows if row["implementation"] == "eager"}
    machine = rows[0]["env"]["machine"]
    assert len((tmp_path / f"{machine}.jsonl").read_text().splitlines()) == len(rows)
    assert (tmp_path / "plots" / machine / "conv2d.png").stat().st_size > 5000
    assert "swiglu, batch 1" in captured.err


@pytest.mark.parametrize("name", LAYERS["cpu"])
def test_a_layer_of_both_kits_has_the_same_weights_and_output(name: str) -> None:
    layer = LAYERS["cpu"][name]
    theirs, ours = layer.build(nn), layer.build(drop_in)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randint(layer.tokens, (1, 16)) if layer.tokens else torch.randn(1, *layer.shape)
    torch.testing.assert_close(ours(x), theirs(x), **{"rtol": 0.1, "atol": 0.1} if name == "int8_linear" else {})


def test_an_unknown_layer_gives_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "layers", "con2d"])
    assert stopped.value.code == 2 and "'conv2d'" in capsys.readouterr().err
