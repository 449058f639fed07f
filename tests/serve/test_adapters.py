"""LoRA adapters in the engine: tokens equal to merged models, the prefix cache, loading, unloading and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_adapters import merge_into, random_adapter, saved_adapter
from small_engine import small_engine, small_model

from bagu.errors import ArgumentError
from bagu.machine.hub import ADAPTER_CONFIG, WeightsError
from bagu.nn.model import Transformer
from bagu.nn.peft import WEIGHTS
from bagu.serve.adapters.layers import FEW_TOKENS, NO_ADAPTER, AdapterWeights, GroupedLinear, StackedLinear
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling, Unservable

KINDS = ("gqa", "mqa, QK norm")
PROMPTS = [[(7 * i + 5 * j) % 97 for j in range(n)] for i, n in enumerate((5, 9, 14, 3, 40, 7, 8, 30))]
EPS = torch.finfo(torch.float64).eps
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


def run(engine: Engine, prompts: list[list[int]], adapters: list[str | None]) -> list[list[int]]:
    """The tokens of requests that run at the same time."""
    for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        engine.submit(Request(id=f"{i}", prompt=tuple(prompt), sampling=GREEDY, arrival=i, adapter=adapter))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step():
            tokens[int(event.request_id)].append(event.token)  # type: ignore[union-attr,arg-type]
    engine.scheduler.queues.check_integrity()
    assert engine.blocks.used_count == 0
    return tokens


def alone(model: Transformer, prompts: list[list[int]]) -> list[list[int]]:
    return [list(c.tokens) for c in small_engine(model, num_blocks=128).generate(prompts, GREEDY)]


@pytest.mark.parametrize("compiled", [True, False], ids=["C++", "layers"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_of_merged_models_in_one_batch(
    kind: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("bagu.serve.runner.compiles", lambda dtype: False)
    model = small_model(kind)
    engine = small_engine(model, num_blocks=128, max_adapters=3, max_adapter_rank=19)
    # 19 is more than a vector of any machine and no multiple of one
    adapters = [random_adapter(model, 1), random_adapter(model, 2, rank=19), random_adapter(model, 3, targets="qkv")]
    for i, adapter in enumerate(adapters):
        engine.load_adapter(f"a{i}", "in memory", adapter)
    merged = [small_model(kind), *(merge_into(small_model(kind), a) for a in adapters)]
    names = (None, "a0", "a1", "a2")
    tokens = run(engine, PROMPTS, [names[i % 4] for i in range(8)])
    expected = [alone(merged[i % 4], [PROMPTS[i]])[0] for i in range(8)]
    assert tokens == expected
    base = alone(merged[0], PROMPTS)
    assert all(tokens[i] != base[i] for i in range(8) if i % 4), "an adapter that changes nothing proves nothing"


@pytest.mark.parametrize("settings", [{"speculative": "ngram", "speculative_always": True}, {"kv_dtype": "int8"}])
def test_speculation_and_an_8_bit_cache_work_with_adapters(settings: dict[str, Any]) -> None:
    model = small_model()
    adapter = random_adapter(model, 1)
    engine = small_engine(model, num_blocks=128, max_adapters=1, **settings)
    engine.load_adapter("a", "in memory", adapter)
    repeated = [p * 3 for p in PROMPTS[:4]]
    merged = small_engine(merge_into(small_model(), adapter), num_blocks=128, **settings)
    expected = [run(merged, [p], [None])[0] for p in repeated]
    assert run(engine, repeated, ["a"] * 4) == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_adapter_is_added_to_quantized_weights(quantization: str) -> None:
    """W is rounded and B A is not: an adapter that cancels nothing gives the base's tokens, another gives others."""
    model = small_model()
    engine = small_engine(model, num_blocks=128, max_adapters=2, quantization=quantization)
    for name, scale in (("zero", 0.0), ("one", 1.0)):
        found = random_adapter(model, 1)
        pairs = {n: (a, scale * b) for n, (a, b) in found.pairs.items()}
        engine.load_adapter(name, "in memory", type(found)(rank=3, scale=0.5, pairs=pairs))
    base = run(engine, PROMPTS[:5], [None] * 5)
    assert run(engine, PROMPTS[:5], ["zero"] * 5) == base
    assert run(engine, PROMPTS[:5], ["one"] * 5) != base


