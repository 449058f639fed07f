"""Model configs: invalid combinations are refused, and JSON round trips."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_models import small

from bagu import config as trees
from bagu.config import ConfigError
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
    Sinusoidal,
    T5Relative,
    YarnScaling,
)
from bagu.nn.position_choices import Learned, LinearScaling, Llama3Scaling, NoPositions

MLA = MLAConfig(kv_rank=16, nope_dim=4, rope_dim=4, v_dim=6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_kv_heads": 3}, "multiple of num_kv_heads = 3"),
        ({"num_layers": 0}, "num_layers = 0"),
        ({"max_len": 0}, "max_len = 0"),
        ({"head_dim": 7}, "RoPE rotates 7"),
        ({"positions": Rope(dim=10)}, "10 of 8"),
        ({"positions": Rope(dim=3)}, "RoPE rotates 3"),
        ({"positions": Sinusoidal(), "hidden_size": 33}, "sinusoidal"),
        ({"mla": MLA}, "num_kv_heads = 2"),
        ({"mla": MLA, "num_kv_heads": 4, "head_dim": 16}, "head_dim = 16"),
        ({"mla": MLA, "num_kv_heads": 4, "positions": Alibi()}, "'alibi'"),
        ({"mla": MLA, "num_kv_heads": 4, "positions": NoPositions()}, "'none'"),
        ({"mla": MLA, "num_kv_heads": 4, "positions": Rope(dim=4)}, "positions.dim = 4 with MLA"),
        ({"mla": MLA, "num_kv_heads": 4, "qk_norm": True}, "qk_norm"),
        ({"attention": "linear", "windows": (4,)}, "window"),
        ({"attention": "linear", "positions": Alibi()}, "linear attention with 'alibi'"),
        ({"attention": "linear", "positions": T5Relative()}, "linear attention with 't5'"),
        ({"attention": "linear", "mla": MLA, "num_kv_heads": 4}, "linear attention with MLA"),
        ({"windows": ()}, "0 entries for 2 layers"),
        ({"windows": (None, 4, 4)}, "3 entries for 2 layers"),
        ({"windows": (0,)}, "an entry 0"),
        ({"mlm_head": True}, "causal"),
        ({"dropout": 1.0}, "dropout = 1.0"),
        ({"init_std": 0.0}, "init_std"),
        ({"norm": NormConfig(kind="group", groups=5)}, "does not divide hidden_size = 32"),
        ({"norm": NormConfig(placement="none", alpha=0.2), "embedding_norm": True}, "norm.placement = 'none'"),
        ({"moe": MoEConfig(num_experts=4, top_k=1, expert_size=8, dense_layers=(2,))}, "dense_layers"),
        ({"moe": MoEConfig(num_experts=4, top_k=1, expert_size=8, dense_layers=(0, 1))}, "dense_layers"),
        ({"layer_positions": LayerPositions(layers=(2,), positions=NoPositions())}, "layer_positions.layers = (2,)"),
        ({"layer_positions": LayerPositions(layers=(0, 1), positions=NoPositions())}, "layer_positions.layers"),
        ({"layer_positions": LayerPositions(layers=(0,), positions=Rope(dim=4))}, "layer_positions 'rope'"),
        ({"layer_positions": LayerPositions(layers=(0,), positions=Rope()), "positions": Alibi()}, "'alibi'"),
        ({"mla": MLA, "num_kv_heads": 4, "sinks": True}, "sinks"),
        ({"attention": "linear", "sinks": True}, "sinks"),
        ({"gate_clamp": GateClamp(), "ffn": "geglu"}, "gate_clamp"),
        ({"multipliers": Multipliers(residual=0.5), "norm": NormConfig(placement="sandwich")}, "multipliers.residual"),
        ({"lm_head": False, "tie_embeddings": True}, "lm_head"),
    ],
)
def test_invalid_models_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        small(**changes)
    assert says in str(error.value)
    assert error.value.hint


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: NormConfig(eps=0.0), "eps"),
        (lambda: NormConfig(kind="rms", bias=True), "no bias"),
        (lambda: NormConfig(kind="group"), "groups = None"),
        (lambda: NormConfig(groups=4), "groups = 4"),
        (lambda: NormConfig(placement="none"), "alpha = None"),
        (lambda: NormConfig(alpha=0.2), "alpha = 0.2"),
        (lambda: NormConfig(kind="layer", unit_offset=True), "unit_offset"),
        (lambda: Multipliers(attention=0.0), "attention = 0.0"),
        (lambda: Multipliers(logits_divisor=0.0), "logits_divisor = 0.0"),
        (lambda: GateClamp(limit=0.0), "limit = 0.0"),
        (lambda: LinearScaling(factor=0.0), "factor = 0.0"),
        (lambda: Learned(offset=-1), "offset = -1"),
        (lambda: MoEConfig(num_experts=4, top_k=5, expert_size=8), "more than num_experts = 4"),
        (lambda: MoEConfig(num_experts=4, top_k=1, expert_size=8, num_groups=3), "num_groups = 3"),
        (lambda: MoEConfig(num_experts=8, top_k=3, expert_size=8, num_groups=4, top_groups=1), "more than the 2"),
        (lambda: MoEConfig(num_experts=4, top_k=1, expert_size=8, num_groups=4), "1 expert per group"),
        (lambda: MLAConfig(kv_rank=0, nope_dim=4, rope_dim=4, v_dim=6), "kv_rank = 0"),
        (lambda: Llama3Scaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0), "not below"),
        (lambda: YarnScaling(factor=4.0, original_max_len=8, beta_fast=1.0, beta_slow=2.0), "beta_slow <= beta_fast"),
        (lambda: T5Relative(buckets=6), "buckets = 6"),
        (lambda: T5Relative(buckets=32, max_distance=16), "max_distance = 16"),
    ],
)
def test_invalid_parts_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert says in str(error.value)
    assert error.value.hint


@pytest.mark.parametrize(
    "config",
    [
        small(),
        small(positions=Rope(dim=4, scaling=YarnScaling(factor=4.0, original_max_len=8, mscale=1.0))),
        small(positions=Rope(scaling=Llama3Scaling(factor=8.0)), windows=(None, 8)),
        small(
            positions=Rope(scaling=LinearScaling(factor=8.0)),
            qk_norm="width",
            gate_clamp=GateClamp(limit=3.0),
            layer_positions=LayerPositions(layers=(1,), positions=Rope(base=10.0)),
            multipliers=Multipliers(embedding=12.0, logits_divisor=8.0),
        ),
        small(positions=T5Relative(), norm=NormConfig(kind="layer", placement="post", bias=True)),
        small(num_kv_heads=4, mla=MLA, moe=MoEConfig(num_experts=4, top_k=2, expert_size=8, dense_layers=(0,))),
    ],
)
def test_json_round_trip(config: ModelConfig) -> None:
    assert trees.from_dict(ModelConfig, json.loads(json.dumps(trees.to_dict(config)))) == config


def test_override_of_a_nested_setting() -> None:
    changed = trees.override(small(), ["positions.base=500000", "norm.placement=sandwich", "num_layers=4"])
    assert changed == small(positions=Rope(base=500000.0), norm=NormConfig(placement="sandwich"), num_layers=4)


def test_windows_are_a_pattern_over_the_layers() -> None:
    config = small(num_layers=5, windows=(4, 4, None))
    assert [config.window(i) for i in range(5)] == [4, 4, None, 4, 4]


def test_experts_are_in_all_layers_except_the_dense_ones() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, expert_size=8, dense_layers=(0, 2))
    config = small(num_layers=4, moe=moe)
    assert [config.experts(i) is moe for i in range(4)] == [False, True, False, True]


def test_the_scale_of_mla_under_yarn_is_deepseeks() -> None:
    """DeepSeek-V3: heads of 192, factor 40, mscale_all_dim 1 → 192^-0.5 * (0.1 ln 40 + 1)²."""
    mla = MLAConfig(kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    yarn = YarnScaling(factor=40.0, original_max_len=4096, mscale=1.0, mscale_all_dim=1.0)
    config = small(head_dim=192, num_kv_heads=4, mla=mla, positions=Rope(scaling=yarn))
    assert config.scale == pytest.approx(0.0721688 * 1.368888**2, rel=1e-5)
