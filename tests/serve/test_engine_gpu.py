"""The engine on a GPU: CUDA graphs, blocks read in place, overlapping steps. None of them may change the text."""

from __future__ import annotations

import copy
import dataclasses
import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_adapters import merge_into, random_adapter
from small_engine import MODELS, small_model

from bagu import ops
from bagu.errors import BackendError
from bagu.nn.config import MLAConfig, ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.nn.sample import generate
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.grammar import Grammar
from bagu.serve.request import Request, Sampling
from bagu.serve.warm_up import WarmUp
from bagu.train.memory.flat import FlatParameters

pytestmark = pytest.mark.gpu

PROMPTS = [list(range(1, 30)), [5], [7, 8, 9] * 9, list(range(60, 64))]
GREEDY = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no graphs": {"cuda_graphs": False},
    "one step at a time": {"async_scheduling": False},
    "small blocks": {"block_size": 8},
    "chunks beside decodes": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preempted": {"block_size": 8, "num_blocks": 20},
}


def engine(kind: str, dtype: torch.dtype, **settings: Any) -> Engine:
    chosen = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64} | settings
    return Engine(small_model(kind, dtype).cuda(), None, EngineConfig(**chosen))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_greedy_text_equals_the_naive_loop(kind: str, way: str) -> None:
    it = engine(kind, torch.float32, **WAYS[way])
    want = generate(it.model, PROMPTS, 40, temperature=0.0)
    for _ in range(2):  # the second time with captured graphs and a warm prefix cache
        assert [list(c.tokens) for c in it.generate(PROMPTS, GREEDY)] == want
        assert it.blocks.used_count == 0
        it.scheduler.queues.check_integrity()


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 20, "block_size": 8}, {"quantization": "int8"}])
def test_traffic_after_the_warm_up_captures_no_graph_and_has_the_same_text(settings: dict[str, Any]) -> None:
    it = engine("gqa", torch.float32, **settings)
    want = [c.tokens for c in engine("gqa", torch.float32, **settings).generate(PROMPTS, GREEDY)]
    warming = WarmUp(it)
    warming.run(120.0)
    assert not warming.left and it.stats().steps == 0 and it.stats().blocks_cached == 0
    captured = set(it.runner.graphs.captured)  # type: ignore[union-attr]
    assert [c.tokens for c in it.generate(PROMPTS, GREEDY)] == want
    assert set(it.runner.graphs.captured) == captured  # type: ignore[union-attr]
    assert it.blocks.used_count == 0


