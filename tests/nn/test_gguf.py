"""GGUF files: read back what was written, values of every type, broken files. tests/peers has other readers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bagu.errors import BaguError
from bagu.nn.config import ModelConfig, NormConfig, Rope, YarnScaling
from bagu.nn.families import family_for
from bagu.nn.gguf_names import to_halves, to_pairs
from bagu.nn.gguf_write import GGUF_TYPES, save_gguf
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.nn.weights import WeightsError, from_pretrained

gguf = pytest.importorskip("gguf")

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "intermediate_size": 160, "max_len": 64, "norm": NormConfig(eps=1e-5), "init_std": 0.2,
}  # fmt: skip
KINDS: dict[str, Mapping[str, Any]] = {
    "llama": {},
    "llama, biases, wide heads": {"qkv_bias": True, "out_bias": True, "head_dim": 32},
    "smollm": {"tie_embeddings": True, "num_heads": 3, "num_kv_heads": 1},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 32, "tie_embeddings": True},
}


def model_of(kind: str, **changes: Any) -> Transformer:
    model = init_weights(Transformer(ModelConfig(**SIZES | KINDS[kind] | changes), dtype=torch.float32), 0).eval()
    with torch.no_grad():  # biases and gains begin as zeros and ones
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))).mul_(0.3).add_(1.0))
    return model


def logits(model: Transformer) -> torch.Tensor:
    ids = torch.arange(40) * 7 % 96
    with torch.inference_mode():
        return model.logits(model(ids, torch.arange(40), torch.tensor([0, 40], dtype=torch.int32), 40).hidden)


def rounded(w: torch.Tensor, kind: str) -> torch.Tensor:
    """A weight as a type of GGUF holds it: blocks of 32 with a scale in fp16."""
    if w.ndim < 2 or kind == "F32":
        return w
    if kind in ("F16", "BF16") or w.shape[-1] % 32:
        return w.to(torch.bfloat16 if kind == "BF16" else torch.float16).float()
    blocks = w.reshape(-1, 32)
    peak = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    if kind == "Q8_0":
        scale = peak.abs() / 127
        q = blocks / scale
        q = q.sign() * (q.abs() + 0.5).floor()  # halves away from zero, as C's roundf
    else:
        scale = peak / -8
        q = (blocks / scale + 8.5).floor().clamp(0, 15) - 8
    return (q * scale.half().float()).view(w.shape)


@pytest.mark.parametrize("quantization", GGUF_TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_the_logits_of_its_rounded_weights(kind: str, quantization: str, tmp_path: Path) -> None:
    model, path = model_of(kind), tmp_path / "model.gguf"
    save_gguf(model, path, quantization=quantization)
    matrix, outer, _ = GGUF_TYPES[quantization]
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(rounded(p, outer if name in ("embedding.weight", "head.weight") else matrix))
    read = from_pretrained(path, dtype=torch.float32)
    for (name, want), got in zip(model.named_parameters(), read.parameters(), strict=True):
        assert torch.equal(got, want), name
    assert torch.equal(logits(read), logits(model))


def test_the_dtype_of_a_file_is_that_of_its_matrices(tmp_path: Path) -> None:
    for quantization, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16), ("q8_0", torch.float32)):
        save_gguf(model_of("llama"), tmp_path / "model.gguf", quantization=quantization)
        assert next(from_pretrained(tmp_path / "model.gguf").parameters()).dtype == dtype


def test_rows_that_no_block_fits_are_f16(tmp_path: Path) -> None:
    model = model_of("llama", hidden_size=48, head_dim=12)
    save_gguf(model, tmp_path / "model.gguf", quantization="q4_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == "F16"
    assert kinds["blk.0.ffn_down.weight"] == "Q4_0" and kinds["blk.0.ffn_norm.weight"] == "F32"
    assert from_pretrained(tmp_path / "model.gguf").config.hidden_size == 48


def test_the_orders_of_rope_are_inverse() -> None:
    w = torch.arange(24.0).view(12, 2)
    assert to_pairs(w, 2)[:6, 0].tolist() == [0.0, 6.0, 2.0, 8.0, 4.0, 10.0]
    assert torch.equal(to_halves(to_pairs(w, 2), 2), w)


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(
        model_of("qwen3"), path, quantization="q4_0", metadata={"tokenizer.ggml.tokens": [str(i) for i in range(96)]}
    )
    whole = path.read_bytes()
    for size in [0, 1, 4, 7, 16, 23, 24, *range(25, len(whole), len(whole) // 61), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(WeightsError):
            from_pretrained(path)


def test_sizes_that_do_not_fit_the_metadata_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(model_of("llama"), path, metadata={"llama.feed_forward_length": 128})
    with pytest.raises(WeightsError, match=r"mlp.gate_proj.weight \[160, 64\] for \[128, 64\]"):
        from_pretrained(path)


def test_models_that_gguf_cannot_hold_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(WeightsError, match="RoPE scaling"):
        scaling = YarnScaling(factor=4.0, original_max_len=16)
        save_gguf(model_of("llama", positions=Rope(scaling=scaling)), path)
    with pytest.raises(WeightsError, match="family mistral"):
        save_gguf(model_of("llama", windows=(8,)), path)
    with pytest.raises(BaguError, match="q5"):
        save_gguf(model_of("llama"), path, quantization="q5_1")
    assert not path.exists()


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with pytest.raises(WeightsError, match="architecture 'mamba'"):
        from_pretrained(tmp_path / "other.gguf")


def test_a_family_of_every_kind() -> None:
    """The cases are of the families that their names say."""
    assert [family_for(model_of(k).config).name for k in ("llama", "qwen2", "qwen3")] == ["llama", "qwen2", "qwen3"]
