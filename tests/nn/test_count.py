"""Counts against measurements of the model itself: numels, FLOPs that run, bytes that autograd keeps, and a cache's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bagu.nn import count
from bagu.nn.config import MLAConfig, ModelConfig, MoEConfig, NormConfig, Rope
from bagu.nn.init import init_weights
from bagu.nn.kv import DenseKV
from bagu.nn.model import Transformer
from bagu.nn.position_choices import Learned
from bagu.ops.call import dispatch

LLAMA = ModelConfig(
    vocab_size=101, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24, intermediate_size=96,
    max_len=64,
)  # fmt: skip
MOE = MoEConfig(num_experts=8, top_k=3, expert_size=32, num_shared=1, dense_layers=(0,))
MLA = MLAConfig(q_rank=20, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=12)
BERT: dict[str, Any] = {
    "norm": NormConfig(kind="layer", placement="post", bias=True), "positions": Learned(), "causal": False,
    "ffn": "gelu", "ffn_bias": True, "qkv_bias": True, "out_bias": True, "embedding_norm": True, "num_token_types": 2,
    "mlm_head": True, "tie_embeddings": True, "num_kv_heads": 4,
}  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "tied_mqa_window": dataclasses.replace(LLAMA, tie_embeddings=True, num_kv_heads=1, windows=(5, None)),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, qkv_bias=True),
    "gpt2": dataclasses.replace(
        LLAMA, num_kv_heads=4, norm=NormConfig(kind="layer", bias=True), positions=Learned(), ffn="gelu_tanh"
    ),
    "bert": dataclasses.replace(LLAMA, **BERT),
    "sandwich": dataclasses.replace(LLAMA, norm=NormConfig(placement="sandwich"), ffn="relu2"),
    "scale_norm": dataclasses.replace(LLAMA, norm=NormConfig(kind="scale"), ffn="geglu"),
    "group_norm": dataclasses.replace(LLAMA, norm=NormConfig(kind="group", groups=4, bias=True)),
    "no_norm": dataclasses.replace(LLAMA, norm=NormConfig(placement="none", alpha=0.2)),
    "dropout": dataclasses.replace(LLAMA, dropout=0.1),
    "moe": dataclasses.replace(LLAMA, moe=MOE),
    "deepseek": dataclasses.replace(
        LLAMA, mla=MLA, head_dim=24, num_kv_heads=4,
        moe=dataclasses.replace(MOE, scoring="sigmoid", bias_rate=0.001, num_groups=4, top_groups=2),
    ),
    "mla_no_q_rank": dataclasses.replace(
        LLAMA, mla=dataclasses.replace(MLA, q_rank=None), num_kv_heads=4, positions=Rope(layout="interleaved")
    ),
}  # fmt: skip


def made(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    return init_weights(Transformer(config, dtype=dtype), seed=0)


def run(model: Transformer, tokens: int) -> torch.Tensor:
    """Logits of one document."""
    ids = torch.arange(tokens) % model.config.vocab_size
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    return model.logits(model(ids, torch.arange(tokens), cu_seqlens, tokens).hidden)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that a GPU runs, through the interpreter; an op that has none runs on the torch backend, as there."""
    pytest.importorskip("triton")

    def as_on_a_gpu(spec: Any, asked: str | None, first: torch.Tensor, args: Any) -> str:
        chosen = dispatch.automatic_backend(spec, args) if "triton" in spec.backends else "torch"
        if chosen == "triton":
            dispatch.load(spec.name, "triton")
        return chosen

    monkeypatch.setattr(dispatch, "_choose", as_on_a_gpu)


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name: str) -> None:
    config = MODELS[name]
    counted, model = count.parameters(config), Transformer(config, device="meta")
    assert counted.total == sum(p.numel() for p in model.parameters())
    assert counted.norm == sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert counted.ffn == sum(p.numel() for n, p in model.named_parameters() if ".ffn." in n)


