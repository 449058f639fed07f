"""generation_config.json: read, refused where it is wrong, and honoured by `bagu serve`; transformers is the judge."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bagu.config import from_dict
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.machine.hub import WeightsError
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.nn.presets import preset
from bagu.recipes.demo_server import running_server
from bagu.recipes.generation import read_generation
from bagu.recipes.loader import Loader
from bagu.recipes.models import save_model
from bagu.recipes.repository import VersionEngines
from bagu.recipes.serve import ServeOptions, serve_main
from bagu.serve.config import EngineConfig, GenerationDefaults
from bagu.serve.http.options import ServerOptions
from bagu.serve.repository.layout import Settings

PROMPT = "def f(x):"


def saved(folder: Path) -> BpeTokenizer:
    """A small Llama whose greedy text does not repeat itself at once."""
    corpus = ["def f(x):\n    return x\n", "hello world "] * 4
    tokenizer = BpeTokenizer.train(corpus, vocab_size=300, chat_template=DEFAULT_TEMPLATE)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=48, max_len=128, init_std=0.2,
    )  # fmt: skip
    save_model(init_weights(Transformer(config, dtype=torch.float32), 0), tokenizer, folder)
    return tokenizer


def write(folder: Path, **said: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(said))


def test_what_a_folder_says_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    assert read_generation(tmp_path) == GenerationDefaults()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_generation(tmp_path) == GenerationDefaults(eos_ids=(5, 6))
    write(tmp_path, eos_token_id=7, temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=9, do_sample=True)
    expected = GenerationDefaults(eos_ids=(7,), temperature=0.6, top_k=20, top_p=0.95, max_tokens=9)
    assert read_generation(tmp_path) == expected
    write(tmp_path, top_k=0, min_p=None)
    assert read_generation(tmp_path) == GenerationDefaults(eos_ids=(5, 6))


@pytest.mark.parametrize(
    ("said", "names"), [({"eos_token_id": "</s>"}, "eos_token_id"), ({"temperature": "hot"}, "temperature")]
)
def test_a_wrong_value_is_named(tmp_path: Path, said: dict[str, Any], names: str) -> None:
    write(tmp_path, **said)
    with pytest.raises(WeightsError, match=names):
        read_generation(tmp_path)


def test_the_versions_of_a_repository_take_the_option(tmp_path: Path) -> None:
    """auto: each version's own file; none: no file; a folder: its file. The sampling of model.toml is above all."""
    saved(tmp_path / "1")
    write(tmp_path / "1", top_k=7, temperature=0.5)
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", top_k=9)

    def defaults(setting: str) -> GenerationDefaults:
        engines = VersionEngines(loader=Loader(model=""), engine=EngineConfig(), generation_config=setting)
        settings = from_dict(Settings, {"sampling": {"temperature": 0.25}})
        return engines(tmp_path / "1", settings, 0.5).config.generation

    assert (defaults("auto").top_k, defaults("auto").temperature) == (7, 0.25)
    assert (defaults("none").top_k, defaults("none").temperature) == (None, 0.25)
    assert (defaults(str(tmp_path / "other")).top_k, defaults("auto").temperature) == (9, 0.25)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.toml").touch()
    with pytest.raises(BaguError, match=r"there is no .*nowhere.generation_config\.json"):
        serve_main(
            Loader(model=str(tmp_path)),
            EngineConfig(),
            ServerOptions(),
            ServeOptions(generation_config=str(tmp_path / "nowhere")),
        )


