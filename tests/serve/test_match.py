"""Which models step.cpp decodes: found from the recorded forward, for every family and for layers it knows nothing of.

A model is right whichever way it decodes: the engine's logprobs are as near to the model in fp64 as `forward` in fp32.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_engine import MODELS, small_engine, small_model
from torch import nn

from bagu import ops
from bagu.machine import native
from bagu.nn.attention import Attention, Context, Softmax
from bagu.nn.block import Block
from bagu.nn.families import FAMILIES, family_of
from bagu.nn.ffn import FFN
from bagu.nn.init import init_weights
from bagu.nn.kv import KV, CacheError
from bagu.nn.linear import Linear
from bagu.nn.lora import add_lora
from bagu.nn.model import Transformer
from bagu.nn.norm import RMSNorm
from bagu.nn.positions import RopeEncoding, Signals
from bagu.serve.cpu.compiled import SOURCE
from bagu.serve.cpu.dataflow import Mismatch
from bagu.serve.cpu.match import KeptMatch, match
from bagu.serve.request import Sampling
from tests.variants import some

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 8, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4,
}  # fmt: skip
COMPILED: dict[str, dict[str, Any]] = {
    "llama": SIZES, "mistral": SIZES, "qwen2": SIZES, "qwen3": SIZES | {"head_dim": 8}, "granite": SIZES,
    "phi3": SIZES | {"pad_token_id": 0},
}  # fmt: skip
TWO_KINDS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
BY_FORWARD: dict[str, dict[str, Any]] = {
    "gemma3_text": SIZES | TWO_KINDS | {"query_pre_attn_scalar": 8},
    "gpt_oss": SIZES | TWO_KINDS | EXPERTS,
    "mixtral": SIZES | EXPERTS,
    "olmo2": SIZES,
    "smollm3": SIZES | {"no_rope_layers": [1, 0]},
    "qwen3_moe": SIZES | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "deepseek_v3": SIZES | LATENT,
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2},
}
BERT: dict[str, Any] = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}


@pytest.fixture(autouse=True)
def compiler() -> None:
    if native.library(SOURCE) is None:
        pytest.skip("no C++ compiler here")


def of_family(name: str, keys: dict[str, Any]) -> Transformer:
    hf = {"model_type": name} | keys
    return init_weights(Transformer(family_of(hf).config(hf)), 0).eval()


def assert_right(model: Transformer, *, compiled: bool) -> None:
    """The engine decodes as it should, and its logprobs are those of the model."""
    engine = small_engine(model)
    assert (engine.runner.compiled is not None) == compiled, engine.runner.mismatch
    assert (engine.runner.mismatch is None) == compiled
    sampling = Sampling(max_tokens=12, temperature=0.0, logprobs=0)
    prompts = [[1, 2, 3], [5] * 9, [7]]
    for prompt, answer in zip(prompts, engine.generate(prompts, sampling), strict=True):
        ids = torch.tensor([*prompt, *answer.tokens])
        exact, near = (logprobs(copy.deepcopy(model).to(dtype), ids) for dtype in (torch.float64, torch.float32))
        got = torch.tensor(answer.logprobs, dtype=torch.float64)
        want = exact[len(prompt) - 1 :]
        rounding = torch.finfo(torch.float32).eps * want.abs().max()
        assert (got - want).abs().max() <= 8 * (near - exact).abs().max() + 8 * rounding


@torch.no_grad()
def logprobs(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    """Of each token but the first, by a forward of all of them."""
    T = len(ids)
    hidden = model(ids, torch.arange(T), torch.tensor([0, T], dtype=torch.int32), T).hidden
    return model.logits(hidden).double().log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)


def test_every_family_is_here() -> None:
    assert {*COMPILED, *BY_FORWARD, "bert", "roberta"} == set(FAMILIES)


@pytest.mark.parametrize("name", [*COMPILED, *BY_FORWARD])
def test_families(name: str) -> None:
    assert_right(of_family(name, (COMPILED | BY_FORWARD)[name]), compiled=name in COMPILED)


def test_a_mismatch_of_position_tables_is_named_without_their_addresses() -> None:
    with pytest.raises(Mismatch, match=r"^layers that differ in rope_tables$"):
        match(of_family("smollm3", BY_FORWARD["smollm3"]))


def test_bert_has_no_cache_and_is_refused() -> None:
    with pytest.raises(CacheError, match="no KV cache"):
        small_engine(of_family("bert", BERT))


@pytest.mark.parametrize("kind", MODELS)
def test_kinds_of_models(kind: str) -> None:
    by_forward = (
        "learned, layer norm", "alibi", "mla", "output norm, QK norm over the width", "two ropes, sandwich",
        "nope, multipliers", "part of the features rotated", "sinks, experts",
    )  # fmt: skip
    assert_right(small_model(kind), compiled=kind not in by_forward)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_decode_by_forward(dtype: torch.dtype) -> None:
    assert small_engine(small_model(dtype=dtype)).runner.compiled is None


def test_weight_norm_and_lora_are_multiplied_out() -> None:
    model = small_model()
    add_lora(model, rank=2, alpha=4.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_b"):
                p.normal_(generator=torch.Generator().manual_seed(len(name)))
    assert_right(model, compiled=True)
    assert model.blocks[0].ffn.down.lora_a is not None, "the model itself stays as it is"
    config = dataclasses.replace(small_model().config, weight_norm=True)
    assert_right(init_weights(Transformer(config), 0).eval(), compiled=True)


# Layers that no configuration names. Each is put into a model that step.cpp has, and changes what is computed.


class HalvedAttention(Attention):
    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return 0.5 * super().forward(x, context)


class GatedAttention(Attention):
    """Each head's output times a gate."""

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return super().forward(x, context) * torch.sigmoid(x)


