"""The reference policy does not change while the model trains, with full weights and with LoRA."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bagu.data.sequences import Tokens, pack
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.lora import add_lora, lora_state, without_lora
from bagu.nn.model import Transformer
from bagu.train.rl.logprobs import token_logprobs
from bagu.train.rl.reference import Reference

MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
    max_len=32,
)  # fmt: skip
BATCH = pack([Tokens(ids=(5, 6, 7, 8), start=2), Tokens(ids=(8, 9), start=1)], tokens=8, max_segments=2)


@pytest.mark.parametrize("lora", [False, True])
def test_the_reference_stays_at_the_initial_weights(lora: bool) -> None:
    model = init_weights(Transformer(replace(MODEL, dropout=0.3), dtype=torch.float32), seed=1).eval()
    with torch.no_grad():
        initial = token_logprobs(model, BATCH)[0]
    if lora:
        add_lora(model, rank=2, alpha=4.0)
    model.train()
    reference = Reference.of(model)
    assert (reference.model is model) == lora  # adapters need no second copy of the weights
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1)
    assert torch.equal(reference.logprobs(BATCH), initial)  # without dropout, which would draw other numbers
    assert model.training and not reference.logprobs(BATCH).requires_grad
    model.eval()
    assert not torch.equal(token_logprobs(model, BATCH)[0], initial)


def test_adapters_return_after_a_failure() -> None:
    model = init_weights(Transformer(MODEL, dtype=torch.float32), seed=1)
    add_lora(model, rank=2, alpha=4.0)
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="inside"), without_lora(model):
        assert not lora_state(model)
        raise RuntimeError("inside")
    assert {name: id(p) for name, p in model.named_parameters()} == before
