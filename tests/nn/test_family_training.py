"""Gradients of families equal those of transformers' autograd; encoders without a head give its hidden states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from family_draws import BASE
from safetensors.torch import load_file
from small_models import documents
from test_family_keys import bound, judge_of, saved, texts, write_json

from bagu import ops
from bagu.errors import ArgumentError
from bagu.nn.families import FAMILIES
from bagu.nn.weights import from_pretrained, parts_of, save_pretrained

transformers = pytest.importorskip("transformers")
NEW = ("mixtral", "phi3", "smollm3", "granite", "olmo2", "gemma3_text", "gpt_oss")
CHANGES: dict[str, dict[str, Any]] = {
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3,
                "logits_scaling": 2.0},
    "gpt_oss": {"swiglu_limit": 0.7},
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5},
    "gemma3_text": {"sliding_window_pattern": 2},
    "phi3": {"partial_rotary_factor": 0.5},
}  # fmt: skip


def gradients(model: Any, text: torch.Tensor, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of transformers' model, and its gradients under the names of files: it saves them as its weights."""
    model = copy.deepcopy(model)
    loss = torch.nn.functional.cross_entropy(model(text[None]).logits[0, :-1], text[1:])
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    model.save_pretrained(folder)
    return loss.item(), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", NEW)
def test_gradients_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """In fp64, so that only the formulas can differ: an error in one shows as 1e-3 or more. Some steps of transformers
    stay in fp32 (softmax, norms, cos), so the limit comes from its own error in fp32."""
    hf = {"model_type": family, **BASE[family], **CHANGES.get(family, {}), "tie_word_embeddings": False}
    hf["pad_token_id"] = None  # transformers gives the padding row of the embedding no gradient
    write_json(tmp_path, hf)
    judge = judge_of(tmp_path, family)
    judge.config._experts_implementation = "eager"  # the default has no fp64
    saved(judge, tmp_path, hf)
    text = texts()[0]
    rough_loss, rough = gradients(judge, text, tmp_path / "fp32")
    want_loss, want = gradients(judge.double(), text, tmp_path / "fp64")
    ours = from_pretrained(tmp_path, dtype=torch.float64)
    hidden = ours(*documents([text])).hidden
    weights = torch.full((len(text) - 1,), 1 / (len(text) - 1), dtype=torch.float64)
    loss = ops.linear_cross_entropy_loss(hidden[:-1], ours.head_weight, text[1:], weights)[0]
    loss.backward()
    assert abs(loss.item() - want_loss) <= bound(abs(rough_loss - want_loss), want_loss)
    with torch.no_grad():
        for p in ours.parameters():
            assert p.grad is not None
            p.copy_(p.grad)
    for name, part in parts_of(ours, FAMILIES[family]).items():
        limit = bound((rough[name] - want[name]).abs().max().item(), want[name].abs().max().item())
        assert (part.save() - want[name]).abs().max().item() <= limit, name


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_an_encoder_without_a_head_gives_the_hidden_states_of_transformers(family: str, tmp_path: Path) -> None:
    head = {"bert": "BertModel", "roberta": "RobertaModel"}[family]
    hf = {"model_type": family, **BASE[family], "architectures": [head], "pad_token_id": 1}
    write_json(tmp_path, hf)
    judge = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(tmp_path)).eval()
    saved(judge, tmp_path, hf)
    ours = from_pretrained(tmp_path, dtype=torch.float32)
    text = texts()[0]
    text[3::7] = 1  # transformers gives RoBERTa's padding token no position
    with torch.no_grad():
        got, want = ours(*documents([text])).hidden, judge(text[None]).last_hidden_state[0]
        exact = judge.double()(text[None]).last_hidden_state[0]
        limit = bound((want - exact).abs().max().item(), want.abs().max().item())
        assert (got - want).abs().max().item() <= limit
        save_pretrained(ours, tmp_path / "export")
        again, said = transformers.AutoModel.from_pretrained(tmp_path / "export", output_loading_info=True)
        assert not said["unexpected_keys"] and all("pooler" in key for key in said["missing_keys"])
        assert (again.eval()(text[None]).last_hidden_state[0] - want).abs().max().item() <= limit
    assert torch.equal(from_pretrained(tmp_path / "export")(*documents([text])).hidden, got)
    with pytest.raises(ArgumentError, match="no head"):
        ours.logits(got)
