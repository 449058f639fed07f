"""Adapters in PEFT's format: names, fused linears, and refused settings.

tests/peers/test_peft_peer.py has PEFT itself as the judge.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_draws import BASE
from safetensors.torch import load_file, save_file
from small_models import make, packed, small

from bagu.machine.hub import WeightsError
from bagu.nn import Transformer, init_weights, peft
from bagu.nn.config import NormConfig
from bagu.nn.families import FAMILIES, family_for
from bagu.nn.lora import add_lora, lora_state, merge
from bagu.nn.peft import base_of, load_adapter, save_adapter
from bagu.nn.position_choices import Learned
from bagu.nn.weights import parts_of

BATCH = packed([9, 14])
GPT2: dict[str, Any] = {
    "num_kv_heads": 4, "ffn": "gelu_tanh", "positions": Learned(), "tie_embeddings": True,
    "norm": NormConfig(kind="layer", eps=1e-5, bias=True), "qkv_bias": True, "out_bias": True, "ffn_bias": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": GPT2}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def adapted(targets: str = ".*", **options: Any) -> Transformer:
    """A model with LoRA and random pairs."""
    model = make(small(**options), torch.float64)
    add_lora(model, rank=3, alpha=6.0, targets=targets)
    with torch.no_grad():
        for number, p in enumerate(lora_state(model).values()):
            p.copy_(draw(*p.shape, seed=number))
    return model


def theirs(model: Transformer) -> dict[str, torch.Tensor]:
    """The model's weights with Hugging Face names and shapes."""
    return {name: part.save() for name, part in parts_of(model, family_for(model.config)).items()}


def test_a_failed_save_keeps_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_adapter(adapted(), tmp_path, base="somewhere")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full_disk(tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"torn")
        raise OSError("No space left on device")

    monkeypatch.setattr(peft, "save_file", full_disk)
    with pytest.raises(WeightsError, match="No space left"):
        save_adapter(adapted(), tmp_path, base="elsewhere")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_round_trips_exactly(tmp_path: Path, name: str) -> None:
    model, other = adapted(**MODELS[name]), make(small(**MODELS[name]), torch.float64)
    save_adapter(model, tmp_path, base="somewhere")
    assert base_of(tmp_path) == "somewhere"
    load_adapter(other, tmp_path)
    pairs = lora_state(model)
    assert pairs.keys() == lora_state(other).keys()
    assert all(torch.equal(p, lora_state(other)[n]) for n, p in pairs.items())
    assert torch.equal(model(*BATCH).hidden, other(*BATCH).hidden)
    assert not any(p.requires_grad for n, p in other.named_parameters() if n not in pairs)


def test_names_and_shapes_match_peft(tmp_path: Path) -> None:
    save_adapter(adapted(), tmp_path, base="somewhere")
    layer, names = "base_model.model.model.layers.0.", ("q_proj", "k_proj", "v_proj", "o_proj")
    shapes = {k: tuple(v.shape) for k, v in load_file(tmp_path / "adapter_model.safetensors").items() if layer in k}
    out = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32}
    want = {f"{layer}self_attn.{n}.lora_{x}.weight": (3, 32) if x == "A" else (out[n], 3) for n in names for x in "AB"}
    for n in ("gate_proj", "up_proj"):
        want |= {f"{layer}mlp.{n}.lora_A.weight": (3, 32), f"{layer}mlp.{n}.lora_B.weight": (48, 3)}
    want |= {f"{layer}mlp.down_proj.lora_A.weight": (3, 48), f"{layer}mlp.down_proj.lora_B.weight": (32, 3)}
    assert shapes == want
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6.0)
    assert config["target_modules"] == sorted([*names, "gate_proj", "up_proj", "down_proj"])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_names_of_its_modules_in_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = BASE[name] | ({"num_key_value_heads": 4, "first_k_dense_replace": 1} if name == "deepseek_v3" else {})
    hf = transformers.AutoConfig.for_model(name, **sizes | ({"mlp_only_layers": [0]} if name == "qwen3_moe" else {}))
    with torch.device("meta"):
        judge = getattr(transformers, FAMILIES[name].architecture)(hf)
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    linears = {n: m for n, m in judge.named_modules() if isinstance(m, kinds) and 61 not in m.weight.shape}  # no head
    shapes = {n: m.weight.T.shape if isinstance(m, kinds[1]) else m.weight.shape for n, m in linears.items()}
    model = init_weights(Transformer(FAMILIES[name].config(json.loads(hf.to_json_string()))), 0)
    model.family = name  # as `from_pretrained` does
    add_lora(model, rank=3, alpha=6.0)
    save_adapter(model, tmp_path, base="somewhere")
    stored = {k: tuple(v.shape) for k, v in load_file(tmp_path / "adapter_model.safetensors").items()}
    want = {f"base_model.model.{n}.lora_A.weight": (3, s[1]) for n, s in shapes.items()}
    assert stored == want | {f"base_model.model.{n}.lora_B.weight": (s[0], 3) for n, s in shapes.items()}
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    modules, parameters = config["target_modules"], config.get("target_parameters", [])
    found = {n for n, _ in judge.named_modules() if any(n == t or n.endswith(f".{t}") for t in modules)}
    assert found | {p.removesuffix(".weight") for p in parameters} == linears.keys()
    if name in ("qwen3_moe", "deepseek_v3"):  # PEFT would look for a module of these names in the experts
        assert not {"gate_proj", "up_proj", "down_proj"} & {t.split(".")[-1] for t in modules} and parameters


