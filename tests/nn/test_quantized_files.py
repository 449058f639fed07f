"""Quantized safetensors, written here in the published layouts: logits equal those of the dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bagu.errors import BaguError
from bagu.nn.config import GateClamp, ModelConfig, MoEConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.nn.weights import WeightsError, from_pretrained, save_pretrained

Tensors = dict[str, torch.Tensor]
CONFIG = ModelConfig(
    vocab_size=96, hidden_size=256, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=192,
    max_len=64, init_std=0.2,
)  # fmt: skip
COMPRESSED = {"quant_method": "compressed-tensors"}


def draw(name: str, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.int32)


def scales_of(name: str, *shape: int) -> torch.Tensor:
    return 0.01 + 0.02 * torch.rand(shape, generator=torch.Generator().manual_seed(len(name)))


def pack(values: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Words of the values along the last dim, the first value in the lowest bits, one by one."""
    per = 32 // bits
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // per, dtype=torch.int64)
    for i in range(values.shape[-1]):
        words[..., i // per] |= values[..., i].long() << (bits * (i % per))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq(bits: int, form: str, shuffled: bool) -> Callable[[str, int, int], tuple[Tensors, torch.Tensor]]:
    def layer(name: str, N: int, K: int) -> tuple[Tensors, torch.Tensor]:
        G, top = K // 64, 2**bits
        q, zeros = draw(name, 0, top, K, N), draw(name + "z", 0, top, G, N)
        scales = scales_of(name, G, N).half()
        group = torch.arange(K) // 64
        if shuffled:  # act-order: columns were quantized in the order of their importance
            group = group[torch.randperm(K, generator=torch.Generator().manual_seed(K))]
        stored = {
            "qweight": pack(q.T.contiguous(), bits).T.contiguous(), "qzeros": pack(zeros, bits), "scales": scales,
            "g_idx": group.int(),
        }  # fmt: skip
        shift = 1 if form == "gptq" else 0
        w = torch.stack([(q[k] - zeros[group[k]] - shift) * scales[group[k]].float() for k in range(K)], 1)
        return stored, w

    return layer


def awq(name: str, N: int, K: int) -> tuple[Tensors, torch.Tensor]:
    G = K // 64
    q, zeros, scales = draw(name, 0, 16, K, N), draw(name + "z", 0, 16, G, N), scales_of(name, G, N).half()
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # nibble i holds column order[i] of eight

    def packed(values: torch.Tensor) -> torch.Tensor:
        return pack(values.view(len(values), -1, 8)[:, :, order].flatten(1))

    group = torch.arange(K) // 64
    return {"qweight": packed(q), "qzeros": packed(zeros), "scales": scales}, (
        (q - zeros[group]) * scales[group].float()
    ).T


def fp8_blocks(name: str, N: int, K: int) -> tuple[Tensors, torch.Tensor]:
    """DeepSeek-V3: blocks of 128 x 128, the last ones cut."""
    q = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K)).to(torch.float8_e4m3fn)
    scales = scales_of(name, -(-N // 128), -(-K // 128))
    w = torch.empty(N, K)
    for n in range(N):
        for k in range(0, K, 128):
            w[n, k : k + 128] = q[n, k : k + 128].float() * scales[n // 128, k // 128]
    return {"weight": q, "weight_scale_inv": scales}, w


def fp8_rows(name: str, N: int, K: int) -> tuple[Tensors, torch.Tensor]:
    q = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K)).to(torch.float8_e4m3fn)
    scales = scales_of(name, N, 1).bfloat16()
    return {"weight": q, "weight_scale": scales}, q.float() * scales.float()


def fp8_tensor(name: str, N: int, K: int) -> tuple[Tensors, torch.Tensor]:
    q = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K)).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": torch.tensor(0.02), "input_scale": torch.tensor(1.0)}, q.float() * 0.02


def int8_rows(name: str, N: int, K: int) -> tuple[Tensors, torch.Tensor]:
    q, scales = draw(name, -128, 128, N, K).to(torch.int8), scales_of(name, N, 1) / 8
    return {"weight": q, "weight_scale": scales}, q.float() * scales


