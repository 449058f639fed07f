"""`bagu export MODEL FILE.gguf`, and what reads the file: the model, its tokenizer, its chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.gguf_tokenizer import HUGGING_FACE, LLAMA_3, PATTERNS, gguf_metadata, gguf_tokenizer
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import ArgumentError, BaguError
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.recipes.command import export_main
from bagu.recipes.models import load_model, model_config, save_model, tokenizer_folder
from bagu.recipes.serve import Loader
from bagu.recipes.verbs import ExportOptions

pytest.importorskip("gguf")

TEXT = "def add(a, b):\n    return a + b  # 1234 größer\n\n\nclass Stack:\n    def push(self, item):\n        pass\n"


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    return BpeTokenizer.train([TEXT] * 4, vocab_size=290, chat_template=DEFAULT_TEMPLATE)


@pytest.fixture(scope="module")
def folder(tokenizer: BpeTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = ModelConfig(
        vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
        max_len=64,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("model")
    save_model(init_weights(Transformer(config, dtype=torch.float32), 0), tokenizer, place)
    return place


def test_an_exported_file_serves(folder: Path, tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    export_main(ExportOptions(model=str(folder), out=out, quantization="f32"))
    model, words, chat = Loader(model=str(out), dtype="fp32", device="cpu")()
    assert model_config(out) == model.config and chat is not None
    assert words.spec == tokenizer.spec and words.eos_token == tokenizer.eos_token
    assert words.chat_template == DEFAULT_TEMPLATE
    for (name, got), want in zip(model.named_parameters(), load_model(folder).parameters(), strict=True):
        assert torch.equal(got, want), name


def test_a_quantized_file_is_smaller(folder: Path, tmp_path: Path) -> None:
    sizes = []
    for kind in ("f16", "q8_0", "q4_0"):
        export_main(ExportOptions(model=str(folder), out=tmp_path / f"{kind}.gguf", format="gguf", quantization=kind))
        sizes.append((tmp_path / f"{kind}.gguf").stat().st_size)
    assert sizes[0] > sizes[1] > sizes[2]


def test_options_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="for GGUF, and the format is safetensors"):
        export_main(ExportOptions(model=str(folder), out=tmp_path / "out", quantization="q8_0"))
    with pytest.raises(ArgumentError, match="not the name of a GGUF file"):
        export_main(ExportOptions(model=str(folder), out=tmp_path / "out", format="gguf"))
    with pytest.raises(BaguError, match="onxx"):
        export_main(ExportOptions(model=str(folder), out=tmp_path / "out", format="onxx"))


def test_the_tokenizers_of_two_files_are_kept_apart(folder: Path, tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    """They differ in the chat template alone, and have the same tokenizer.json."""
    places = set()
    for template in ("a", "b"):
        place = tmp_path / template
        BpeTokenizer(spec=tokenizer.spec, eos_token=tokenizer.eos_token, chat_template=template).save(folder)
        export_main(ExportOptions(model=str(folder), out=place / "model.gguf"))
        found = tokenizer_folder(place / "model.gguf")
        assert found is not None and BpeTokenizer.load(found).chat_template == template
        places.add(found)
    tokenizer.save(folder)
    assert len(places) == 2


@pytest.mark.parametrize("pre", PATTERNS)
def test_a_tokenizer_is_built_from_vocabulary_merges_and_pattern(pre: str) -> None:
    """As in files that llama.cpp's converter writes, which have no tokenizer.json inside."""
    plain = BpeTokenizer.train([TEXT] * 4, vocab_size=290)
    metadata = gguf_metadata(plain, 300) | {"tokenizer.ggml.pre": pre}
    del metadata[HUGGING_FACE]
    read = gguf_tokenizer(metadata)
    assert read.vocab_size == 300, "unused ids have names too"
    assert read.decode(read.encode(TEXT)) == TEXT and read.eos_id == plain.eos_id
    assert read.special_ids == plain.special_ids, "their names are encoded as text"
    digits = [len(read.bytes_of(i)) for i in read.encode("1234")]
    assert sum(digits) == 4 and (pre != "qwen2" or digits == [1, 1, 1, 1])
    assert gguf_metadata(read, 300)["tokenizer.ggml.pre"] == pre, "the pattern is found again"
    first = gguf_tokenizer(
        metadata | {"tokenizer.ggml.bos_token_id": plain.eos_id, "tokenizer.ggml.add_bos_token": True}
    )
    assert first.encode_prompt("a")[0] == plain.eos_id and first.encode("a") == first.encode_prompt("a")[1:]


def test_tokenizers_of_other_kinds_are_refused() -> None:
    assert "{1,3}" in LLAMA_3
    with pytest.raises(BaguError, match=r"kind llama \(default\)"):
        gguf_tokenizer({"tokenizer.ggml.model": "llama"})
    with pytest.raises(BaguError, match=r"kind gpt2 \(deepseek-llm\)"):
        gguf_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "deepseek-llm"})
