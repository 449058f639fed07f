"""`bagu export MODEL FILE.onnx`, judged by ONNX Runtime: the logits of the graph are those of the model."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))

from small_models import make, small

from bagu.nn.config import NormConfig
from bagu.nn.onnx_export import export_onnx
from bagu.nn.position_choices import Learned

BERT: dict[str, Any] = {
    "causal": False, "mlm_head": True, "num_kv_heads": 4, "ffn": "gelu", "positions": Learned(),
    "num_token_types": 2, "embedding_norm": True, "tie_embeddings": True, "qkv_bias": True, "out_bias": True,
    "ffn_bias": True, "norm": NormConfig(kind="layer", placement="post", bias=True),
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama, GQA": {"num_kv_heads": 2},
    "qwen3: QK norm, tied": {"num_kv_heads": 2, "qk_norm": True, "tie_embeddings": True},
    "bert": BERT,
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_onnx_runtimes(name: str, tmp_path: Path) -> None:
    import onnxruntime

    model = make(small(**MODELS[name]), torch.float32)
    wide = copy.deepcopy(model).double()
    path = tmp_path / "model.onnx"
    export_onnx(model, path)
    session = onnxruntime.InferenceSession(path)
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    assert (given.name, made.name) == ("input_ids", "logits")
    draw = torch.Generator().manual_seed(0)
    for batch, length in ((2, 7), (1, 1), (1, 12), (3, 5)):
        ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=draw)
        positions, offsets = torch.arange(length).repeat(batch), torch.arange(batch + 1, dtype=torch.int32) * length
        with torch.no_grad():
            ours, truth = (
                m.logits(m(ids.flatten(), positions, offsets, length).hidden).view(batch, length, -1)
                for m in (model, wide)
            )
        theirs = torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0])
        rounding = (ours.double() - truth).abs().max()
        assert (theirs.double() - truth).abs().max() <= 4 * rounding, "within a few times the rounding of fp32"
