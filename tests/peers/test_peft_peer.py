"""PEFT judges adapters that bagu writes, and bagu reads those that PEFT writes: merged, both give the same weights.

Weights and not logits are compared: transformers computes parts of a Llama in fp32 even where its weights are fp64.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
from small_models import make, small  # noqa: E402
from test_peft import MODELS, adapted, theirs  # noqa: E402

from bagu.nn.lora import merge  # noqa: E402
from bagu.nn.peft import load_adapter, save_adapter  # noqa: E402
from bagu.nn.weights import save_pretrained  # noqa: E402

RANK, ALPHA = 3, 6


def base_in_transformers(folder: Path, name: str) -> Any:
    save_pretrained(make(small(**MODELS[name]), torch.float64), folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def assert_same(ours: Mapping[str, torch.Tensor], judge: Any) -> None:
    """W + s B A in fp64: RANK products and sums, and the factor, each rounded once."""
    want = judge.merge_and_unload().state_dict()
    for name, weight in ours.items():
        bound = (RANK + 2) * torch.finfo(torch.float64).eps * want[name].abs().max()
        assert (weight - want[name]).abs().max() <= bound, name


@pytest.mark.parametrize("name", MODELS)
def test_peft_reads_what_bagu_writes(tmp_path: Path, name: str) -> None:
    model = adapted(**MODELS[name])
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    judge = peft.PeftModel.from_pretrained(base_in_transformers(tmp_path / "base", name), tmp_path / "adapter")
    merge(model)
    assert_same(theirs(model), judge)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", ["default", "all-linear"])
def test_bagu_reads_what_peft_writes(tmp_path: Path, name: str, targets: str) -> None:
    model = make(small(**MODELS[name]), torch.float64)
    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, init_lora_weights=False,  # draws B, which else is zero
        target_modules=None if targets == "default" else targets,
    )  # fmt: skip
    judge = peft.get_peft_model(base_in_transformers(tmp_path / "base", name), config).double()
    judge.save_pretrained(tmp_path / "adapter")
    before = theirs(model)
    load_adapter(model, tmp_path / "adapter")
    merge(model)
    assert any(not torch.equal(before[n], w) for n, w in theirs(model).items())
    assert_same(theirs(model), judge)
