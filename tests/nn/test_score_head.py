"""The score head: one number per token, trained whole beside LoRA, read and written as transformers' classifier."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Packed, make, packed, small

from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import ArgumentError
from bagu.nn import Transformer, count
from bagu.nn.config import MoEConfig, NormConfig
from bagu.nn.families import family_for
from bagu.nn.lora import add_lora, lora_state
from bagu.nn.position_choices import Learned
from bagu.nn.score import with_score_head
from bagu.nn.weights import WeightsError, from_pretrained, save_pretrained
from bagu.recipes.models import load_model, save_model

LENGTHS = (9, 1, 14)
GPT2: dict[str, Any] = {
    "norm": NormConfig(kind="layer", bias=True), "positions": Learned(), "num_kv_heads": 4, "qkv_bias": True,
    "out_bias": True, "ffn": "gelu_tanh", "ffn_bias": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True, "tie_embeddings": True},
    "qwen3_moe": {"qk_norm": True, "moe": MoEConfig(num_experts=4, top_k=2, expert_size=16)},
    "gpt2": GPT2,
}


def scored(**changes: Any) -> Transformer:
    model = with_score_head(make(small(**changes))).eval()
    assert model.score is not None
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(7))
    return model


def texts() -> Packed:
    """Documents without control tokens, whose ids are 0 to 5."""
    ids, *rest = packed(LENGTHS, vocab=55)
    return ids + 6, *rest


@torch.no_grad()
def last_scores(model: Transformer) -> torch.Tensor:
    batch = texts()
    assert model.score is not None
    return model.score(model(*batch).hidden)[batch[2][1:].long() - 1]


def test_a_new_score_head_gives_zero_and_replaces_the_logits() -> None:
    model = make(small())
    hidden = model(*packed(LENGTHS)).hidden
    assert with_score_head(model) is model and model.config == small(score_head=True) and model.head is None
    assert model.score is not None and torch.equal(model.score(hidden), torch.zeros(sum(LENGTHS)))
    assert torch.equal(hidden, model(*packed(LENGTHS)).hidden)
    with pytest.raises(ArgumentError, match="score head and no logits"):
        model.logits(hidden)
    with pytest.raises(ArgumentError, match="already"):
        with_score_head(model)
    fresh = make(small(score_head=True))
    assert fresh.state_dict().keys() == model.state_dict().keys()
    assert fresh.score is not None and not fresh.score.weight.any()


def test_scores_of_a_bf16_model_are_fp32() -> None:
    model = scored().bfloat16()
    hidden = model(*packed(LENGTHS)).hidden
    assert model.score is not None and hidden.dtype == torch.bfloat16
    torch.testing.assert_close(model.score(hidden), hidden.float() @ model.score.weight[0].float(), rtol=0, atol=0)


def test_counts_include_the_score_head_instead_of_the_logits() -> None:
    config = small()
    plain, with_score = count.parameters(config), count.parameters(replace(config, score_head=True))
    assert plain.head == config.vocab_size * config.hidden_size and with_score.head == config.hidden_size
    assert count.flops(replace(config, score_head=True), 16).linear < count.flops(config, 16).linear


def test_lora_trains_the_score_head_whole() -> None:
    model = scored()
    assert not any("score" in name for name in add_lora(model, rank=2, alpha=4.0))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {*lora_state(model), "score.weight"}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_it_as_a_sequence_classifier_with_equal_scores(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = scored(**FAMILIES[family])
    assert family_for(model.config).name == family
    tokenizer = BpeTokenizer.train(["a"], vocab_size=262)
    model = scored(**FAMILIES[family], vocab_size=262)
    save_model(model, tokenizer, tmp_path)
    loader = transformers.AutoModelForSequenceClassification
    theirs, said = loader.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    pad = theirs.config.pad_token_id
    assert theirs.config.num_labels == 1 and pad == tokenizer.token_id("<|mask|>") != tokenizer.eos_id
    rows = torch.full((len(LENGTHS), max(LENGTHS)), pad)
    for row, ids in zip(rows, texts()[0].split(LENGTHS), strict=True):
        row[: len(ids)] = ids
    with torch.no_grad():
        found = theirs.eval()(rows, attention_mask=(rows != pad).long()).logits[:, 0]
    ours = last_scores(model)
    assert ((found - ours).abs().max() / ours.abs().max()).item() <= 1e-5
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).pad_token_id == pad
    assert torch.equal(last_scores(load_model(tmp_path)), ours)


def test_a_classifier_with_two_labels_is_refused(tmp_path: Path) -> None:
    save_pretrained(scored(), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"num_labels": 2, "id2label": {"0": "bad", "1": "good"}}
    file.write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="a classifier with 2 labels"):
        from_pretrained(tmp_path)


def test_a_model_without_a_family_keeps_its_score_head(tmp_path: Path) -> None:
    model = scored(norm=NormConfig(kind="scale"))
    save_model(model, None, tmp_path)
    assert torch.equal(last_scores(load_model(tmp_path)), last_scores(model))
