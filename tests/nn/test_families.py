"""Families: reading config.json, and writing a config that reads back as the same model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagu.errors import BaguError, UnknownName
from bagu.machine.hub import WeightsError
from bagu.nn.config import (
    Alibi,
    GateClamp,
    LayerPositions,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    Multipliers,
    NormConfig,
    Rope,
    YarnScaling,
)
from bagu.nn.families import FAMILIES, family_for, family_of
from bagu.nn.position_choices import Llama3Scaling, NoPositions

# published values from config.json on the hub, without unused keys
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
QWEN25_05B = {
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "attention_bias": False, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "v_head_dim": 128, "vocab_size": 129280,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "vocab_size": 50257,
}  # fmt: skip


def read(hf: dict[str, Any]) -> ModelConfig:
    return family_of(hf).config(hf)


def test_llama_31() -> None:
    config = read(LLAMA_31_8B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.positions == Rope(
        base=500000.0,
        scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192),
    )
    assert config.norm == NormConfig(kind="rms", placement="pre", eps=1e-5)


def test_qwen25_has_a_window_but_does_not_use_it() -> None:
    config = read(QWEN25_05B)
    assert config.windows == (None,)
    assert config.qkv_bias and not config.out_bias and config.tie_embeddings
    windowed = read(QWEN25_05B | {"use_sliding_window": True, "max_window_layers": 22})
    assert [windowed.window(i) for i in (0, 21, 22, 23)] == [None, None, 32768, 32768]


def test_deepseek_v3() -> None:
    config = read(DEEPSEEK_V3)
    assert config.mla == MLAConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert config.moe is not None and config.moe.dense_layers == (0, 1, 2)
    assert (config.moe.num_groups, config.moe.top_groups, config.moe.scoring) == (8, 4, "sigmoid")
    assert config.positions == Rope(
        base=10000.0,
        layout="interleaved",
        scaling=YarnScaling(factor=40.0, original_max_len=4096, mscale=1.0, mscale_all_dim=1.0),
    )


def test_yarn_has_the_defaults_of_its_paper() -> None:
    """These three keys enable Qwen2.5's long context."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read(QWEN25_05B | {"rope_scaling": scaling}).positions == Rope(
        base=1000000.0, scaling=YarnScaling(factor=4.0, original_max_len=32768, beta_fast=32.0, beta_slow=1.0)
    )


def test_gpt2_defaults_of_missing_keys() -> None:
    config = read(GPT2)
    assert config.intermediate_size == 4 * 768 and config.tie_embeddings and config.dropout == 0.1


@pytest.mark.parametrize("hf", [LLAMA_31_8B, QWEN25_05B, DEEPSEEK_V3, GPT2], ids=lambda hf: hf["model_type"])
def test_round_trip(hf: dict[str, Any]) -> None:
    family, config = family_of(hf), read(hf)
    written = json.loads(json.dumps(family.write(config)))
    assert family.config(written) == config
    assert family_for(config) is family


def test_both_rope_layouts_are_equal() -> None:
    new = {k: v for k, v in LLAMA_31_8B.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA_31_8B["rope_scaling"]}  # type: ignore[dict-item]
    assert read(new) == read(LLAMA_31_8B)


@pytest.mark.parametrize("name", ["qwen3_mo", "smollm4", "llama4", "ministral", "deepseek_v2", "Llama"])
def test_an_unknown_family_lists_all_and_suggests_none(name: str) -> None:
    """A similar name is another architecture: loading ministral as mistral would work and be wrong."""
    with pytest.raises(UnknownName, match=f"'{name}'") as caught:
        family_of({"model_type": name})
    assert caught.value.hint == f"supported: {', '.join(FAMILIES)}"


@pytest.mark.parametrize("name", ["gemma3", "phi4_multimodal"])
def test_a_model_with_a_vision_tower_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownName, match=f"{name} has a vision tower") as caught:
        family_of({"model_type": name})
    assert "text model only" in caught.value.hint


def test_a_file_without_a_family_is_refused() -> None:
    with pytest.raises(WeightsError, match="no model_type"):
        family_of({})


