"""LoRA over an int8 base: a quarter of the memory, and the outputs and gradients of the dequantized weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import documents, loss, make, packed, small

import bagu.ops
from bagu.nn import Transformer
from bagu.nn.config import MLAConfig, MoEConfig
from bagu.nn.linear import Linear
from bagu.nn.lora import add_lora, lora_state, merge, without_lora
from bagu.nn.peft import load_adapter, save_adapter
from bagu.serve.cpu.quantize import merged

BATCH = packed([9, 14])
KINDS: dict[str, dict[str, Any]] = {
    "gqa": {"qkv_bias": True},
    "mla": {"num_kv_heads": 4, "mla": MLAConfig(q_rank=8, kv_rank=16, nope_dim=4, rope_dim=4, v_dim=6)},
    "moe": {"moe": MoEConfig(num_experts=4, top_k=2, expert_size=8, num_shared=1)},
}


def pairs(model: Transformer, targets: str = ".*") -> tuple[Transformer, Transformer]:
    """The model with random pairs over an int8 base, and the same pairs over the dequantized weights."""
    add_lora(model, rank=3, alpha=6.0, targets=targets, base="int8")
    with torch.no_grad():
        for p in lora_state(model).values():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    plain = copy.deepcopy(model)
    for linear in plain.modules():
        if isinstance(linear, Linear) and linear.weight_scale is not None:
            linear.weight, linear.weight_scale = torch.nn.Parameter(linear.matrix(), False), None
    return model, plain


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model, BATCH).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_are_those_of_the_dequantized_weights(kind: str, dtype: torch.dtype) -> None:
    model, plain = pairs(make(small(**KINDS[kind]), dtype))
    assert torch.equal(model(*BATCH).hidden, plain(*BATCH).hidden)
    found, want = gradients(model), gradients(plain)
    assert found.keys() == want.keys() == set(lora_state(model))
    for name, gradient in want.items():
        assert torch.equal(found[name], gradient), name
    with without_lora(model), without_lora(plain):
        assert torch.equal(model(*BATCH).hidden, plain(*BATCH).hidden)


def test_in_invariant_mode_a_sequence_has_its_bits_alone_and_in_a_batch() -> None:
    model, _ = pairs(make(small()))
    with bagu.ops.invariant():
        both, alone = model(*BATCH).hidden, model(*documents([BATCH[0][:9]])).hidden
    assert torch.equal(both[:9], alone)


@pytest.mark.gpu
def test_on_a_gpu_outputs_have_the_same_bits_and_memory_is_freed() -> None:
    """In bf16: the dequantized weights of no two layers exist at a time."""
    config = small(hidden_size=1024, intermediate_size=2048, num_heads=8, head_dim=128, num_layers=4)
    model, plain = (m.to("cuda") for m in pairs(make(config, torch.bfloat16)))
    ids, positions, cu_seqlens, longest = BATCH
    batch = ids.cuda(), positions.cuda(), cu_seqlens.cuda(), longest
    assert torch.equal(model(*batch).hidden, plain(*batch).hidden)
    peaks = []
    for each in (plain, model):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        each(*batch).hidden.float().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    largest = max(m.weight.numel() for m in model.modules() if isinstance(m, Linear))
    assert peaks[1] - peaks[0] <= 2 * 6 * largest  # bf16 and an fp32 intermediate, of two products at most


def test_the_base_has_a_quarter_of_the_bytes() -> None:
    """All parameters, with pairs and scales; the table of embeddings keeps its dtype."""
    model = make(small(hidden_size=256, intermediate_size=512, num_heads=4, head_dim=64))
    size = lambda: sum(p.numel() * p.element_size() for p in model.parameters())  # noqa: E731
    before = size()
    add_lora(model, rank=4, alpha=8.0, base="int8")
    assert size() < 0.3 * before


def kept_weights(model: Transformer) -> int:
    """The number of floating-point tensors in the shape of a linear's weight that autograd keeps after a forward."""
    shapes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, Linear)}
    shapes |= {shape[::-1] for shape in shapes}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss(model, BATCH)
    return len({t.data_ptr() for t in kept if t.is_floating_point() and tuple(t.shape) in shapes})


def test_no_dequantized_weight_is_kept_for_the_backward() -> None:
    model, plain = pairs(make(small()))
    assert kept_weights(plain) == 7  # four in each of two layers, less the first, whose input needs no gradient
    assert kept_weights(model) == 0


def test_weights_are_rounded_to_the_nearest_step_and_routers_are_not() -> None:
    plain = make(small(**KINDS["moe"]))
    model = copy.deepcopy(plain)
    add_lora(model, rank=2, alpha=2.0, targets=".*qkv", base="int8")  # linears without a pair are rounded too
    before, rounded = dict(plain.named_modules()), 0
    for name, linear in model.named_modules():
        if isinstance(linear, Linear) and linear.weight_scale is not None:
            error = (linear.matrix() - before[name].weight).abs()
            steps = linear.weight_scale.unsqueeze(1)
            assert linear.weight.dtype == torch.int8 and (error <= 0.5 * steps * (1 + 2**-16)).all()
            rounded += 1
    assert rounded == 8 and model.blocks[0].ffn.router.weight_scale is None


@pytest.mark.parametrize("kind", KINDS)
def test_merge_adds_the_pairs_to_the_dequantized_weights(kind: str) -> None:
    model, plain = pairs(make(small(**KINDS[kind]), torch.float64))
    served = merged(model)
    before = model(*BATCH).hidden
    merge(model)
    merge(plain)
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    assert model.state_dict().keys() == plain.state_dict().keys() and all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model(*BATCH).hidden, before, rtol=1e-10, atol=1e-10)
    assert torch.equal(served(*BATCH).hidden, model(*BATCH).hidden)


def test_its_adapter_is_saved_as_any_other(tmp_path: Path) -> None:
    model, plain = pairs(make(small()))
    for each, folder in ((model, tmp_path / "int8"), (plain, tmp_path / "plain")):
        save_adapter(each, folder, base="base")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "int8" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    again = make(small())
    add_lora(again, rank=1, alpha=1.0, base="int8")
    for linear in again.modules():
        if isinstance(linear, Linear):
            linear.lora_a = linear.lora_b = None
    load_adapter(again, tmp_path / "int8")
    assert torch.equal(again(*BATCH).hidden, model(*BATCH).hidden)
