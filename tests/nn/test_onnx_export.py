"""The ONNX export without its packages, and the models that it refuses. tests/peers has ONNX Runtime as the judge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make, small

from bagu.errors import ArgumentError, BaguError
from bagu.nn.config import Alibi, MoEConfig
from bagu.nn.onnx_export import check_onnx, export_onnx
from bagu.recipes.command import export_main
from bagu.recipes.verbs import ExportOptions


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(BaguError, match="needs the package onnx") as caught:
        export_main(ExportOptions(model="some/model", out=tmp_path / "model.onnx", format="onnx"))
    assert "bagu[onnx]" in caught.value.hint


def test_the_file_and_the_dtype_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="not the name of an ONNX file"):
        export_main(ExportOptions(model="some/model", out=tmp_path / "model", format="onnx"))
    with pytest.raises(ArgumentError, match="ONNX in bf16"):
        check_onnx("bf16")


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [({"moe": MoEConfig(num_experts=4, top_k=2, expert_size=8)}, torch.float32, "a mixture of experts"),
     ({"windows": (4, None)}, torch.float32, "a sliding window"), ({"positions": Alibi()}, torch.float32, "Alibi"),
     ({"score_head": True}, torch.float32, "a score head"), ({}, torch.float64, "float64")],
)  # fmt: skip
def test_models_without_a_graph_are_refused(
    options: dict[str, Any], dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bagu.nn.onnx_export.check_onnx", lambda: None)
    with pytest.raises(ArgumentError, match=message):
        export_onnx(make(small(**options), dtype), tmp_path / "model.onnx")
