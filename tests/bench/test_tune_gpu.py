"""`bagu tune ops` on a GPU, and what a second process makes of its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bagu.bench import tune_ops
from bagu.bench.tune_steps import kind_of, targets
from bagu.ops.tuning import lookup
from bagu.ops.tuning.store import Measurement, Store, Winner

SHAPES = ["M=256,N=1024", "M=256,N=1023"]
SECOND = """
import json, torch
from triton import knobs
hits = []
knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
from bagu import ops
from bagu.ops.tuning import lookup
for N in (1024, 1023):
    x = torch.randn(256, N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ops.rms_norm(x, w, 1e-6, backend="triton").sum().backward()
table = lookup.table()
print(json.dumps({"hits": hits, "exact": [kind in table.results for kind in table.found]}))
"""

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_second_process_finds_every_result_and_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAGU_TUNING", str(tmp_path / "tuning.jsonl"))
    monkeypatch.setattr(tune_ops, "shipped_store", lambda: Store(tmp_path / "none.jsonl"))
    store = Store(tmp_path / "tuning.jsonl")
    assert tune_ops.main(["rms_norm"], shapes=SHAPES, budget=60, store=store) == 0
    found = [r for r in store.records() if isinstance(r, Winner)]
    device = lookup.device_name(torch.device("cuda"))
    kinds = {kind_of(t, torch.bfloat16, device) for t in targets(["rms_norm"], (), SHAPES, torch.bfloat16)}
    assert {w.kind for w in found} == kinds and len(found) == 4
    measured = [r for r in store.records() if isinstance(r, Measurement) and r.status == "ok"]
    assert {tuple(r.options.items()) for r in measured} > {()} and all(r.seconds > 0 for r in measured)
    run = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, check=True)
    seen = json.loads(run.stdout)
    assert seen["hits"] and all(seen["hits"]) and seen["exact"] == [True] * 4
    capsys.readouterr()
    tune_ops.main(["rms_norm"], shapes=SHAPES, budget=60, store=store)
    assert "4 steps have a result already" in capsys.readouterr().out
    lookup.reload()