class NormedValues(Attention):
    """A norm on all of q, k and v."""

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        T, G, n, D = x.shape[0], self.num_groups, self.group_size, self.head_dim
        qkv = ops.rms_norm(self.qkv(x).view(T, G, n + 2, D), torch.ones(D, dtype=x.dtype, device=x.device), 1e-6)
        q, k, v = qkv.split((n, 1, 1), 2)
        q, k, v = self.turn(q, context), self.turn(k.squeeze(2), context), v.squeeze(2)
        assert self.softmax is not None
        return self.out(self.softmax(q.reshape(T, G * n, D), k, v, context).flatten(1))


class SwappedHeads(Attention):
    """Queries of group 0 ask the keys of the last group."""

    def turn(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return super().turn(x, context).flip(1) if x.ndim == 4 else super().turn(x, context)

    def cached(self, softmax: Softmax, kv: KV, qkv: torch.Tensor, signals: Signals) -> torch.Tensor:
        swapped = torch.cat((qkv[:, :, :-2].flip(1), qkv[:, :, -2:]), 2)
        return super().cached(softmax, kv, swapped, signals)


class SeparateOps(Attention):
    """QK norm, RoPE and the writes to the cache by separate ops."""

    def cached(self, softmax: Softmax, kv: KV, qkv: torch.Tensor, signals: Signals) -> torch.Tensor:
        T, G, n, D = qkv.shape[0], self.num_groups, self.group_size, self.head_dim
        q, k, v = qkv[:, :, :n], qkv[:, :, n], qkv[:, :, n + 1]
        q = q.reshape(T, G * n, D) if G == 1 or n == 1 else q
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        context = Context(torch.empty(0), 1, signals, kv)
        q, k = self.turn(q, context), self.turn(k, context)
        return softmax.cached(kv, q.reshape(T, G * n, D), k, v, D, signals)


class ByKind(Attention):
    """Rows of the QKV weight as [q heads, k heads, v heads]: another order, which the recording shows."""

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        T, G, n, D = x.shape[0], self.num_groups, self.group_size, self.head_dim
        q, k, v = self.qkv(x).view(T, -1, D).split((G * n, G, G), 1)
        assert self.softmax is not None
        y = self.softmax(super().turn(q, context), self.turn(k, context), v, context)
        return self.out(y.flatten(1))


class ParallelBlock(Block):
    """Attention and FFN read the same norm."""

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None, context: Context) -> Any:
        h, x = self.attention_norm.add(delta, x)
        return x, self.attend(h, context) + self.feed(h)[0], None


class ScaledResidual(Block):
    def forward(self, x: torch.Tensor, delta: torch.Tensor | None, context: Context) -> Any:
        return super().forward(x, None if delta is None else 0.7 * delta, context)


class ForgetfulBlock(Block):
    """The FFN's residual is the layer's input, without what attention added."""

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None, context: Context) -> Any:
        h, x = self.attention_norm.add(delta, x)
        h, _ = self.ffn_norm.add(self.attend(h, context), x)
        return x, self.feed(h)[0], None


class LoneToken(Block):
    """A lone token is treated differently."""

    def feed(self, x: torch.Tensor) -> Any:
        y, routing = super().feed(x)
        return (y if len(x) > 1 else 1.0 * y), routing


class InPlace(FFN):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mul_(0.9)


class ReadsAValue(FFN):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if x.isfinite().all().item() else 0.0)


class UpFirst(FFN):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_up(x).chunk(2, -1)
        return self.down(ops.swiglu(gate, up))


class OnePlusGain(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, 1 + self.weight, self.eps)

    def add(self, delta: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self(x), x) if delta is None else ops.add_rms_norm(delta, x, 1 + self.weight, self.eps)


