"""The dense KV cache, and generation with it: the same logits as the full sequence, for any chunking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import make, packed, small

from bagu.errors import ArgumentError
from bagu.nn import ModelConfig, Transformer
from bagu.nn.config import Alibi, MLAConfig, MoEConfig, NormConfig, Rope, T5Relative, YarnScaling
from bagu.nn.kv import CacheError, DenseKV
from bagu.nn.position_choices import Learned
from bagu.nn.sample import generate, pick, uniform

MLA = MLAConfig(q_rank=8, kv_rank=16, nope_dim=4, rope_dim=4, v_dim=6)
CONFIGS = {
    "gqa": small(),
    "mqa": small(num_kv_heads=1, qk_norm=True),
    "learned": small(positions=Learned(), norm=NormConfig(kind="layer", bias=True)),
    "alibi": small(positions=Alibi()),
    "t5": small(positions=T5Relative(buckets=8, max_distance=6)),
    "window": small(windows=(3, None)),
    "mla": small(num_kv_heads=4, mla=MLA, positions=Rope(scaling=YarnScaling(factor=4.0, original_max_len=8))),
    "moe": small(moe=MoEConfig(num_experts=4, top_k=2, expert_size=8, num_shared=1)),
    "batch": small(norm=NormConfig(kind="batch")),
}


def in_steps(model: Transformer, docs: list[torch.Tensor], steps: list[list[int]]) -> list[torch.Tensor]:
    """Logits of each document if step s adds steps[s][i] tokens of document i."""
    kv = DenseKV(model.config, len(docs), max(map(len, docs)), dtype=model.embedding.weight.dtype)
    done, out = [0] * len(docs), [[] for _ in docs]
    for step in steps:
        positions, cu_seqlens, max_len = kv.plan(step)
        new = torch.cat([d[a : a + n] for d, a, n in zip(docs, done, step, strict=True)])
        logits = model.logits(model(new, positions, cu_seqlens, max_len, kv).hidden)
        for i, part in enumerate(logits.split(step)):
            out[i].append(part)
        done = [a + n for a, n in zip(done, step, strict=True)]
    return [torch.cat(parts) for parts in out]


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_logits_equal_the_full_sequence(name: str) -> None:
    """A prefill in two chunks, single tokens, and a document that starts late."""
    model, lengths = make(CONFIGS[name], torch.float64).eval(), [11, 14, 3]
    batch = packed(lengths)
    full = model.logits(model(*batch).hidden).split(lengths)
    cut = in_steps(model, list(batch[0].split(lengths)), [[5, 1, 0], [1, 1, 0], [1, 2, 3], [4, 10, 0]])
    for a, b in zip(full, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@settings(max_examples=25)
@given(cuts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6))
def test_any_chunking_gives_the_same_logits(cuts: list[tuple[int, int]]) -> None:
    cuts = [c for c in cuts if any(c)] or [(1, 1)]
    lengths = [max(sum(column), 1) for column in zip(*cuts, strict=True)]
    steps = [list(c) for c in cuts]
    for i in range(2):
        steps[0][i] += lengths[i] - sum(s[i] for s in steps)
    model, batch = make(small(windows=(3, None)), torch.float64), packed(lengths)
    full = model.logits(model(*batch).hidden).split(lengths)
    for a, b in zip(full, in_steps(model, list(batch[0].split(lengths)), steps), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_mla_caches_only_its_latent() -> None:
    config = CONFIGS["mla"]
    latent, full = DenseKV(config, 2, 10), DenseKV(small(num_kv_heads=4), 2, 10)
    assert latent.num_bytes == 2 * 2 * 10 * (16 + 4) * 4  # layers, sequences, positions, kv_rank + rope_dim, fp32
    assert full.num_bytes == 2 * 2 * 2 * 10 * 4 * 8 * 4  # layers, keys and values, …


def test_the_bound_counts_the_past() -> None:
    """Two forwards of 20 new tokens are each below max_len = 32, but together they are 40."""
    model = make(small())
    kv = DenseKV(small(max_len=64), 1, 64)
    for n, fits in ((20, True), (20, False)):
        positions, cu_seqlens, max_len = kv.plan([n])
        ids = torch.zeros(n, dtype=torch.int64)
        if fits:
            model(ids, positions, cu_seqlens, max_len, kv)
        else:
            with pytest.raises(ArgumentError, match="40 tokens"):
                model(ids, positions, cu_seqlens, max_len, kv)


def test_models_without_a_cache_are_refused() -> None:
    with pytest.raises(CacheError, match="bidirectional"):
        DenseKV(small(causal=False), 1, 8)
    with pytest.raises(CacheError, match="linear"):
        DenseKV(small(attention="linear"), 1, 8)
    with pytest.raises(CacheError, match="33 positions"):
        DenseKV(small(), 1, 33)
    with pytest.raises(CacheError, match="9 tokens"):
        DenseKV(small(), 1, 8).plan([9])
    kv = DenseKV(CONFIGS["batch"], 1, 8)
    positions, cu_seqlens, max_len = kv.plan([2])
    with pytest.raises(ArgumentError, match="batch norm"):
        make(CONFIGS["batch"])(torch.zeros(2, dtype=torch.int64), positions, cu_seqlens, max_len, kv)


def greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Without a cache: the full text again for each token."""
    text = list(prompt)
    for _ in range(count):
        n = len(text)
        hidden = model(torch.tensor(text), torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n).hidden
        text.append(int(model.logits(hidden[-1:]).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", ["gqa", "mla", "moe"])
def test_generation_matches_the_model(name: str) -> None:
    model = make(CONFIGS[name], torch.float64)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    assert generate(model, prompts, 6, temperature=0.0) == [greedy(model, p, 6) for p in prompts]
    assert model.training


def test_sampling_does_not_depend_on_the_batch() -> None:
    model = make(small(), torch.float64)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    together = generate(model, prompts, 8, seed=7)
    assert together[:1] == generate(model, prompts[:1], 8, seed=7)
    assert together[:2] == generate(model, prompts[:2], 8, seed=7)
    assert together != generate(model, prompts, 8, seed=8)


def test_a_sequence_ends_at_its_eos_and_others_continue() -> None:
    model = make(small(), torch.float64)
    prompts = [[1, 2, 3], [4]]
    free = generate(model, prompts, 8, seed=1)
    eos = next(token for token in free[0] if token not in free[1])
    assert generate(model, prompts, 8, seed=1, eos_id=eos) == [free[0][: free[0].index(eos)], free[1]]


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        ([], {}),
        ([[]], {}),
        ([[1]], {"max_new_tokens": 0}),
        ([[1]], {"max_new_tokens": 32}),
        ([[1]], {"temperature": -1.0}),
        ([[1]], {"top_k": 0}),
        ([[1]], {"top_p": 0.0}),
        ([[1]], {"top_p": 1.5}),
    ],
)
def test_generation_refuses_bad_arguments(prompts: list[list[int]], options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        generate(make(small()), prompts, **{"max_new_tokens": 2} | options)


def test_samples_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 4000
    u = torch.tensor([uniform(3, i, 0) for i in range(n)])
    drawn = pick(logits.expand(n, -1), u, temperature=0.7).bincount(minlength=4) / n
    torch.testing.assert_close(drawn, (logits / 0.7).softmax(0), rtol=0, atol=0.03)


@settings(max_examples=50)
@given(k=st.integers(1, 12), p=st.floats(0.05, 1.0), u=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 99))
def test_samples_stay_inside_top_k_and_top_p(k: int, p: float, u: float, seed: int) -> None:
    logits = 2 * torch.randn(1, 10, generator=torch.Generator().manual_seed(seed))
    token = int(pick(logits, torch.tensor([u]), top_k=k, top_p=p))
    ranked = logits[0].argsort(descending=True)[:k]
    assert token in ranked.tolist()
    among = logits[0][ranked].softmax(0)
    place = ranked.tolist().index(token)
    assert among[:place].sum().item() < p + 1e-6  # the tokens before it do not reach p


def test_uniform_numbers_are_uniform_and_reproducible() -> None:
    numbers = [uniform(0, i, t) for i in range(50) for t in range(50)]
    assert len(set(numbers)) == 2500 and all(0 <= x < 1 for x in numbers)
    assert abs(sum(numbers) / 2500 - 0.5) < 0.02
    assert uniform(1, 2, 3) == uniform(1, 2, 3) != uniform(1, 3, 2)


def test_greedy_ignores_the_random_number() -> None:
    config: ModelConfig = small()
    assert config.causal
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert pick(logits, torch.tensor([0.999]), temperature=0.0).item() == 1
