"""Block-sparse attention from pages: the engine's tokens are those of the training forward, however a step is run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from small_engine import small_engine, small_model

from bagu.errors import BaguError
from bagu.nn import Transformer
from bagu.nn.choices import BlockChoice
from bagu.serve.kv.groups import LayerGroup
from bagu.serve.request import Sampling

CHOICE = BlockChoice(size=4, top=2, near=1, dense_below=12)
PROMPTS = [
    [5 + i % 11 for i in range(45)],
    [9, 8, 7],
    [5 + i % 11 for i in range(32)] + [3, 4],
    [60 - i for i in range(48)],
]
GREEDY = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)


def sparse_model(kind: str = "gqa", choice: BlockChoice = CHOICE) -> Transformer:
    model = small_model(kind)
    return model.with_attention(dataclasses.replace(model.config, attention="blocks", blocks=choice))


def naive(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by a forward over the whole text for each of them."""
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            T = len(text)
            cu = torch.tensor([0, T], dtype=torch.int32)
            hidden = model(torch.tensor(text), torch.arange(T), cu, T).hidden
            text.append(int(model.logits(hidden[-1:]).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"num_blocks": 22},  # preemption
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},  # chunks that end inside blocks
        pytest.param({"prefix_cache": False, "async_scheduling": True}, marks=pytest.mark.slow),
        {"speculative": "ngram", "speculative_always": True},
        {"invariant": True},
    ],
    ids=str,
)
def test_tokens_are_those_of_the_training_forward(settings: dict[str, Any]) -> None:
    model = sparse_model()
    engine = small_engine(model, **settings)
    want = [naive(model, p, 20) for p in PROMPTS]
    assert [list(c.tokens) for c in engine.generate(PROMPTS, GREEDY)] == want
    assert [list(c.tokens) for c in engine.generate(PROMPTS, GREEDY)] == want  # with a warm prefix cache
    assert (engine.stats().preemptions > 0) == ("num_blocks" in settings)
    engine.scheduler.queues.check_integrity()


@pytest.mark.parametrize("top", [0, 100])
def test_a_choice_of_all_blocks_is_dense_attention(top: int) -> None:
    choice = BlockChoice(size=4, top=top, near=0 if top else 100, dense_below=0)
    model = sparse_model(choice=choice)
    dense = [list(c.tokens) for c in small_engine(small_model()).generate(PROMPTS, GREEDY)]
    assert [list(c.tokens) for c in small_engine(model).generate(PROMPTS, GREEDY)] == dense


def test_the_engine_serves_a_dense_checkpoint_with_blocks() -> None:
    model = small_model()
    asked = dataclasses.replace(model.config, blocks=CHOICE)
    model.config = asked
    engine = small_engine(model, attention="blocks")
    assert engine.runner.kv.choice == CHOICE and engine.blocks.block_size == 4
    want = naive(sparse_model(), PROMPTS[0], 20)
    assert list(engine.generate(PROMPTS[:1], GREEDY)[0].tokens) == want
    with pytest.raises(BaguError, match="KV blocks of 8 positions"):
        small_engine(model, attention="blocks", block_size=8)


def test_an_8_bit_cache_keeps_means() -> None:
    engine = small_engine(sparse_model(), kv_dtype="int8")
    exact = small_engine(sparse_model())
    for mine, other in zip(engine.generate(PROMPTS, GREEDY), exact.generate(PROMPTS, GREEDY), strict=True):
        assert mine.tokens[0] == other.tokens[0]
    assert all(layer.means is not None and layer.means.dtype == torch.float32 for layer in engine.runner.kv.layers)


def seen_by(model: Transformer, window: int, first: int, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens with a mask over all keys: the last `window` and the first `first`."""
    text, attend = list(prompt), torch.nn.functional.scaled_dot_product_attention
    T = 0

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        i, j = torch.arange(T)[:, None], torch.arange(T)[None]
        seen = (j <= i) & ((i - j < window) | (j < first))
        n = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(n, 1).transpose(0, 1) for x in (k, v))
        return attend(q.transpose(0, 1), k, v, attn_mask=seen).transpose(0, 1), None

    from bagu.nn import attention as module

    original = module.ops.attention
    module.ops.attention = masked  # type: ignore[assignment]
    try:
        with torch.inference_mode():
            for _ in range(count):
                T = len(text)
                cu = torch.tensor([0, T], dtype=torch.int32)
                hidden = model(torch.tensor(text), torch.arange(T), cu, T).hidden
                text.append(int(model.logits(hidden[-1:]).argmax()))
    finally:
        module.ops.attention = original
    return text[len(prompt) :]


@pytest.mark.parametrize(
    ("window", "sinks"),
    [(10, 3), pytest.param(7, 4, marks=pytest.mark.slow), pytest.param(9, 0, marks=pytest.mark.slow), (200, 4)],
)
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 9}, {"num_blocks": 20}], ids=str)
def test_first_tokens_beside_a_window(window: int, sinks: int, settings: dict[str, Any]) -> None:
    model = small_model()
    engine = small_engine(model, window=window, attention_sinks=sinks, **settings)
    want = [seen_by(model, window, sinks, p, 20) for p in PROMPTS[:3]]
    assert [list(c.tokens) for c in engine.generate(PROMPTS[:3], GREEDY)] == want
    assert engine.blocks.groups == (LayerGroup((0, 1, 2), window, sinks),)
    engine.scheduler.queues.check_integrity()


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BaguError, match="attention_sinks = 4, window = None"):
        small_engine(small_model(), attention_sinks=4)
    with pytest.raises(BaguError, match="MLA"):
        small_engine(small_model("mla"), window=8)