@pytest.mark.slow
def test_a_server_stops_where_transformers_does_and_samples_as_the_file_says(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = saved(tmp_path)
    ids = torch.tensor([tokenizer.encode_prompt(PROMPT)])
    judge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    free = judge.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=-1)[0, ids.shape[1] :].tolist()
    end = next(token for at, token in enumerate(free) if at >= 2 and token not in free[:at])
    write(tmp_path, eos_token_id=[tokenizer.eos_id, end], top_k=1, max_new_tokens=9)
    judge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    told = judge.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :].tolist()
    assert told == free[: free.index(end) + 1]

    with running_server(tmp_path) as address:

        def ask(path: str, **body: Any) -> Any:
            data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(f"{address}{path}", data, kind), timeout=60) as answer:
                return json.load(answer)

        (choice,) = ask("/v1/completions", prompt=PROMPT, max_tokens=40)["choices"]  # top_k 1 is greedy, unasked
        assert choice["finish_reason"] == "stop" and choice["text"] == tokenizer.decode(told[:-1])
        (choice,) = ask("/v1/completions", prompt=PROMPT, max_tokens=12, ignore_eos=True)["choices"]
        assert choice["text"] == tokenizer.decode(free)
        drawn = {
            ask("/v1/completions", prompt=PROMPT, max_tokens=12, ignore_eos=True, top_k=-1, seed=s)["choices"][0][
                "text"
            ]
            for s in range(4)
        }
        assert len(drawn) == 4  # a request that asks for all tokens gets them
        chat = ask("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], ignore_eos=True)
        assert chat["usage"]["completion_tokens"] == 9


def judged(folder: Path, prompt: list[int], limit: int = 40) -> list[int]:
    """The tokens that transformers generates greedily with the model in a folder, by its own files alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit)
    return out[0, len(prompt) :].tolist()


def always(token: int, tokenizer: BpeTokenizer) -> Transformer:
    """A model that predicts one token after every text: its last norm has the weight 0, and a bias along that token."""
    changes = {"vocab_size": tokenizer.vocab_size, "hidden_size": 64, "num_layers": 1, "num_heads": 4, "head_dim": 16}
    config = replace(preset("gpt2_124m"), **changes, num_kv_heads=4, intermediate_size=64, max_len=128)
    model = init_weights(Transformer(config, dtype=torch.float32), 0)
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.copy_(1e3 * model.head_weight[token])
    return model


def test_a_saved_chat_model_stops_at_the_end_of_its_turn_in_transformers(tmp_path: Path) -> None:
    tokenizer = BpeTokenizer.train(["hello world "] * 4, vocab_size=300, chat_template=DEFAULT_TEMPLATE)
    end, letter = tokenizer.token_id("<|end|>"), tokenizer.encode("w")[0]
    for name, token, count in (("ends", end, 1), ("text", letter, 40), ("eos", tokenizer.eos_id, 1)):
        save_model(always(token, tokenizer), tokenizer, tmp_path / name)
        assert judged(tmp_path / name, tokenizer.encode("hello")) == [token] * count
        assert read_generation(tmp_path / name).eos_ids == (end, tokenizer.eos_id)


def test_a_model_keeps_the_generation_settings_of_the_one_it_started_from(tmp_path: Path) -> None:
    """As those of Gemma 3 and Phi-3, whose token at the end of a turn is in generation_config.json alone."""
    tokenizer = saved(tmp_path / "start")
    write(tmp_path / "start", eos_token_id=[7, 9], bos_token_id=3, pad_token_id=4, temperature=0.6, top_k=20)
    save_model(always(7, tokenizer), tokenizer, tmp_path / "tuned", start=tmp_path / "start")
    found = json.loads((tmp_path / "tuned" / "generation_config.json").read_text())
    assert (found["bos_token_id"], found["pad_token_id"], found["top_k"]) == (3, 4, 20)
    assert found["eos_token_id"] == [tokenizer.token_id("<|end|>"), 7, 9, tokenizer.eos_id]
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (found["eos_token_id"], 4)


def test_a_tokenizer_without_a_chat_template_adds_no_token(tmp_path: Path) -> None:
    tokenizer = BpeTokenizer.train(["hello world "] * 4, vocab_size=300)
    save_model(always(5, tokenizer), tokenizer, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_id
