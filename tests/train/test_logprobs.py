"""Logprobs of packed targets, and their sums over sequences."""

from __future__ import annotations

import torch

from bagu.data.sequences import Tokens, pack
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.train.rl.logprobs import segment_sums, token_logprobs

MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
    max_len=32,
)  # fmt: skip
SEQUENCES = [Tokens(ids=(5, 6, 7, 8), start=2), Tokens(ids=(8, 9), start=1), Tokens(ids=(1, 2, 3), start=1)]


def test_sums_of_packed_logprobs_are_those_of_each_sequence_alone() -> None:
    model = init_weights(Transformer(MODEL, dtype=torch.float64), seed=1)
    batch = pack(SEQUENCES, tokens=16, max_segments=4)
    sums = segment_sums(token_logprobs(model, batch)[0], batch.cu_seqlens, len(SEQUENCES))
    for number, sequence in enumerate(SEQUENCES):
        ids = torch.tensor(sequence.ids)
        n = len(ids)
        hidden = model(ids, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n).hidden
        rows = model.logits(hidden).log_softmax(1)[:-1].gather(1, ids[1:, None])[sequence.start - 1 :]
        torch.testing.assert_close(sums[number].double(), rows.sum(), rtol=1e-6, atol=0)


def test_sums_have_the_gradient_of_their_values() -> None:
    values = torch.arange(9, dtype=torch.float64, requires_grad=True)  # whole numbers: sums are exact
    offsets = torch.tensor([0, 2, 5, 9, 9], dtype=torch.int32)
    sums = segment_sums(values, offsets, 2)
    assert sums.tolist() == [1, 9]
    (sums * torch.tensor([2.0, 3.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [2, 2, 3, 3, 3, 0, 0, 0, 0]
    assert segment_sums(values, offsets, 3)[2] == 26
