"""Reading and writing checkpoints, compared with transformers: equal logits, equal bits, errors that name the tensor.

Each family has a small random checkpoint that transformers saved. Documents of several lengths travel packed here and
one by one there.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bagu.errors import BaguError
from bagu.machine import hub
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.lora import add_lora
from bagu.nn.model import Transformer
from bagu.nn.weights import WeightsError, from_pretrained, save_pretrained

transformers = pytest.importorskip("transformers")

LENGTHS = (7, 1, 23, 12)
VOCAB = 101  # odd, as some vocabularies are
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
BERT_SIZES = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
BETAS = {"rope_theta": 100.0, "beta_fast": 4.0, "beta_slow": 0.5, "original_max_position_embeddings": 64}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
DEEPSEEK = {
    "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "rms_norm_eps": 1e-5,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "bert": ("bert", BERT_SIZES),
    "llama2": ("llama", SIZES | {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": ("llama", SIZES | {"rope_parameters": LLAMA3}),
    "llama_biases": ("llama", SIZES | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "smollm": ("llama", SIZES | {"tie_word_embeddings": True}),
    "mistral": ("mistral", SIZES | {"sliding_window": 5, "head_dim": 32}),
    "qwen25": ("qwen2", SIZES | {"tie_word_embeddings": True}),
    "qwen25_yarn": ("qwen2", SIZES | {"rope_parameters": YARN | BETAS, "max_position_embeddings": 256}),
    "qwen25_windows": ("qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", SIZES | {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", SIZES | MOE | {"norm_topk_prob": True}),
    "qwen3_moe_dense": ("qwen3_moe", SIZES | MOE | {"mlp_only_layers": [0]}),
    "deepseek_v3": (
        "deepseek_v3",
        SIZES | DEEPSEEK | {"q_lora_rank": 24, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v3_no_q_rank": ("deepseek_v3", SIZES | DEEPSEEK | {"q_lora_rank": None}),
}


def judge(folder: Path) -> Any:
    """The checkpoint loaded by transformers, in fp32; it must not report any tensor."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    loader = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    model, said = loader.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    return model.eval()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder that transformers wrote. All values are random, including norms, biases and the routing bias."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(case: str) -> Path:
        folder = root / case
        if not folder.exists():
            kind, fields = CASES[case]
            config = transformers.AutoConfig.for_model(kind, **fields)
            loader = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
            model = loader.from_config(config)
            draw = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for name, t in model.state_dict().items():
                    noise = torch.randn(t.shape, generator=draw)
                    gain = re.search(r"(norm|ln_\w)\.weight$", name.lower())
                    t.copy_(0.1 * noise + 1 if gain else 0.1 * noise)
            model.save_pretrained(folder)
        return folder

    return make


def documents() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (n,), generator=draw) for n in LENGTHS]


def logits(model: Transformer) -> torch.Tensor:
    """Logits of all documents, packed."""
    docs = documents()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    with torch.no_grad():
        out = model(torch.cat(docs), positions, cu_seqlens, max(LENGTHS))
        return model.logits(out.hidden)


