"""llama.cpp and transformers judge the GGUF files that bagu writes: the same logits for the same tokens.

llama.cpp rounds activations to fp16, or to int8 in blocks of 32, where a file has such weights, and keeps its KV cache
in fp16. So its logits may differ by a few times what rounding the inputs of our linear layers changes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

llama_cpp = pytest.importorskip("llama_cpp")
transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
from test_gguf import logits, model_of  # noqa: E402

from bagu.bench import engine as bench_engine  # noqa: E402
from bagu.bench.engine_timing import Case  # noqa: E402
from bagu.bench.options import BenchSetting  # noqa: E402
from bagu.data.chat_template import DEFAULT_TEMPLATE  # noqa: E402
from bagu.data.tokenizer import BpeTokenizer  # noqa: E402
from bagu.nn.linear import Linear  # noqa: E402
from bagu.nn.weights import from_pretrained  # noqa: E402
from bagu.recipes.models import save_as_gguf  # noqa: E402
from bagu.serve.config import EngineConfig, Quantization  # noqa: E402

IDS = [i * 7 % 96 for i in range(40)]
TEXT = (
    "def add(a, b):\n    return a + b\n\n\nclass Stack:\n    def push(self, item):\n        self.items.append(item)\n"
)


def written(kind: str, quantization: str, folder: Path) -> tuple[Path, Any, BpeTokenizer]:
    tokenizer = BpeTokenizer.train([TEXT] * 4, vocab_size=280, chat_template=DEFAULT_TEMPLATE)
    model, path = model_of(kind, vocab_size=288), folder / "model.gguf"
    save_as_gguf(model, tokenizer, path, quantization)
    return path, model, tokenizer


def rounded_inputs(x: torch.Tensor, quantization: str) -> torch.Tensor:
    """The activations as llama.cpp multiplies them; in fp32 the KV cache remains, in fp16."""
    if not quantization.startswith("q") or x.shape[-1] % 32:
        return x.half().float()
    blocks = x.unflatten(-1, (-1, 32))
    step = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / step).round() * step).flatten(-2)


def theirs(path: Path) -> Any:
    return llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False)


@pytest.mark.parametrize("quantization", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", ["llama", "smollm", "qwen2", "qwen3"])
def test_llama_cpp_runs_our_files(kind: str, quantization: str, tmp_path: Path) -> None:
    path, _, _ = written(kind, quantization, tmp_path)
    judge = theirs(path)
    judge.eval(IDS)
    got = torch.from_numpy(np.array(judge.scores[: len(IDS)]))
    want = logits(from_pretrained(path, dtype=torch.float32))
    near = from_pretrained(path, dtype=torch.float32)
    for m in near.modules():
        if isinstance(m, Linear):
            m.register_forward_pre_hook(lambda module, args: rounded_inputs(args[0], quantization))
    allowed = 4 * (logits(near) - want).norm()
    assert 0 < allowed < want.norm() / 4
    assert (got - want).norm() < allowed


def test_llama_cpp_knows_the_tokens_and_the_template(tmp_path: Path) -> None:
    path, _, tokenizer = written("llama", "f16", tmp_path)
    judge = theirs(path)
    assert judge.tokenize(b"<|end|>", add_bos=False, special=True) == [tokenizer.token_id("<|end|>")]
    assert judge.detokenize(tokenizer.encode(TEXT)).decode() == TEXT
    assert judge.token_eos() == tokenizer.eos_id
    assert judge.metadata["tokenizer.chat_template"] == DEFAULT_TEMPLATE


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # transformers 5.22 does not read the head size of a Qwen3
def test_transformers_reads_the_same_weights(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    path, _, _ = written(kind, "f32", tmp_path)
    judge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.inference_mode():
        want = judge(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(from_pretrained(path, dtype=torch.float32)), want)


@pytest.mark.parametrize("quantization, kind", [("int8", "q8_0"), ("int4", "q4_0")])
def test_bench_engine_runs_llama_cpp_beside_bagu(quantization: Quantization, kind: str, tmp_path: Path) -> None:
    model = model_of("llama")
    bench_engine.main(
        Case(streams=(1,), prompt=8, new=6, repeats=2), EngineConfig(max_num_seqs=2, quantization=quantization),
        BenchSetting(dtype="fp32", device="cpu", out=tmp_path / "out"), load=lambda: (model, None, None), name="small",
        peers=["llama.cpp"],
    )  # fmt: skip
    (file,) = (tmp_path / "out").rglob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["implementation"] for r in rows] == ["bagu", "llama.cpp"]
    assert rows[1]["gguf_type"] == kind and all(r["tokens_per_s"] > 0 < r["prompt_tokens_per_s"] for r in rows)