def test_active_parameters_are_those_with_a_gradient() -> None:
    """Of a token that is alone, an expert it was not sent to has no gradient at all."""
    model = made(dataclasses.replace(MODELS["moe"], vocab_size=1, tie_embeddings=True))
    run(model, 1).sum().backward()
    experts = [p for n, p in model.named_parameters() if n.endswith((".ffn.gate_up", ".ffn.down"))]
    assert experts
    idle = sum(e.numel() for p in experts for e in p.grad if not e.any())  # type: ignore[union-attr]
    counted = count.parameters(model.config)
    assert counted.total - counted.active == idle


def product(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Of matrices; a norm's backward may sum rows as a product with a vector, which is no linear layer."""
    return 2 * a[0] * a[1] * b[1] if min(a[0], b[1]) > 1 else 0


MATMULS = ("aten.mm", "aten.addmm", "bagu.grouped_rows", "bagu.grouped_weights")


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_matmuls_are_those_that_run(name: str) -> None:
    """Forward exactly as counted, and backward exactly twice that."""
    T, model = 12, made(MODELS[name])
    mapping = {torch.ops.aten.mm: product}
    with FlopCounterMode(display=False, custom_mapping=mapping) as forward:
        logits = run(model, T)
    with FlopCounterMode(display=False, custom_mapping=mapping) as backward:
        logits.sum().backward()

    def matmuls(mode: FlopCounterMode) -> int:
        return sum(n for op, n in mode.get_flop_counts()["Global"].items() if str(op).startswith(MATMULS))

    counted = count.flops(model.config, T)
    assert matmuls(forward) == counted.linear * T
    assert matmuls(backward) == 2 * counted.linear * T


def test_flops_of_attention_are_half_the_square_when_causal() -> None:
    def attention(context: int, **change: Any) -> float:
        return count.flops(dataclasses.replace(LLAMA, max_len=4096, **change), context).attention

    per_pair = 2 * 2 * LLAMA.num_heads * LLAMA.head_dim * LLAMA.num_layers
    assert attention(1) == per_pair
    assert attention(1000) == per_pair * 1001 / 2
    assert attention(1000, causal=False) == per_pair * 1000
    assert attention(1000, windows=(10,)) == per_pair * (10 * 11 / 2 + 990 * 10) / 1000
    # the same by a counter that sees all products, of an attention that makes all scores
    T, config = 16, dataclasses.replace(LLAMA, causal=False)
    q, k = (torch.randn(T, h, config.head_dim) for h in (config.num_heads, config.num_kv_heads))
    with FlopCounterMode(display=False) as mode:
        scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, 1))
        torch.einsum("hij,jhd->ihd", scores, k.repeat_interleave(2, 1))
    assert mode.get_total_flops() * config.num_layers == count.flops(config, T).attention * T


def test_six_nd() -> None:
    """6N is the matmuls' count, but for norms and biases, which are no products; attention is what it leaves out."""
    for config in (LLAMA, MODELS["tied_mqa_window"], MODELS["moe"]):
        n, f = count.parameters(config), count.flops(config, 1)
        assert count.six_nd(config) - 6 * n.norm == 3 * f.linear
    big = dataclasses.replace(LLAMA, max_len=1 << 16)
    ratios = [count.flops(big, context).training / count.six_nd(big) for context in (1, 64, 4096, 1 << 16)]
    assert ratios == sorted(ratios) and ratios[0] < 1.05 and ratios[-1] > 100
    assert count.six_nd(LLAMA, embeddings=True) - count.six_nd(LLAMA) == 6 * 101 * 64