@pytest.mark.parametrize("kind", ["gqa", "mha, tied"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_give_the_same_text_in_graphs(kind: str, weights: str) -> None:
    """A batch of a graph is padded; no row of an int8 or int4 product depends on the others."""
    texts = []
    for graphs in (True, False):
        it = engine(kind, torch.bfloat16, quantization=weights, cuda_graphs=graphs)
        texts.append([list(c.tokens) for c in it.generate(PROMPTS, GREEDY)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("way", WAYS)
def test_constrained_text_is_valid_and_equals_that_of_a_cpu(way: str) -> None:
    pytest.importorskip("llguidance")
    from constrained import POINT, constrained_model, json_tokenizer

    tokenizer = json_tokenizer()
    model = constrained_model(tokenizer)
    asked = [
        Sampling(max_tokens=100, temperature=t, seed=3, grammar=grammar, min_tokens=least)
        for t, least in ((0.0, 0), (1.0, 25)) for grammar in (Grammar.json_schema(POINT), Grammar.choice(["yes", "no"]))
    ]  # fmt: skip
    prompts = [tokenizer.encode(f"hello {i}") for i in range(4)]
    want = Engine(model, tokenizer, EngineConfig(num_blocks=64)).generate(prompts, asked)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | WAYS[way] | {"num_blocks": 128}
    found = Engine(copy.deepcopy(model).cuda(), tokenizer, EngineConfig(**settings)).generate(prompts, asked)
    for text in (c.text for c in found[::2]):
        assert set(json.loads(text or "")) == {"x", "name"}
    assert [c.finish for c in found] == ["stop"] * 4
    assert [c.tokens for c in found] == [c.tokens for c in want]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["gqa", "mqa, QK norm", "windows in all layers", "mla"])
def test_bf16_logprobs_are_near_the_exact_ones(kind: str, way: str) -> None:
    """In 16 bits attention is another kernel. The exact model scores the sampled text."""
    it = engine(kind, torch.bfloat16, **WAYS[way])
    drawn = it.generate(PROMPTS, Sampling(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, logprobs=0))
    exact = Engine(small_model(kind).cuda(), None, EngineConfig(num_blocks=64, max_num_seqs=8))
    told = exact.score([p + list(c.tokens) for p, c in zip(PROMPTS, drawn, strict=True)], [len(p) for p in PROMPTS])
    for mine, true in zip(drawn, told, strict=True):
        assert mine.logprobs is not None
        off = torch.tensor(mine.logprobs) - torch.tensor(true)
        assert off.abs().mean() < 0.1  # three layers of large weights in 8 bits: 0.02 to 0.05 measured


@pytest.mark.parametrize("way", WAYS)
def test_a_latent_of_deepseeks_size_is_near_the_exact_one(way: str) -> None:
    """40 heads over a latent of 512 + 64 features have a kernel of their own. The exact model scores the text drawn."""
    mla = MLAConfig(kv_rank=512, nope_dim=16, v_dim=16, rope_dim=64)
    config = dataclasses.replace(
        small_model("mla").config, mla=mla, num_heads=40, num_kv_heads=40, head_dim=80, init_std=0.05
    )
    exact = init_weights(Transformer(config), 0).eval().cuda()
    settings = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64} | WAYS[way]
    it = Engine(copy.deepcopy(exact).bfloat16(), None, EngineConfig(**settings))
    drawn = it.generate(PROMPTS, Sampling(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, logprobs=0))
    scorer = Engine(exact, None, EngineConfig(num_blocks=64, max_num_seqs=8))
    told = scorer.score([p + list(c.tokens) for p, c in zip(PROMPTS, drawn, strict=True)], [len(p) for p in PROMPTS])
    for mine, true in zip(drawn, told, strict=True):
        assert mine.logprobs is not None
        assert (torch.tensor(mine.logprobs) - torch.tensor(true)).abs().mean() < 0.1


@pytest.mark.parametrize("way", WAYS)
def test_scores_of_choices_that_share_a_prompt_are_those_of_each_alone(way: str) -> None:
    """In fp32. A sum of rounding errors: 64 ulps of a logprob and of the largest logit is far above it."""
    shared, choices = list(range(3, 40)), [[1], [2, 3], [4, 5, 6, 7, 8, 9], [10, 11, 12]]
    texts = [shared + choice for choice in choices]
    found = engine("gqa", torch.float32, **WAYS[way]).score(texts, [len(shared)] * 4)
    alone = engine("gqa", torch.float32, prefix_cache=False)
    for text, scores in zip(texts, found, strict=True):
        (want,) = alone.score([text], [len(shared)])
        for a, b in zip(scores, want, strict=True):
            assert abs(a - b) <= 64 * 2.0**-23 * (abs(b) + 16)


def test_a_seed_gives_the_same_text_in_any_batch_and_with_overlapping_steps() -> None:
    """In fp32, where the batch changes a probability by 1e-7, and so a sample with about that probability."""
    asks = [Sampling(max_tokens=30, temperature=0.8, top_p=0.9, seed=i, repetition_penalty=1.1) for i in range(4)]
    alone = [engine("gqa", torch.float32).generate([p], s)[0].tokens for p, s in zip(PROMPTS, asks, strict=True)]
    for settings in ({}, {"async_scheduling": False}):
        together = engine("gqa", torch.float32, **settings).generate(PROMPTS, asks)
        assert [c.tokens for c in together] == alone


def test_weights_replaced_while_a_step_is_in_flight_are_used_from_the_next_token_on() -> None:
    it = engine("gqa", torch.float32)
    other = {name: t.flip(0) for name, t in it.model.state_dict().items() if name.startswith("embedding")}
    stream = it.stream(PROMPTS[0], GREEDY)
    head = [next(stream).tokens[0] for _ in range(5)]
    it.update_weights(other)
    rest = [t for c in stream for t in c.tokens]
    assert len(head) + len(rest) == 40
    known = len(PROMPTS[0]) + 5
    fresh = generate(it.model, [PROMPTS[0] + head + rest[: 40 - 5 - 20]], 20, temperature=0.0)[0]
    assert rest[-20:] == fresh, f"tokens from {known} on are those of the old weights"


def test_graphs_over_shared_weights_are_kept_while_a_trainer_updates_them_in_place() -> None:
    """The flat buffers of a trainer move the weights once, and the graphs are captured again. After that every update
    is in place: the captured graphs decode with the new weights."""
    it = engine("gqa", torch.float32)
    it.generate(PROMPTS, GREEDY)
    first = it.runner.graphs
    assert first is not None and first.captured
    flat = FlatParameters(it.model)
    assert not first.reads(it.model)
    it.weights_changed()
    moved = it.runner.graphs
    assert moved is not None and moved is not first
    for number in range(3):
        flat.master.copy_(flat.master.roll(1 + number))
        flat.publish()
        it.weights_changed()
        assert it.runner.graphs is moved and it.stats().blocks_cached == 0
        want = generate(it.model, PROMPTS, 40, temperature=0.0)
        assert [list(c.tokens) for c in it.generate(PROMPTS, GREEDY)] == want
    assert moved.captured


def wide_model() -> Transformer:
    """The proportions of Qwen3-0.6B with 2 layers: heads of 128, GQA, QK norm, a vocabulary of 20,000."""
    config = ModelConfig(
        vocab_size=20_000, hidden_size=512, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=128,
        intermediate_size=1536, max_len=1024, qk_norm=True, tie_embeddings=True,
    )  # fmt: skip
    return init_weights(Transformer(config, device="cuda", dtype=torch.bfloat16), 0).eval()


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_graphs_of_a_quantized_model_read_the_weights_after_a_change(kind: str) -> None:
    """A change quantizes again into new tensors. Graphs of the old ones must not be replayed: the text is that of an
    engine that starts with the new weights, whose kernels are the same."""
    settings = EngineConfig(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64, quantization=kind)
    it = Engine(wide_model(), None, settings)
    before = [list(c.tokens) for c in it.generate(PROMPTS, GREEDY)]
    first = it.runner.graphs
    assert first is not None and first.captured
    it.update_weights({name: t.roll(1, 0) for name, t in it.model.state_dict().items() if "qkv" in name})
    assert it.runner.graphs is not first
    after = [list(c.tokens) for c in it.generate(PROMPTS, GREEDY)]
    fresh = Engine(it.model, None, settings)
    assert after == [list(c.tokens) for c in fresh.generate(PROMPTS, GREEDY)] != before


@pytest.mark.parametrize("kind", ["wide", *(kind for kind in MODELS if kind != "mla")])
def test_invariant_logprobs_have_the_trainers_bits_whatever_the_batch(kind: str) -> None:
    """Alone, among 256, in chunks, with a cached prefix, after preemption, with and without CUDA graphs."""
    model = wide_model() if kind == "wide" else small_model(kind, torch.bfloat16).cuda()
    vocabulary, long = (20_000, 300) if kind == "wide" else (97, 61)
    sampling = Sampling(max_tokens=24, temperature=1.0, seed=4, logprobs=0, ignore_eos=True)
    mine = [(7 * i + 3) % vocabulary for i in range(long)]
    others = [[(i * j + 5) % vocabulary for j in range(1 + i % 40)] for i in range(255)]
    runs: dict[str, tuple[float, ...]] = {}

    def note(name: str, prompts: list[list[int]], ready: Engine | None = None, **settings: Any) -> Engine:
        chosen: dict[str, Any] = {"num_blocks": 1600, "max_num_seqs": 256, "max_num_batched_tokens": 2048} | settings
        it = Engine(model, None, EngineConfig(invariant=True, **chosen)) if ready is None else ready
        found = it.generate(prompts, sampling)[-1]
        assert found.logprobs is not None
        runs[name] = found.logprobs
        texts[name] = found.tokens
        return it

    texts: dict[str, tuple[int, ...]] = {}
    alone = note("alone", [mine])
    note("warm", [mine], alone)
    assert alone.stats().prefix_hits > 0
    note("no graphs", [mine], cuda_graphs=False)
    note("among 256", [*others, mine])
    for chunk in (1, 7, 64):
        note(f"chunks of {chunk}", [mine], max_num_seqs=1, max_num_batched_tokens=chunk)
    # The long text fits, and not what the others need when they grow. Of groups of layers those without a window fill
    # the pool, and those with one have blocks beside them.
    blocks, windows = -(-(long + 24) // 16), [group.window for group in alone.blocks.groups]
    blocks += blocks + 2 if len(windows) > 1 and None in windows else 2
    tight = note("preempted", [[5], [9], mine], num_blocks=blocks, max_num_seqs=3)
    assert tight.stats().preemptions > 0
    ids = torch.tensor([*others[9], *mine, *texts["alone"]], device="cuda")
    ends = [0, len(others[9]), len(ids)]
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)]).cuda()
    with torch.no_grad(), ops.invariant():
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device="cuda")
        hidden = model(ids, positions, cu_seqlens, len(ids) - len(others[9])).hidden
        trained = ops.linear_cross_entropy(hidden[:-1], model.head_weight, ids[1:])
        runs["trainer"] = tuple(ops.token_losses(*trained).logprobs[-24:].tolist())
    assert {name: text == texts["alone"] for name, text in texts.items()} == dict.fromkeys(texts, True)
    assert {name: bits == runs["alone"] for name, bits in runs.items()} == dict.fromkeys(runs, True)