@pytest.mark.parametrize("tokens", [7, FEW_TOKENS + 7], ids=["decode", "prompt"])
def test_stacked_layers_equal_grouped_ones(tokens: int) -> None:
    """The GPU's form, in fp64 on a CPU, also after the stack has grown and a slot was used again."""
    model = small_model(dtype=torch.float64)
    linear = model.blocks[0].attention.qkv  # type: ignore[union-attr]
    slots = torch.tensor([0, NO_ADAPTER, 2, 1, 2, 2, 0]).repeat(tokens)[:tokens]
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs = []
    for kind in (StackedLinear, GroupedLinear):
        weights = AdapterWeights(model, kind)
        for slot, (seed, rank) in enumerate(((1, 2), (2, 5), (3, 3))):
            weights.install(slot, random_adapter(model, seed, rank=rank))
        weights.install(1, random_adapter(model, 4, rank=1, targets="qkv"))
        weights.rows.load(slots)
        outputs.append(weights.layers["blocks.0.attention.qkv"](x))
    stacked, grouped = (y.detach() for y in outputs)
    torch.testing.assert_close(stacked, grouped, rtol=0, atol=64 * EPS * float(grouped.abs().max()))
    assert torch.equal(outputs[0][1], linear(x)[1]), "a token without an adapter has the base's output"


def test_the_prefix_cache_is_not_shared_between_adapters_nor_loads() -> None:
    model = small_model()
    engine = small_engine(model, num_blocks=64, max_adapters=2)
    engine.load_adapter("a", "in memory", random_adapter(model, 1))
    prompt = PROMPTS[4]
    hits = []
    for name in (None, "a", None, "a"):
        before = engine.stats().prefix_hits
        run(engine, [prompt], [name])
        hits.append(engine.stats().prefix_hits - before)
    assert hits == [0, 0, 36, 36], "blocks of 4: nine of ten are found, for the same weights"
    engine.unload_adapter("a")
    second = random_adapter(model, 2)
    engine.load_adapter("a", "in memory", second)
    before = engine.stats().prefix_hits
    (tokens,) = run(engine, [prompt], ["a"])
    assert engine.stats().prefix_hits == before
    assert tokens == alone(merge_into(small_model(), second), [prompt])[0]


def test_requests_finish_with_the_adapter_they_started_with() -> None:
    model = small_model()
    engine = small_engine(model, num_blocks=128, max_adapters=2)
    first, second = random_adapter(model, 1), random_adapter(model, 2)
    engine.load_adapter("a", "in memory", first)
    engine.submit(Request(id="old", prompt=tuple(PROMPTS[2]), sampling=GREEDY, adapter="a"))
    engine.step()
    engine.unload_adapter("a")
    with pytest.raises(Unservable, match="no adapter 'a'"):
        engine.submit(Request(id="new", prompt=(1,), sampling=GREEDY, adapter="a"))
    engine.load_adapter("a", "in memory", second)  # into the other slot
    with pytest.raises(ArgumentError, match="1 adapters are loaded, and 1 more finish requests"):
        engine.load_adapter("b", "in memory", first)
    engine.submit(Request(id="new", prompt=tuple(PROMPTS[2]), sampling=GREEDY, adapter="a"))
    tokens: dict[str, list[int]] = {"old": [], "new": []}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id].append(event.token)  # type: ignore[union-attr,arg-type]
    expected = [alone(merge_into(small_model(), a), [PROMPTS[2]])[0] for a in (first, second)]
    assert tokens["old"] == expected[0][1:], "the first step's token is not in the list"
    assert tokens["new"] == expected[1]
    engine.load_adapter("b", "in memory", first)
    assert engine.blocks.used_count == 0


def test_an_adapter_of_a_file_is_that_of_the_merged_model(tmp_path: Path) -> None:
    from bagu.nn.lora import merge
    from bagu.nn.peft import load_adapter

    saved_adapter(small_model(), tmp_path / "run" / "adapter", 5)
    engine = small_engine(small_model(), num_blocks=128, max_adapters=1)
    info = engine.load_adapter("a", str(tmp_path / "run"))  # a LoRA run of bagu: its adapter is in adapter/
    assert info.rank == 3
    merged = small_model()
    load_adapter(merged, tmp_path / "run" / "adapter")
    merge(merged)
    assert run(engine, PROMPTS[:3], ["a"] * 3) == alone(merged, PROMPTS[:3])