def packed_groups(zero_points: bool) -> Callable[[str, int, int], tuple[Tensors, torch.Tensor]]:
    def layer(name: str, N: int, K: int) -> tuple[Tensors, torch.Tensor]:
        G = K // 64
        q, scales, zeros = draw(name, -8, 8, N, K), scales_of(name, N, G).bfloat16(), draw(name + "z", -8, 8, N, G)
        stored = {"weight_packed": pack(q + 8), "weight_scale": scales, "weight_shape": torch.tensor([N, K])}
        if zero_points:
            stored["weight_zero_point"] = pack((zeros + 8).T.contiguous()).T.contiguous()
        group = torch.arange(K) // 64
        return stored, (q - (zeros[:, group] if zero_points else 0)) * scales[:, group].float()

    return layer


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return COMPRESSED | {"format": form, "ignore": ["lm_head"], "config_groups": groups}


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[str, int, int], tuple[Tensors, torch.Tensor]]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, gptq(4, "gptq", False)),
    "gptq, act-order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, gptq(4, "gptq", True)),
    "gptq v2, 8 bits": ({"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}, gptq(8, "v2", False)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq),
    "fp8 in blocks": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, fp8_blocks),
    "fp8 by tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "compressed fp8": (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_rows),
    "compressed fp8 blocks": (
        compressed("float-quantized", num_bits=8, strategy="block", block_structure=[128, 128]),
        lambda *a: ({n.removesuffix("_inv"): t for n, t in fp8_blocks(*a)[0].items()}, fp8_blocks(*a)[1]),
    ),
    "compressed int8": (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8_rows),
    "compressed int4": (compressed("pack-quantized", num_bits=4, strategy="group"), packed_groups(False)),
    "compressed int4, zeros": (
        compressed("pack-quantized", num_bits=4, strategy="group", symmetric=False), packed_groups(True)
    ),
}  # fmt: skip


def written(folder: Path, layout: str) -> Path:
    """A folder with quantized layers; `plain` beside it has the dequantized weights."""
    config, layer = LAYOUTS[layout]
    model = init_weights(Transformer(CONFIG, dtype=torch.float32), 0)
    for place in (folder / "quantized", folder / "plain"):
        save_pretrained(model, place)
    plain = load_file(folder / "plain" / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in list(plain.items()):
        if "proj" in name:
            parts, plain[name] = layer(name, *tensor.shape)
            stored |= {f"{name.removesuffix('.weight')}.{part}": t.contiguous() for part, t in parts.items()}
            plain[name] = plain[name].contiguous()
        else:
            stored[name] = tensor
    save_file(stored, folder / "quantized" / "model.safetensors")
    save_file(plain, folder / "plain" / "model.safetensors")
    file = folder / "quantized" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return folder / "quantized"


def logits(model: Transformer) -> torch.Tensor:
    ids = torch.arange(24) * 5 % 96
    with torch.inference_mode():
        return model.logits(model(ids, torch.arange(24), torch.tensor([0, 24], dtype=torch.int32), 24).hidden)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_dequantized_weights(layout: str, tmp_path: Path) -> None:
    read = from_pretrained(written(tmp_path, layout), dtype=torch.float32)
    want = from_pretrained(tmp_path / "plain", dtype=torch.float32)
    for (name, got), p in zip(read.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(got, p), name
    assert torch.equal(logits(read), logits(want))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'"),
        (compressed("marlin-24", num_bits=4, strategy="group"), "format = 'marlin-24'"),
        (COMPRESSED | {"format": "pack-quantized", "config_groups": {}}, "0 groups of layers"),
    ],
)
def test_settings_that_are_not_supported_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = written(tmp_path, "gptq")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": change}))
    with pytest.raises(BaguError, match=message):
        from_pretrained(folder)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path, "awq")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.up_proj has qweight, qzeros and no scales"):
        from_pretrained(folder)


def test_shapes_that_do_not_fit_config_json_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "gptq")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 128}))
    with pytest.raises(WeightsError, match=r"mlp.down_proj.weight \[256, 192\] for \[256, 128\]"):
        from_pretrained(folder)


def test_mxfp4_experts_of_gpt_oss_are_dequantized(tmp_path: Path) -> None:
    """The blocks of openai's layout against values computed one by one; the model equals one with those values."""
    experts = MoEConfig(num_experts=2, top_k=1, expert_size=32, router_bias=True)
    config = ModelConfig(
        vocab_size=96, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=32,
        max_len=64, init_std=0.2, sinks=True, gate_clamp=GateClamp(), ffn_bias=True, moe=experts,
    )  # fmt: skip
    save_pretrained(init_weights(Transformer(config), 0), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    plain = dict(tensors)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for name in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{name}"
        E, K, N = tensors.pop(name).shape
        codes, exponents = draw(name, 0, 16, E, N, K), draw(name + "s", 120, 126, E, N, K // 32)
        pairs = codes.view(E, N, K // 32, 16, 2)
        tensors[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
        tensors[f"{name}_scales"] = exponents.to(torch.uint8)
        value = torch.tensor([(-1) ** (c >> 3) * magnitudes[c & 7] for c in codes.flatten().tolist()]).view(E, N, K)
        scale = (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 2)
        plain[name] = (value * scale).mT.contiguous()
    save_file(plain, file, metadata={"format": "pt"})
    want = from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    save_file(tensors, file, metadata={"format": "pt"})
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | {"quantization_config": {"quant_method": "mxfp4"}}))
    got = from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    save_file({n: t for n, t in tensors.items() if not n.endswith("down_proj_scales")}, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"has no .*down_proj_scales"):
        from_pretrained(tmp_path)