@pytest.mark.parametrize(
    ("hf", "change", "says"),
    [
        (LLAMA_31_8B, {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        (LLAMA_31_8B, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        (LLAMA_31_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        (GPT2, {"activation_function": "swish"}, "activation_function = 'swish'"),
    ],
)
def test_an_unsupported_option_is_refused(hf: dict[str, Any], change: dict[str, Any], says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        read(hf | change)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(WeightsError, match="hidden_size"):
        read({k: v for k, v in LLAMA_31_8B.items() if k != "hidden_size"})


SMALL = ModelConfig(
    vocab_size=100, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
    max_len=64,
)  # fmt: skip
EXPERTS = MoEConfig(num_experts=8, top_k=2, expert_size=32)


def test_a_model_is_saved_as_the_simplest_family_that_fits() -> None:
    names = {
        "llama": SMALL,
        "mistral": dataclasses.replace(SMALL, windows=(16,)),
        "qwen2": dataclasses.replace(SMALL, qkv_bias=True, windows=(None, 8)),
        "qwen3": dataclasses.replace(SMALL, qk_norm=True),
        "qwen3_moe": dataclasses.replace(SMALL, qk_norm=True, moe=dataclasses.replace(EXPERTS, dense_layers=(2, 0))),
        "mixtral": dataclasses.replace(SMALL, moe=EXPERTS),
        "phi3": dataclasses.replace(SMALL, positions=Rope(dim=8)),
        "smollm3": dataclasses.replace(SMALL, layer_positions=LayerPositions(layers=(1, 3), positions=NoPositions())),
        "granite": dataclasses.replace(SMALL, multipliers=Multipliers(attention=0.2, residual=0.3)),
        "olmo2": dataclasses.replace(SMALL, norm=NormConfig(placement="output"), qk_norm="width"),
        "gemma3_text": dataclasses.replace(
            SMALL,
            norm=NormConfig(placement="sandwich", unit_offset=True),
            multipliers=Multipliers(embedding=8.0),
            qk_norm=True,
            windows=(5, None),
            layer_positions=LayerPositions(layers=(0, 2), positions=Rope(base=10.0)),
        ),
        "gpt_oss": dataclasses.replace(
            SMALL,
            sinks=True,
            gate_clamp=GateClamp(),
            ffn_bias=True,
            windows=(5, None),
            moe=dataclasses.replace(EXPERTS, router_bias=True),
        ),
    }
    assert {name: family_for(config).name for name, config in names.items()} == {name: name for name in names}


@pytest.mark.parametrize(
    "change",
    [
        {"positions": Alibi()},
        {"ffn": "relu2"},
        {"qk_norm": True, "windows": (8, 16, None, None)},
        {"out_bias": True},
        {"moe": EXPERTS, "ffn_bias": True},
        {"sinks": True},
        {"lm_head": False},
        {"layer_positions": LayerPositions(layers=(0,), positions=Rope(base=10.0))},
        {"norm": NormConfig(kind="rms", placement="sandwich")},
        {"attention": "linear"},
        {"weight_norm": True},
    ],
)
def test_a_model_that_no_family_fits_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WeightsError, match="no supported checkpoint family"):
        family_for(dataclasses.replace(SMALL, **change))


def test_training_only_fields_do_not_matter() -> None:
    assert family_for(dataclasses.replace(SMALL, dropout=0.2, init_std=0.01)).name == "llama"


PLAIN: dict[str, Any] = {
    "heads": (4, 2), "head_dim": 8, "window": None, "qk_norm": False, "qkv_bias": False, "out_bias": False,
    "tied": False, "moe": False, "ffn": "swiglu", "base": 1e4,
}  # fmt: skip


@settings(max_examples=60)
@example(**PLAIN)
@example(**PLAIN | {"out_bias": True})
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    head_dim=st.sampled_from([8, 16, 40]),
    window=st.sampled_from([None, 5]),
    qk_norm=st.booleans(),
    qkv_bias=st.booleans(),
    out_bias=st.booleans(),
    tied=st.booleans(),
    moe=st.booleans(),
    ffn=st.sampled_from(["swiglu", "geglu", "geglu_tanh", "gelu"]),
    base=st.sampled_from([1e4, 5e5]),
)
def test_the_found_family_describes_the_same_model(
    heads: tuple[int, int], head_dim: int, window: int | None, qk_norm: bool, qkv_bias: bool, out_bias: bool,
    tied: bool, moe: bool, ffn: Any, base: float,
) -> None:  # fmt: skip
    """For any options: either a family is found and reads back what it writes, or all of them refuse."""
    config = dataclasses.replace(
        SMALL, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, windows=(window,), qk_norm=qk_norm,
        qkv_bias=qkv_bias, out_bias=out_bias, tie_embeddings=tied, moe=EXPERTS if moe else None, ffn=ffn,
        positions=Rope(base=base),
    )  # fmt: skip
    found = [name for name in FAMILIES if reads_back(name, config)]
    if found:
        assert reads_back(family_for(config).name, config)
    else:
        with pytest.raises(WeightsError, match="no supported checkpoint family"):
            family_for(config)


def reads_back(name: str, config: ModelConfig) -> bool:
    """Whether a family's config.json, if it writes one for this model, is read as the same model."""
    try:
        again = FAMILIES[name].config(json.loads(json.dumps(FAMILIES[name].write(config))))
    except BaguError:
        return False
    windows = [again.window(i) for i in range(config.num_layers)]
    moe = again.moe and dataclasses.replace(again.moe, aux_weight=None)
    size = config.intermediate_size if moe is not None and not moe.dense_layers else again.intermediate_size
    same = dataclasses.replace(again, windows=config.windows, moe=moe, intermediate_size=size) == config
    return same and windows == [config.window(i) for i in range(config.num_layers)]


def test_names_of_families_are_model_types_and_unique() -> None:
    assert set(FAMILIES) == {
        "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "smollm3", "granite", "olmo2",
        "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2", "bert", "roberta",
    }  # fmt: skip