def damaged(folder: Path, how: str) -> None:
    weights = folder / WEIGHTS
    tensors = load_file(weights)
    first = sorted(tensors)[0]
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "nan":
        save_file({**tensors, first: tensors[first] * float("nan")}, weights)
    elif how == "unknown":
        save_file({**tensors, "base_model.model.lm_head.lora_A.weight": torch.ones(3, 32)}, weights)
    elif how == "shape":
        save_file({**tensors, first: tensors[first][:, :-1].contiguous()}, weights)
    elif how == "config":
        (folder / ADAPTER_CONFIG).write_text("{")
    elif how == "missing":
        weights.unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [("cut", "cannot read"), ("nan", "NaN or infinite"), ("unknown", "match no linear"), ("shape", "but the linear is"),
     ("config", "as JSON"), ("missing", "does not exist"), ("rank", "rank 5, and the server allows 4")],
)  # fmt: skip
def test_an_adapter_that_cannot_be_served_is_refused(tmp_path: Path, how: str, message: str) -> None:
    saved_adapter(small_model(), tmp_path, 5, rank=5 if how == "rank" else 3)
    damaged(tmp_path, how)
    engine = small_engine(small_model(), num_blocks=128, max_adapters=1, max_adapter_rank=4)
    with pytest.raises(WeightsError, match=message):
        engine.load_adapter("a", str(tmp_path))
    assert not engine.adapters.named
    assert run(engine, PROMPTS[:2], [None, None]) == alone(small_model(), PROMPTS[:2])


def test_names_and_numbers_of_adapters_are_checked() -> None:
    model = small_model()
    engine = small_engine(model, max_adapters=1)
    engine.load_adapter("a", "in memory", random_adapter(model, 1))
    with pytest.raises(ArgumentError, match="already an adapter 'a'"):
        engine.load_adapter("a", "in memory", random_adapter(model, 1))
    with pytest.raises(ArgumentError, match="holds 1 at most"):
        engine.load_adapter("b", "in memory", random_adapter(model, 1))
    with pytest.raises(WeightsError, match="is not a folder"):
        engine.load_adapter("b", "/nowhere")
    for settings, message in (
        ({"invariant": True}, "invariant"), ({"tp": 2}, "tp = 2"),
        ({"adapters": (("a", "x"), ("a", "y"))}, "two adapters"),
        ({"max_adapters": 0, "adapters": (("a", "x"),)}, "max_adapters = 0"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            EngineConfig(**{"max_adapters": 2} | settings)  # type: ignore[arg-type]


def test_new_weights_of_the_base_keep_the_adapters() -> None:
    model = small_model()
    engine = small_engine(model, num_blocks=128, max_adapters=1)
    adapter = random_adapter(model, 1)
    engine.load_adapter("a", "in memory", adapter)
    run(engine, PROMPTS[:1], ["a"])
    engine.update_weights({"blocks.0.attention_norm.weight": model.blocks[0].attention_norm.weight.detach() * 0.5})  # type: ignore[union-attr,operator]
    other = small_model()
    with torch.no_grad():
        other.blocks[0].attention_norm.weight.mul_(0.5)  # type: ignore[union-attr,operator]
    assert run(engine, PROMPTS[:3], ["a"] * 3) == alone(merge_into(other, adapter), PROMPTS[:3])


def test_the_memory_of_adapters_is_bounded_by_the_formula() -> None:
    from bagu.serve.adapters.registry import adapter_bytes

    model = small_model()
    qkv, out, up, down = (32, 64), (32, 32), (32, 96), (48, 32)
    each = 3 * sum(qkv) + sum(out) + 2 * sum(up) + sum(down)
    assert adapter_bytes(model, 2, 4) == 2 * 4 * 3 * each * 4  # slots, rank, layers, bytes


def test_slots_of_a_batch_are_grouped() -> None:
    weights = AdapterWeights(small_model(), GroupedLinear)
    weights.rows.load(torch.tensor([1, NO_ADAPTER, 1, 0]))
    found = {slot: None if rows is None else rows.tolist() for slot, rows in weights.rows.groups}
    assert found == {0: [3], 1: [0, 2]}
    weights.rows.load(torch.from_numpy(np.array([2, 2])))
    assert weights.rows.groups == [(2, None)]
