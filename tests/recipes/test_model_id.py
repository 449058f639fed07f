"""The fingerprint of a model in its checkpoints. It must not change: a checkpoint with another one is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bagu.nn import choices
from bagu.nn import position_choices as encodings
from bagu.nn.config import ModelConfig
from bagu.recipes.training import _model_id

SMALL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64,
    max_len=64,
)  # fmt: skip
MOE = choices.MoEConfig(num_experts=4, top_k=2, expert_size=16)
ONES = (1.0,) * 4
YARN = encodings.YarnScaling(factor=4.0, original_max_len=32)
LONG = encodings.LongRopeScaling(factor=2.0, original_max_len=32, short_factors=ONES, long_factors=ONES)
# as written by 2e55a02
WRITTEN = {
    "57afc7b1413ddf3f": SMALL,
    "de48d6b63fc6fae9": replace(SMALL, positions=encodings.Learned(), norm=choices.NormConfig(kind="layer", bias=True)),
    "6162f0a7b34d020a": replace(SMALL, positions=encodings.Sinusoidal()),
    "ca4b56848e8cd608": replace(SMALL, positions=encodings.Alibi()),
    "786bbfe930f0e965": replace(SMALL, positions=encodings.T5Relative()),
    "6a8c230f9df260ac": replace(SMALL, positions=encodings.NoPositions()),
    "0808a5e75c2a5c1f": replace(SMALL, positions=encodings.Rope(scaling=encodings.LinearScaling(factor=2.0))),
    "190b0e265d5aa14f": replace(SMALL, positions=encodings.Rope(scaling=encodings.Llama3Scaling(factor=8.0))),
    "ba306b0986f9e1cf": replace(SMALL, positions=encodings.Rope(scaling=YARN)),
    "f82b4c356c8314f4": replace(SMALL, positions=encodings.Rope(scaling=LONG)),
    "79040ecc52c742e7": replace(
        SMALL, num_kv_heads=4, mla=choices.MLAConfig(kv_rank=16, nope_dim=4, rope_dim=4, v_dim=8)
    ),
    "dce4820259a26aa7": replace(SMALL, moe=MOE),
    "e19579c89807a4a0": replace(
        SMALL, layer_positions=encodings.LayerPositions(layers=(0,), positions=encodings.NoPositions()), sinks=True,
        gate_clamp=choices.GateClamp(), multipliers=choices.Multipliers(residual=0.5),
    ),
    "3969bc1eeb30174a": replace(SMALL, score_head=True),
    "96f79b26c2d439d1": replace(SMALL, lm_head=False),
    "1a8799ceb69ca361": replace(SMALL, positions=encodings.Learned(offset=2)),
    "40a7694e796c75d7": replace(SMALL, norm=choices.NormConfig(unit_offset=True)),
    "c47d7dbc85eca3e8": replace(SMALL, moe=replace(MOE, router_bias=True)),
}  # fmt: skip


def parts(config: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(config):
        yield type(config)
        for field in dataclasses.fields(config):
            yield from parts(getattr(config, field.name))


@pytest.mark.parametrize("written", WRITTEN)
def test_a_model_has_the_fingerprint_that_checkpoints_of_it_have(written: str) -> None:
    assert _model_id(WRITTEN[written]) == written, "give an added field metadata=NEWER"


def test_every_part_of_a_configuration_is_in_a_pinned_one() -> None:
    """So a field that is added to any of them changes a fingerprint above, unless it is NEWER."""
    known = {c for c in [*vars(choices).values(), *vars(encodings).values()] if dataclasses.is_dataclass(c)}
    assert known | {ModelConfig} == {part for config in WRITTEN.values() for part in parts(config)}