def test_adapters_of_experts_are_refused_with_the_reason(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.3.gate_proj"
    peft_adapter(tmp_path, {f"{name}.lora_A.weight": draw(3, 32, seed=0)})
    with pytest.raises(WeightsError, match=r"experts\.3") as caught:
        load_adapter(make(small(), torch.float64), tmp_path)
    assert "merge_and_unload" in caught.value.hint
    peft_adapter(tmp_path, {}, target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(WeightsError, match=r"adapts experts \(mlp.experts.gate_up_proj\)"):
        load_adapter(make(small(), torch.float64), tmp_path)


def test_a_subset_of_layers_is_named_in_full(tmp_path: Path) -> None:
    """With the short name PEFT would adapt o_proj in every layer."""
    save_adapter(adapted(r"blocks\.1\.attention\.out"), tmp_path, base="somewhere")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.self_attn.o_proj"]


def peft_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    save_file({f"base_model.model.{n}": t for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "base_model_name_or_path": "x", "r": 3, "lora_alpha": 6, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))


@pytest.mark.parametrize("rslora", [False, True])
def test_pairs_of_parts_of_a_fused_linear_are_joined(tmp_path: Path, rslora: bool) -> None:
    """PEFT's default adapts q and v but not k, with a different A for each."""
    model = make(small(), torch.float64)
    weights, scale = theirs(model), 6 / 3**0.5 if rslora else 6 / 3
    tensors: dict[str, torch.Tensor] = {}
    for seed, part in enumerate(("q_proj", "v_proj")):
        name = f"model.layers.0.self_attn.{part}"
        a, b = draw(3, 32, seed=seed), draw(weights[f"{name}.weight"].shape[0], 3, seed=seed + 9)
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        weights[f"{name}.weight"] += scale * b @ a
    peft_adapter(tmp_path, tensors, use_rslora=rslora)
    assert load_adapter(model, tmp_path) == ["blocks.0.attention.qkv"]
    merge(model)
    for name, weight in theirs(model).items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-12, atol=1e-14)


def test_gpt2_stores_transposed_weights(tmp_path: Path) -> None:
    model = make(small(**GPT2), torch.float64)
    weights, name = theirs(model), "transformer.h.1.attn.c_attn"
    a, b = draw(3, 32, seed=0), draw(96, 3, seed=1)
    weights[f"{name}.weight"] += 2.0 * (b @ a).T
    peft_adapter(tmp_path, {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, fan_in_fan_out=True)
    load_adapter(model, tmp_path)
    merge(model)
    torch.testing.assert_close(theirs(model)[f"{name}.weight"], weights[f"{name}.weight"], rtol=1e-12, atol=1e-14)
    save_adapter(adapted(**GPT2), tmp_path, base="somewhere")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"] is True


@pytest.mark.parametrize(
    "setting",
    [
        {"peft_type": "LOHA"}, {"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 4}}, {"alpha_pattern": {"q_proj": 4}}, {"init_lora_weights": "pissa"},
        {"layer_replication": [[0, 2]]}, {"a_new_option": True}, {"r": 0}, {"r": "3"}, {"lora_alpha": None},
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, setting: dict[str, Any]) -> None:
    o_proj = "model.layers.0.self_attn.o_proj"
    tensors = {f"{o_proj}.lora_A.weight": draw(3, 32, seed=0), f"{o_proj}.lora_B.weight": draw(32, 3, seed=1)}
    peft_adapter(tmp_path, tensors)
    load_adapter(make(small(), torch.float64), tmp_path)
    peft_adapter(tmp_path, tensors, **setting)
    with pytest.raises(WeightsError, match=next(iter(setting))):
        load_adapter(make(small(), torch.float64), tmp_path)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"model.layers.9.self_attn.o_proj.lora_A.weight": (3, 32)}, "match no linear"),
        ({"model.layers.0.self_attn.o_proj.lora_A.weight": (3, 32)}, "match no linear"),  # B is missing
        (
            {
                "model.layers.0.self_attn.o_proj.lora_A.weight": (3, 64),
                "model.layers.0.self_attn.o_proj.lora_B.weight": (32, 3),
            },
            "o_proj has A",
        ),
    ],
)
def test_an_adapter_of_another_model_is_refused(tmp_path: Path, tensors: dict[str, Any], said: str) -> None:
    model = make(small(), torch.float64)
    peft_adapter(tmp_path, {n: draw(*shape, seed=0) for n, shape in tensors.items()})
    with pytest.raises(WeightsError, match=said):
        load_adapter(model, tmp_path)
    assert not lora_state(model) and all(p.requires_grad for p in model.parameters())