class AnotherEps(RMSNorm):
    def add(self, delta: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert delta is not None
        return ops.add_rms_norm(delta, x, self.weight, 0.1)


class HalfPositions(RopeEncoding):
    def signals(self, positions: torch.Tensor, longest: int) -> Signals:
        return super().signals(positions // 2, longest)


class LaterPositions(RopeEncoding):
    """Queries are turned by the angle of the token before theirs, keys by their own."""

    def signals(self, positions: torch.Tensor, longest: int) -> Signals:
        found = super().signals(positions, longest)
        assert found.rows is not None
        return found._replace(rows=(found.rows - 1).clamp(min=0))


class ScaledEmbedding(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids) * 3.0


def become(path: str, kind: type[nn.Module]) -> Callable[[Transformer], None]:
    def change(model: Transformer) -> None:
        model.get_submodule(path).__class__ = kind

    return change


def scale_embedding(model: Transformer) -> None:
    model.embedding = ScaledEmbedding(model.embedding)  # type: ignore[assignment]


def turn_later(model: Transformer) -> None:
    become("positions", LaterPositions)(model)
    separate_ops(model)


def separate_ops(model: Transformer) -> None:
    for i in range(3):
        become(f"blocks.{i}.attention", SeparateOps)(model)


def bottleneck(model: Transformer) -> None:
    """Two products in the place of one."""
    down = model.blocks[1].ffn.down
    model.blocks[1].ffn.down = nn.Sequential(down, init_linear(32, 32))  # type: ignore[assignment]


def init_linear(inputs: int, outputs: int) -> Linear:
    linear = Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=0.2, generator=torch.Generator().manual_seed(0))
    return linear


NEW_LAYERS: dict[str, tuple[Callable[[Transformer], None], str]] = {
    "attention times a constant": (become("blocks.1.attention", HalvedAttention), "aten.mul"),
    "a gate on attention's output": (become("blocks.0.attention", GatedAttention), "aten.mul"),
    "a norm on the values": (become("blocks.2.attention", NormedValues), "a part of the result of rms_norm"),
    "heads in another order": (become("blocks.1.attention", SwappedHeads), "aten.cat"),
    "attention and FFN side by side": (become("blocks.1", ParallelBlock), "aten.add"),
    "a scaled residual": (become("blocks.1", ScaledResidual), "aten.mul"),
    "a residual that leaves attention out": (become("blocks.2", ForgetfulBlock), "residual"),
    "a lone token treated differently": (become("blocks.1", LoneToken), "aten.mul"),
    "an operation in place": (become("blocks.1.ffn", InPlace), "in place"),
    "a value that is read": (become("blocks.1.ffn", ReadsAValue), "meta"),
    "up before gate": (become("blocks.1.ffn", UpFirst), "two tensors"),
    "a gain of one plus the weight": (become("blocks.1.ffn_norm", OnePlusGain), "aten.add"),
    "norms with two constants": (become("blocks.1.ffn_norm", AnotherEps), "eps"),
    "other positions": (become("positions", HalfPositions), "aten.floor_divide"),
    "queries turned by another angle": (turn_later, "aten.clamp"),
    "a scaled embedding": (scale_embedding, "aten.mul"),
    "an FFN of three products": (bottleneck, "matmul where"),
}


@pytest.mark.parametrize("name", some(list(NEW_LAYERS), list(NEW_LAYERS)[::2]))
def test_a_new_kind_of_layer_decodes_by_forward_and_is_right(name: str) -> None:
    change, reason = NEW_LAYERS[name]
    model = small_model()
    match(model)
    change(model)
    with pytest.raises(Mismatch, match=reason):
        match(model)
    if name != "queries turned by another angle":  # a token's angle depends on its place in the batch there
        assert_right(model, compiled=False)


@pytest.mark.parametrize("kind", ["gqa", "mqa, QK norm"])
def test_attention_by_separate_ops_is_decoded_by_the_same_code(kind: str) -> None:
    model = small_model(kind)
    separate_ops(model)
    assert_right(model, compiled=True)


def test_rows_of_a_weight_in_another_order_are_read_off_the_recording() -> None:
    model = small_model()
    for i in range(3):
        become(f"blocks.{i}.attention", ByKind)(model)
    assert_right(model, compiled=True)


@pytest.mark.parametrize("kind", ["gqa", "mqa, QK norm"])
def test_a_match_is_kept_while_weights_change(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values change in place and at other addresses, as when a trainer moves the weights to its buffers."""
    model, kept = small_model(kind), KeptMatch()
    kept.step(model)
    for n, parameter in enumerate(model.parameters()):
        parameter.data = parameter.data * 2 if n % 2 else parameter.data.mul_(3)
    want = match(model)
    monkeypatch.setattr("bagu.serve.cpu.match.match", None)  # a second match would raise
    got = kept.step(model)
    assert got.table.data_ptr() == model.embedding.weight.data_ptr()
    for a, b in zip(got.layers, want.layers, strict=True):
        assert all(torch.equal(x.weight, y.weight) for x, y in zip(a[:4], b[:4], strict=True))
        assert (a.qk_gain is None) == (b.qk_gain is None)
        assert a.qk_gain is None or b.qk_gain is None or torch.equal(a.qk_gain, b.qk_gain)
