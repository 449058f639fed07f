"""The labs of decode speed: what they count, and how their verdicts change with the numbers."""

from __future__ import annotations

import pytest
import torch

from bagu.lab.core import Row
from bagu.lab.model import kv_kinds
from bagu.lab.parts.decoding import decode_step_s
from bagu.lab.serve import decode_bandwidth
from bagu.nn import Transformer, init_weights


def test_each_kind_decodes_and_has_the_bytes_of_its_definition() -> None:
    """Per layer, in bf16: 2 H D numbers with MHA; int8 has a byte per number and an fp32 scale per key head."""
    H, D, layers = 16, kv_kinds.SMALL.head_dim, kv_kinds.SMALL.num_layers
    numbers = {"MHA": 2 * H * D, "GQA": 2 * 4 * D, "MQA": 2 * D, "MLA": 4 * D + D // 2}
    want = {name: 2 * n * layers for name, n in numbers.items()} | {"GQA, int8": (2 * 4 * D + 2 * 4 * 4) * layers}
    found = kv_kinds.kinds(kv_kinds.SMALL)
    assert {name: kv_kinds.token_bytes(config, torch.bfloat16, kind) for name, (config, kind) in found.items()} == want
    for config, kv_dtype in found.values():
        model = init_weights(Transformer(config), 0).eval()
        assert decode_step_s(model, batch=2, context=20, steps=2, kv_dtype=kv_dtype) > 0


def kind_rows(sizes: list[int], context_ms: list[float]) -> list[Row]:
    return [
        {
            "kind": f"kind {i}", "device": "cpu", "batch_sequences": 2, "context_tokens": 100,
            "kv_bytes_per_token": size, "short_step_ms": 1.0, "long_step_ms": 1.0 + ms, "tokens_per_s": 9.0,
        }
        for i, (size, ms) in enumerate(zip(sizes, context_ms, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("context_ms", "kind"),
    [
        ([8.0, 4.0, 2.0], "held"),
        ([8.0, 4.0, 4.2], "held"),  # within the margin
        ([8.0, 4.0, 6.0], "holds only where"),
        ([2.0, 4.0, 8.0], "did not hold"),
    ],
)
def test_kv_kinds_flips(context_ms: list[float], kind: str) -> None:
    found = kv_kinds.verdict(kind_rows([400, 200, 100], context_ms))
    assert found.kind == kind
    assert ("kind 2" in found.sentence_en.rpartition("larger cache")[2]) == (
        kind in ("holds only where", "did not hold")
    )


def test_a_step_reads_the_weights_once_and_every_context() -> None:
    config = decode_bandwidth.TINY
    model = Transformer(config, device="meta")
    weights = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    token = config.num_layers * config.num_kv_heads * 2 * config.head_dim
    assert decode_bandwidth.read_bytes(config, 3, 50, 2) == 2 * (weights + 3 * 50 * token)
    pairs = config.num_layers * config.num_heads * 2 * config.head_dim
    assert decode_bandwidth.flops(config, 3, 50) == 2 * 3 * (weights + 50 * pairs)


def step_rows(steps_ms: list[float], flops: float = 1e6) -> list[Row]:
    """Steps that read 10 MB at a ceiling of 10 GB/s: 1 ms. A million FLOPs take 1 us."""
    return [
        {
            "device": "cpu", "batch_sequences": 4**i, "context_tokens": 64, "step_ms": ms, "tokens_per_s": 1e3 / ms,
            "read_bytes": 10**7, "flops": flops, "read_ceiling_bytes_per_s": 1e10, "matmul_ceiling_flop_per_s": 1e12,
        }
        for i, ms in enumerate(steps_ms)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps_ms", "flops", "kind"),
    [
        ([1.2, 1.9], 1e6, "held"),
        ([1.2, 3.0], 1e6, "holds only where"),
        ([9.0, 9.0], 1e6, "did not hold"),
        ([0.2, 1.2], 1e6, "not decided"),  # five times the roofline: impossible
        ([2.5, 2.5], 2e9, "did not hold"),  # products take longer than reading
    ],
)
def test_decode_bandwidth_flips(steps_ms: list[float], flops: float, kind: str) -> None:
    assert decode_bandwidth.verdict(step_rows(steps_ms, flops)).kind == kind