def test_a_model_without_invariant_kernels_is_refused() -> None:
    it = engine("mla", torch.bfloat16, invariant=True)
    with pytest.raises(BackendError, match="has no invariant form on a GPU"):
        it.generate(PROMPTS[:1], GREEDY)


@pytest.mark.parametrize("way", ["as it comes", "no graphs", "preempted"])
def test_adapters_in_one_batch_equal_merged_models(way: str) -> None:
    """Graphs are captured before the second adapter is loaded, which makes the stack grow: they are captured again. A
    batch without adapters has a graph of its own."""
    it = engine("gqa", torch.float32, max_adapters=2, max_adapter_rank=8, **WAYS[way])
    adapters = [random_adapter(small_model(), 1), random_adapter(small_model(), 2, rank=8)]
    merged = [small_model(), *(merge_into(small_model(), a) for a in adapters)]
    want = [generate(merged[i % 3].cuda(), [PROMPTS[i]], 40, temperature=0.0)[0] for i in range(4)]
    base = generate(merged[0], PROMPTS, 40, temperature=0.0)
    for number, adapter in enumerate(adapters):
        it.load_adapter(f"{number + 1}", "in memory", adapter)
        assert [list(c.tokens) for c in it.generate(PROMPTS, GREEDY)] == base
        names = [None if i % 3 in (0, 2 - number * 2) else f"{i % 3}" for i in range(4)]
        tokens: dict[str, list[int]] = {f"{i}": [] for i in range(4)}
        for i, name in enumerate(names):
            it.submit(Request(id=f"{i}", prompt=tuple(PROMPTS[i]), sampling=GREEDY, arrival=i, adapter=name))
        while it.has_work:
            for event in it.step():
                tokens[event.request_id].append(event.token)  # type: ignore[union-attr,arg-type]
        assert [tokens[f"{i}"] for i in range(4)] == [want[i] if n else base[i] for i, n in enumerate(names)]
        assert it.blocks.used_count == 0