def test_known_models() -> None:
    """Sizes their authors published."""
    llama = ModelConfig(
        vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=14336, max_len=8192,
    )  # fmt: skip
    assert count.parameters(llama).total == 8_030_261_248
    assert count.kv_bytes(llama) == 131_072  # 128 KiB a token in bf16
    deepseek = ModelConfig(
        vocab_size=129280, hidden_size=7168, num_layers=61, num_heads=128, num_kv_heads=128, head_dim=192,
        intermediate_size=18432, max_len=4096,
        mla=MLAConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(num_experts=256, top_k=8, expert_size=2048, num_shared=1, dense_layers=(0, 1, 2)),
    )  # fmt: skip
    counted = count.parameters(deepseek)
    assert round(counted.total / 1e9) == 671 and round(counted.active / 1e9) in (37, 38)
    assert count.kv_bytes(deepseek) == 61 * (512 + 64) * 2


@pytest.mark.parametrize("name", ["llama", "tied_mqa_window", "deepseek"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_bytes_are_those_of_a_cache(name: str, dtype: torch.dtype) -> None:
    cache = DenseKV(MODELS[name], 3, 40, dtype=dtype)
    assert cache.num_bytes == 3 * 40 * count.kv_bytes(MODELS[name], itemsize=dtype.itemsize)


def kept_bytes(model: Transformer, tokens: int) -> int:
    """Bytes of the storages that autograd holds after a forward, weights and inputs left out."""
    held: dict[int, int] = {}
    out: set[int] = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in out:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(t)  # so that no later storage gets its address
        return t

    ids = torch.arange(tokens) % model.config.vocab_size
    positions, cu_seqlens = torch.arange(tokens), torch.tensor([0, tokens], dtype=torch.int32)
    out |= {t.untyped_storage().data_ptr() for t in (ids, positions, cu_seqlens)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        logits = model.logits(model(ids, positions, cu_seqlens, tokens).hidden)
    assert logits.requires_grad
    return sum(held.values())


# What is kept and does not grow with the tokens, or differs on a CPU.
BESIDE = {
    "bert": 101 * (64 + 8) * 4,  # the head's weight with its bias in it
    "dropout": 5 * 12 * 64 * (4 - 1),  # a CPU keeps a mask as numbers, a GPU as bytes
    "moe": 8 * 4,  # where each expert's rows end
    "deepseek": 8 * 4,
}


@pytest.mark.parametrize("name", MODELS)
def test_activation_bytes_are_those_autograd_keeps(name: str, kernels: None) -> None:
    T, model = 12, made(MODELS[name])
    counted = count.activation_bytes(model.config, T, itemsize=4) * T
    assert kept_bytes(model, T) == counted + BESIDE.get(name, 0)


def test_recomputing_blocks_keeps_their_inputs_and_one_block() -> None:
    deep = dataclasses.replace(LLAMA, num_layers=32)
    whole, less = (count.activation_bytes(deep, 64, recompute=how) for how in ("none", "block"))
    one = count.activation_bytes(LLAMA, 64) - count.activation_bytes(dataclasses.replace(LLAMA, num_layers=1), 64)
    assert less < whole / 5
    assert less == pytest.approx(31 * 2 * 64 * 2 + 64 * 2 + one, rel=0.1)  # x and delta of each block but the first


def test_linear_attention_does_not_grow_with_the_context() -> None:
    config = dataclasses.replace(LLAMA, attention="linear", max_len=4096)
    assert count.flops(config, 64).attention == count.flops(config, 4096).attention
    assert count.activation_bytes(config, 64) == count.activation_bytes(config, 4096)
    assert count.kv_bytes(config) == 0


def test_mfu() -> None:
    assert count.mfu(tokens_per_s=2000, flops_per_token=3e9, peak_flops=12e12) == 0.5


def test_flops_may_be_counted_at_contexts_longer_than_the_model_takes() -> None:
    short, long = count.flops(LLAMA, LLAMA.max_len), count.flops(LLAMA, 4 * LLAMA.max_len)
    assert long.linear == short.linear and long.attention > 3 * short.attention


def test_a_count_computes_no_tables_of_positions() -> None:
    """Those of 2^40 positions would take 96 TiB."""
    assert count.flops(dataclasses.replace(LLAMA, max_len=1 << 40), 64) == count.flops(LLAMA, 64)
