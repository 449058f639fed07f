"""The launches of a decode step, counted from a recording on meta tensors: each op is a launch, a view is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bagu.nn.model import Transformer
from bagu.nn.presets import preset
from bagu.ops.call.recording import Recorder
from bagu.serve.kv.paged import Batch, PagedKV

LAYER = [
    "matmul", "rope_kv_write", "paged_attention", "matmul", "add_rms_norm", "matmul", "swiglu", "matmul",
    "add_rms_norm",
]  # fmt: skip


def launches(num_layers: int, cache: torch.dtype) -> list[str]:
    """The calls of a step of 256 sequences of Qwen3-0.6B, with this many layers, that are not views."""
    config = replace(preset("qwen3_0_6b"), num_layers=num_layers)
    meta, S = torch.device("meta"), 256
    model = Transformer(config, device=meta, dtype=torch.bfloat16)
    kv = PagedKV(config, 64, 16, device=meta, dtype=cache)
    ids, positions, slots = (torch.empty(S, dtype=torch.int64, device=meta) for _ in range(3))
    cu, lengths, tables = (torch.empty(n, dtype=torch.int32, device=meta) for n in ((S + 1,), (S,), (S, 8)))
    kv.load(Batch(ids, positions, (slots,), cu, lengths, (tables,), 1, 128, S, 128))
    with torch.no_grad(), Recorder() as recorder:
        model(ids, positions, cu, 1, kv)
    return [c.name for c in recorder.calls if c.operator is None or not c.operator.is_view]


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8])
def test_a_layer_is_nine_launches_without_copies(cache: torch.dtype) -> None:
    one, three = launches(1, cache), launches(3, cache)
    assert len(three) - len(one) == 2 * len(LAYER)
    first = three.index("matmul")
    assert three[first : first + 3 * len(LAYER)] == 3 * LAYER
