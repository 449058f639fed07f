"""The walk in docs/post_training.md, as printed: what SFT, DPO and GRPO write stops at the end of a turn elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bagu.data.tokenizer import BpeTokenizer

DOCUMENT = Path(__file__).parents[2] / "docs" / "post_training.md"
QUESTIONS = [f"What is {a} + {b}?" for a in range(0, 40, 2) for b in range(0, 40, 4)]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the commands have run."""
    folder = tmp_path_factory.mktemp("walk")
    text = DOCUMENT.read_text(encoding="utf-8").split("## A chat, from")[1].split("\n## ")[0]
    for block in re.findall(r"```python\n(# (?:rows|reward)\.py\n.*?)```", text, re.DOTALL):
        (folder / block.split()[1]).write_text(block, encoding="utf-8")
    (commands,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", commands], cwd=folder, env=os.environ | {"PATH": path}, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", ["sft", "dpo", "grpo"])
def test_two_hundred_answers_end_with_their_turn_in_transformers(walked: Path, run: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(walked / "runs" / run / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(walked / "runs" / run / "model")
    assert len(QUESTIONS) == 200
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        found = model.generate(**ids, max_new_tokens=100, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
        assert len(found) < 100 and tokenizer.convert_ids_to_tokens(found[-1]) == "<|end|>", tokenizer.decode(found)


@pytest.mark.slow
def test_the_gguf_file_names_the_end_of_a_turn(walked: Path) -> None:
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(walked / "chat.gguf").fields
    tokenizer = BpeTokenizer.load(walked / "runs" / "dpo" / "model")
    assert fields["tokenizer.ggml.eot_token_id"].contents() == tokenizer.token_id("<|end|>")
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_id
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
