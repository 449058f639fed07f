"""The planner's closed forms beside bagu.nn.count, which records a real forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bagu.nn import count
from bagu.nn.config import MLAConfig, ModelConfig, MoEConfig
from bagu.nn.presets import preset
from bagu.parallel.planner.layouts import Layout, Layouts, Workload
from bagu.parallel.planner.memory import memory
from bagu.parallel.planner.model_cost import model_cost
from bagu.parallel.planner.models import MODELS
from bagu.parallel.planner.software import STACKS

SMALL = ModelConfig(
    vocab_size=640, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=160,
    max_len=128,
)  # fmt: skip
CONFIGS = {
    "llama": SMALL,
    "window": replace(SMALL, windows=(16, None, 64)),
    "qk norm, biases, tied": replace(
        SMALL, qk_norm=True, qkv_bias=True, out_bias=True, ffn_bias=True, tie_embeddings=True
    ),
    "relu2": replace(SMALL, ffn="relu2"),
    "bert": replace(preset("bert_6m"), num_layers=2, vocab_size=512),
    "experts": replace(SMALL, moe=MoEConfig(num_experts=8, top_k=2, expert_size=96, num_shared=1, dense_layers=(0,))),
    "mla": replace(
        SMALL, num_kv_heads=4, head_dim=24, mla=MLAConfig(kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16, q_rank=48)
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_equal_those_of_the_model(name: str) -> None:
    cost, found = model_cost(CONFIGS[name]), count.parameters(CONFIGS[name])
    assert (cost.parameters, cost.active_parameters) == (found.total, found.active)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "bert"])
def test_training_flops_equal_those_of_the_recorded_forward(name: str) -> None:
    found = count.flops(CONFIGS[name], 128).training
    assert model_cost(CONFIGS[name]).training_flops(128) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("name", ["llama", "relu2", "qk norm, biases, tied"])
def test_activations_of_a_layer_equal_the_tensors_that_a_forward_saves(name: str) -> None:
    """The formula leaves out one fp32 statistic per norm and token, and nothing else."""
    config = CONFIGS[name]
    two, one = (count.activation_bytes(replace(config, num_layers=n), 128) for n in (2, 1))
    norms = 2 + (config.num_heads + config.num_kv_heads if config.qk_norm else 0)

    def kept(layers: int) -> float:
        workload = Workload(model=replace(config, num_layers=layers), seq=128, batch=1)
        return float(memory(workload, STACKS["bagu"], Layouts.of(Layout())).activations[0]) / 128

    assert kept(2) - kept(1) == pytest.approx(two - one - 4 * norms, abs=1e-6)


def test_llama3_has_its_published_size() -> None:
    assert model_cost(MODELS["llama3-8b"]).parameters == 8_030_261_248
    assert model_cost(MODELS["llama3-70b"]).parameters == 70_553_706_496
    assert model_cost(MODELS["deepseek-v3"]).active_parameters == pytest.approx(37e9, rel=0.02)


def test_model_states_follow_the_zero_table() -> None:
    """16-bit weights, fp32 gradients and 12 bytes of optimizer: 18Ψ, 6Ψ + 12Ψ/d, 2Ψ + 16Ψ/d, 18Ψ/d."""
    workload = Workload(model=MODELS["llama3-8b"], seq=2048, batch=64)
    layouts = Layouts.of(*(Layout(dp=64, shard=64 if zero else 1, zero=zero) for zero in range(4)))
    need = memory(workload, STACKS["bagu"], layouts)
    psi = model_cost(workload.model).parameters
    states = (need.weights + need.gradients + need.optimizer) / psi
    assert states == pytest.approx([18, 6 + 12 / 64, 2 + 16 / 64, 18 / 64], rel=1e-9)


def test_sequence_parallelism_divides_all_activations() -> None:
    workload = Workload(model=MODELS["llama3-8b"], seq=4096, batch=8)
    layouts = Layouts.of(Layout(), Layout(tp=8, sequence_parallel=True), Layout(tp=8))
    one, divided, replicated = memory(workload, STACKS["bagu"], layouts).activations
    assert divided == pytest.approx(one / 8, rel=1e-9)
    assert one / 8 < replicated < one


def test_a_pipeline_holds_as_many_micro_batches_as_stages() -> None:
    config = replace(SMALL, num_layers=8, vocab_size=8)
    workload = Workload(model=config, seq=128, batch=16)
    stack = replace(STACKS["bagu"], stages="even")
    layouts = Layouts.of(Layout(), Layout(pp=4), Layout(pp=4, virtual=2))
    one, four, interleaved = memory(workload, stack, layouts).activations
    ends = 2 * 2 * config.hidden_size * 128
    layers = one - ends
    assert four - 4 * ends / 2 == pytest.approx(layers, rel=1e-9)  # 4 micro-batches of a quarter of the layers
    assert interleaved - 4 * ends / 2 == pytest.approx(layers * (1 + 3 / 8), rel=1e-9)
    assert np.isfinite(four)