@torch.no_grad()
def judged(model: Any) -> torch.Tensor:
    return torch.cat([model(doc[None]).logits[0] for doc in documents()])


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(case)
    assert relative_error(logits(from_pretrained(folder)), judged(judge(folder))) <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_saved_checkpoints(case: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint(case)
    save_pretrained(from_pretrained(folder), tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert torch.equal(judged(judge(tmp_path)), judged(judge(folder)))


def test_transformers_loads_a_model_trained_here(tmp_path: Path) -> None:
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=48, num_layers=3, num_heads=6, num_kv_heads=3, head_dim=8, intermediate_size=80,
        max_len=64, dropout=0.1,
    )  # fmt: skip
    model = init_weights(Transformer(config), seed=3).eval()
    save_pretrained(model, tmp_path, extra={"eos_token_id": 7})
    theirs = judge(tmp_path)
    assert relative_error(logits(model), judged(theirs)) <= 1e-5
    assert theirs.config.eos_token_id == 7


@pytest.mark.parametrize("case", ["smollm", "qwen3_moe"])
def test_shards(case: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Save in one file, then in shards to the same folder, then back: the old files must not be loaded."""
    model = from_pretrained(checkpoint(case))
    save_pretrained(model, tmp_path)
    with torch.no_grad():
        model.get_parameter("blocks.0.attention.out.weight").mul_(2)
    save_pretrained(model, tmp_path, max_shard_bytes=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2 and sorted(p.name for p in tmp_path.glob("*.safetensors")) == shards
    sizes = [sum(t.numel() * t.element_size() for t in load_file(tmp_path / s).values()) for s in shards]
    assert max(sizes) <= 60_000 and sum(sizes) == index["metadata"]["total_size"]
    want = logits(model)
    assert torch.equal(logits(from_pretrained(tmp_path)), want)
    assert relative_error(want, judged(judge(tmp_path))) <= 1e-5
    save_pretrained(model, tmp_path)
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert not list(tmp_path.glob(".partial*"))


def test_dtypes(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """bf16 on disk stays bf16 unless another dtype is requested; the routing bias stays fp32."""
    model = from_pretrained(checkpoint("deepseek_v3"), dtype=torch.bfloat16)
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored = load_file(tmp_path / "model.safetensors")[bias]
    assert stored.dtype == torch.float32
    assert torch.equal(stored, load_file(checkpoint("deepseek_v3") / "model.safetensors")[bias])
    assert {p.dtype for p in from_pretrained(tmp_path, dtype=torch.float32).parameters()} == {torch.float32}


def test_a_tied_head_is_stored_once_and_a_second_copy_is_compared(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    change(checkpoint("smollm"), tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    assert torch.equal(logits(from_pretrained(tmp_path)), logits(from_pretrained(checkpoint("smollm"))))
    change(checkpoint("smollm"), tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    with pytest.raises(WeightsError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        from_pretrained(tmp_path)


def change(folder: Path, to: Path, tensors: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    save_file(tensors(load_file(folder / "model.safetensors")), to / "model.safetensors", metadata={"format": "pt"})


def test_old_files_are_read(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """GPT-2 on the hub was saved without its head: no prefix, and the mask as a tensor. BERT calls its gains gamma."""

    def gpt2(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mask = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(2)}
        return {name.removeprefix("transformer."): x for name, x in t.items()} | mask

    def bert(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        old = {
            n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t[n]
            for n in t
        }
        head = {"cls.predictions.decoder.bias": t["cls.predictions.bias"].clone()}
        return old | head | {"bert.pooler.dense.weight": torch.ones(64, 64), "cls.seq_relationship.bias": torch.ones(2)}

    def deepseek(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return t | {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}  # the layer that predicts a second token

    for case, old in (("gpt2", gpt2), ("bert", bert), ("deepseek_v3", deepseek)):
        change(checkpoint(case), tmp_path / case, old)
        assert torch.equal(logits(from_pretrained(tmp_path / case)), logits(from_pretrained(checkpoint(case))))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda t: {n: x for n, x in t.items() if n != "model.norm.weight"}, "model.norm.weight is missing"),
        (
            lambda t: {n: x for n, x in t.items() if "q_proj" not in n and "mlp" not in n},
            r"layers.0.mlp.down_proj.weight, .* and 4 more are missing",
        ),
        (
            lambda t: t | {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)},
            "q_norm.weight is not in this model",
        ),
        (
            lambda t: t | {"model.norm.weight": torch.ones(65)},
            r"model.norm.weight \[65\] for \[64\] has a different shape",
        ),
        (
            lambda t: (
                t | {"model.layers.1.self_attn.k_proj.weight": torch.ones(64, 32)}
            ),  # the right number of elements
            r"k_proj.weight \[64, 32\] for \[32, 64\] has a different shape",
        ),
    ],
)
def test_wrong_tensors_are_named(wrong: Any, says: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    change(checkpoint("llama3"), tmp_path, wrong)
    with pytest.raises(WeightsError, match=says):
        from_pretrained(tmp_path)


def test_folders_without_a_checkpoint_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def says(match: str) -> None:
        with pytest.raises(BaguError, match=match) as caught:
            from_pretrained(tmp_path)
        assert "\n" not in str(caught.value) and caught.value.hint

    says("has no config.json")
    (tmp_path / "config.json").write_text("{")
    says("as JSON")
    shutil.copy(checkpoint("llama3") / "config.json", tmp_path)
    says("has no model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    says("only pytorch_model.bin; a pickle can run arbitrary code")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "../b.safetensors"}}))
    says("outside its folder")
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    says("lacks 1 of 1 shards")
    complete = (checkpoint("llama3") / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(complete[: len(complete) // 2])
    says("cannot read")


def test_unknown_model_names_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="does not exist"):
        hub.find(tmp_path / "absent" / "model" / "folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="is a file"):
        hub.find(tmp_path / "file")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no network
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(WeightsError, match="the download failed") as caught:
        hub.find("nobody/nothing")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it fails
    with pytest.raises(WeightsError, match="huggingface_hub, which could download it, is not installed"):
        hub.find("nobody/nothing")


def test_a_failed_save_keeps_the_old_files(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = from_pretrained(checkpoint("smollm"))
    save_pretrained(model, tmp_path)
    want = logits(model)
    with torch.no_grad():
        model.embedding.weight.zero_()
    calls = 0

    def full(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        save_file(*args, **kwargs)

    monkeypatch.setattr("bagu.nn.weights.save_file", full)
    with pytest.raises(WeightsError, match="No space left"):
        save_pretrained(model, tmp_path, max_shard_bytes=60_000)
    assert torch.equal(logits(from_pretrained(tmp_path)), want)
    assert not list(tmp_path.glob(".partial*"))


def test_adapters_are_merged_before_saving(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = from_pretrained(checkpoint("llama2"))
    add_lora(model, rank=2, alpha=4.0)
    with pytest.raises(WeightsError, match=r"no name for the tensor .*lora") as caught:
        save_pretrained(model, tmp_path)
    assert "merge" in caught.value.hint and not list(tmp_path.iterdir())


def test_an_extra_key_that_could_not_be_loaded_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has 'my_key', which bagu does not support"):
        save_pretrained(from_pretrained(checkpoint("llama2")), tmp_path, extra={"my_key": 1})
    assert not list(tmp_path.iterdir())


def test_the_family_can_be_given(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = from_pretrained(checkpoint("llama2"))
    save_pretrained(model, tmp_path, family="mistral")
    assert relative_error(logits(model), judged(judge(tmp_path))) <= 1e-5
    with pytest.raises(WeightsError, match="gpt2 cannot describe this model"):
        save_pretrained(model, tmp_path, family="gpt2")
