"""LoRA: no change at first, only the pairs train, and merging keeps the logits."""

from __future__ import annotations

import pytest
import torch
from small_models import loss, make, packed, small

from bagu.errors import ArgumentError
from bagu.nn import Transformer
from bagu.nn.config import MLAConfig, MoEConfig
from bagu.nn.lora import add_lora, lora_state, merge

BATCH = packed([9, 14])


def adapted(**options: object) -> Transformer:
    """A model with LoRA on every linear, with random pairs."""
    model = make(small(**options), torch.float64)
    add_lora(model, rank=3, alpha=6.0)
    with torch.no_grad():
        for p in lora_state(model).values():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    return model


def test_add_lora_changes_no_output() -> None:
    model = make(small())
    before = model(*BATCH).hidden
    names = add_lora(model, rank=4, alpha=8.0)
    assert len(names) == 8  # qkv, out, gate_up, down of two layers: none of them square
    assert torch.equal(before, model(*BATCH).hidden)


def test_only_the_pairs_train() -> None:
    model = make(small())
    add_lora(model, rank=4, alpha=8.0, targets=".*(qkv|down)")
    loss(model, BATCH).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == set(lora_state(model))
    assert len(trained) == 8


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True},
        {"num_kv_heads": 4, "mla": MLAConfig(q_rank=8, kv_rank=16, nope_dim=4, rope_dim=4, v_dim=6)},
        {"moe": MoEConfig(num_experts=4, top_k=2, expert_size=8, num_shared=1)},
    ],
    ids=["gqa", "mla", "moe"],
)
def test_merged_logits_equal_unmerged(options: dict[str, object]) -> None:
    plain, model = make(small(**options), torch.float64), adapted(**options)
    before = model.logits(model(*BATCH).hidden)
    assert not torch.allclose(before, plain.logits(plain(*BATCH).hidden), atol=1e-3)
    merge(model)
    torch.testing.assert_close(model.logits(model(*BATCH).hidden), before, rtol=1e-10, atol=1e-10)
    assert not lora_state(model) and all(p.requires_grad for p in model.parameters())
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_bad_lora_arguments_are_refused() -> None:
    model = make(small())
    with pytest.raises(ArgumentError, match="no linear"):
        add_lora(model, rank=4, alpha=8.0, targets="q_proj")
    with pytest.raises(ArgumentError, match="rank 0"):
        add_lora(model, rank=0, alpha=8.0)
    with pytest.raises(ArgumentError, match="no LoRA"):
        merge(model)
    with pytest.raises(ArgumentError, match="weight normalization"):
        add_lora(make(small(weight_norm=True)), rank=4, alpha=8.0)
    assert all(p.requires_grad for p in model.parameters())
    add_lora(model, rank=4, alpha=8.0, targets=".*qkv")
    with pytest.raises(ArgumentError, match="has LoRA already"):
        add_lora(model, rank=4, alpha=8.0)
