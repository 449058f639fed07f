"""`import bagu`: the scripts of docs/python.md, the examples of the docstrings, and the usual mistakes."""

from __future__ import annotations

import doctest
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bagu
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.eval.intervals import Estimate
from bagu.eval.score import Result
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.nn.presets import preset
from bagu.nn.score import with_score_head
from bagu.recipes.models import save_as_gguf, save_model
from bagu.serve.config import GenerationDefaults
from bagu.serve.request import Sampling
from tests.fresh_cache import fresh_cache

DOCS = Path(__file__).parents[2] / "docs"
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
TRAIN, *SCRIPTS = CODE.findall((DOCS / "python.md").read_text(encoding="utf-8"))


def test_import_bagu_is_light_and_lists_its_names() -> None:
    code = "import bagu, sys; print(sorted({'torch', 'numpy'} & sys.modules.keys()), {*bagu.__all__} <= {*dir(bagu)})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[] True\n"
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = bagu.lode  # type: ignore[attr-defined]
    assert not {*bagu.__all__} & {"train", "eval", "serve", "data", "nn"}  # names of packages


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names of the page's first script, which has trained runs/words; the tests run in its folder."""
    folder = tmp_path_factory.mktemp("python")
    patch, threads = pytest.MonkeyPatch(), torch.get_num_threads()
    patch.chdir(folder)
    patch.setenv("BAGU_CACHE", fresh_cache(folder / "cache"))
    torch.set_num_threads(1)  # a small model on crowded cores waits for its threads
    names: dict[str, Any] = {}
    exec(TRAIN, names)
    yield names
    torch.set_num_threads(threads)
    patch.undo()


@pytest.fixture(scope="module")
def model(trained: dict[str, Any]) -> Iterator[bagu.Model]:
    with bagu.load("runs/words", dtype="fp32", device="cpu") as model:
        yield model


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.splitlines()[-1][:40])
def test_a_script_of_the_page_runs(script: str, trained: dict[str, Any]) -> None:
    assert len(script.splitlines()) <= 15 and len(TRAIN.splitlines()) <= 15
    exec(script, {})


def test_the_chinese_page_has_the_same_scripts() -> None:
    assert CODE.findall((DOCS / "python.zh.md").read_text(encoding="utf-8")) == [TRAIN, *SCRIPTS]


@pytest.mark.parametrize(
    "documented",
    [bagu.load, bagu.Model.generate, bagu.Model.stream, bagu.Model.chat, bagu.Model.score, bagu.Model.embed,
     bagu.evaluate, bagu.fit],
    ids=lambda f: f.__qualname__,
)  # fmt: skip
def test_the_example_of_a_docstring_holds(documented: Any, model: bagu.Model, trained: dict[str, Any]) -> None:
    names = {"bagu": bagu, "model": model, "texts": trained["texts"]}
    (test,) = doctest.DocTestFinder(recurse=False).find(documented, documented.__name__, globs=names)
    assert test.examples
    found = doctest.DocTestRunner(verbose=False).run(test)
    assert found.failed == 0, "the output above differs"


def test_a_run_says_what_it_did(trained: dict[str, Any]) -> None:
    run = trained["run"]
    assert repr(run) == f"Fitted('runs/words', 40 steps, loss {run.loss:.3f} nats)" and 0 < run.loss < 3
    assert run.report.is_file() and os.fspath(run) == "runs/words"


def test_the_result_has_the_shape_of_the_question(model: bagu.Model) -> None:
    one = model.generate("one two", max_tokens=3, seed=5, temperature=1.0)
    assert model.generate(["one two"], max_tokens=3, seed=5, temperature=1.0) == [one]
    two = model.generate(["one", "six"], n=2, max_tokens=2)
    assert [len(each) for each in two] == [2, 2] and model.generate([]) == [] and model.embed([]) == []
    assert len(model.generate("one", n=3, max_tokens=1)) == 3
    assert model.generate("one two", max_tokens=6, temperature=0, stop=" five") == " three four"


def test_a_checkpoint_a_folder_and_a_gguf_file_are_models_too(model: bagu.Model) -> None:
    save_as_gguf(model.network, model.tokenizer, Path("words.gguf"), "f32")
    for name in ("runs/words/checkpoints/step-000000040", "runs/words/model", "words.gguf"):
        with bagu.load(name, dtype="fp32", device="cpu") as same:
            assert same.generate("two three", max_tokens=4, temperature=0) == " four five six seven", name


def test_the_default_length_leaves_room_for_the_prompt(model: bagu.Model) -> None:
    """A generation_config.json may ask for more tokens than the context has."""
    generation = GenerationDefaults(max_tokens=100_000)
    with bagu.load("runs/words", dtype="fp32", device="cpu") as long:
        long.config = replace(long.config, generation=generation)
        text = long.generate("one two three", temperature=0)
        assert 200 < len(long.tokenizer.encode(text)) < 256


def test_a_score_is_the_sum_of_what_the_network_says(model: bagu.Model) -> None:
    ids = model.tokenizer.encode_prompt("one two three four")
    t = torch.tensor(ids)
    with torch.inference_mode():
        network, cu = model.network, torch.tensor([0, len(ids)], dtype=torch.int32)
        hidden = network(t, torch.arange(len(ids)), cu, len(ids)).hidden
        logprobs = (hidden @ network.head_weight.T).float().log_softmax(-1)[:-1].gather(1, t[1:, None]).squeeze(1)
    whole = model.score("one two three four")
    assert whole.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
    assert whole.logprob == pytest.approx(math.fsum(whole.logprobs)) and "".join(whole.tokens) == " two three four"
    assert model.score("one two three", " four").logprob == pytest.approx(whole.logprobs[-1], abs=1e-4)


def test_representations_are_short(model: bagu.Model) -> None:
    assert re.fullmatch(r"Model\(words, language model, [\d,]+ parameters, float32 on cpu\)", repr(model))
    assert len(repr(model.tokenizer)) < 100 and "tokens" in repr(model.tokenizer)
    share = Estimate(mean=0.5, low=0.4, high=0.6, items=90, clusters=90)
    result = Result(task="write", model="words", metrics={"pass@1": share}, seconds=1.0, limits="", folder=None)
    assert repr(result) == "Result(words on write: pass@1 50.0 % (40.0 to 60.0), 90 items)"
    assert len(repr(model.network)) < 600 and len(repr(model.score("one two"))) < 80


@pytest.mark.slow
def test_minutes_give_a_run_of_the_steps_that_fit(trained: dict[str, Any]) -> None:
    run = bagu.fit(trained["texts"], minutes=0.02, settings=trained["small"])
    schedule = json.loads((run.folder / "config.json").read_text())["train"]["schedule"]
    assert schedule["warmup_steps"] == min(30, max(8, run.steps // 10)) and schedule["kind"] == "wsd"
    assert str(run.folder) == "runs/fit" and run.steps >= 16 and not run.interrupted
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == run.steps


def test_chats_fine_tune_a_model(trained: dict[str, Any], model: bagu.Model) -> None:
    chats = [
        [{"role": "user", "content": f"{word}?"}, {"role": "assistant", "content": word}] for word in trained["words"]
    ]
    run = bagu.fit(chats, steps=3, start=model, out="runs/chats")
    assert '"kind": "sft"' in (run.folder / "config.json").read_text()
    with pytest.raises(BaguError, match="chats are for a model that has read text"):
        bagu.fit(chats, steps=1)


def test_a_file_is_read_as_bagu_train_reads_it(trained: dict[str, Any]) -> None:
    Path("text.txt").write_text("\n".join(trained["texts"]))
    run = bagu.fit("text.txt", steps=2, out="runs/file", settings=trained["small"])
    assert run.steps == 2 and '"path": "text.txt"' in (run.folder / "config.json").read_text()


anything: Any = bagu  # wrong types are what is tested
MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a str for ids": (
        lambda m: m.engine.generate(["one"], Sampling()),
        "a prompt is a str, and the engine reads token ids",
    ),
    "decode a str": (lambda m: m.tokenizer.decode("one"), "expected token ids, and found a str"),
    "encode ids": (lambda m: m.tokenizer.encode([1, 2]), "expected a str, and found a list"),
    "ids for a text": (lambda m: m.generate([1, 2]), "generate: expected a text, and found a int"),
    "messages": (lambda m: m.generate([{"role": "user"}]), "expected a text, and found a dict"),
    "nothing": (lambda m: m.generate(None), "expected a text, and found a NoneType"),
    "empty prompt": (lambda m: m.generate(""), "generate: a text is empty"),
    "empty continuation": (lambda m: m.score("one", ""), "the continuation is empty"),
    "one token": (lambda m: m.score("one"), "the first token has no probability"),
    "no messages": (lambda m: m.chat([]), "chat: expected messages, and there is none"),
    "texts to chat": (lambda m: m.chat(["one"]), "chat: expected messages, and found 'one'"),
    "unknown setting": (lambda m: m.generate("one", max_token=3), "there is no setting of a generation 'max_token'"),
    "wrong setting": (lambda m: m.generate("one", top_p=2), "top_p = 2"),
    "not a reward model": (lambda m: m.reward("a", "b"), "reward: words is a language model"),
    "unknown task": (lambda m: bagu.evaluate(m, "recal"), "there is no task 'recal'"),
    "no items": (lambda m: bagu.evaluate(m, "recall", limit=0), "limit = 0"),
    "missing folder": (lambda m: bagu.load("runs/words/none/there"), "does not exist"),
    "no name": (lambda m: anything.load(None), "a NoneType names no model"),
    "long text": (lambda m: m.embed("one two " * 200), "tokens, and the model takes 256"),
    "both": (lambda m: bagu.fit(["a"], steps=1, minutes=1), "minutes = 1 and steps = 1"),
    "no data": (lambda m: bagu.fit([], steps=1), "expected texts or chats, and found none"),
    "text as a path": (lambda m: bagu.fit("one\ntwo", steps=1), "a str is the path of a file or folder"),
    "steps twice": (lambda m: bagu.fit(["a"], settings=["train.steps=3"]), "train.steps is among the settings"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str, model: bagu.Model) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(BaguError, match=re.escape(message)) as caught:
        call(model)
    assert caught.value.hint


def test_models_that_do_not_generate_say_so(model: bagu.Model, tmp_path: Path) -> None:
    encoder = init_weights(Transformer(preset("bert_6m"), device="cpu", dtype=torch.float32), 0)
    save_model(encoder, model.tokenizer, tmp_path / "encoder")
    with bagu.load(tmp_path / "encoder", dtype="fp32", device="cpu") as embeds:
        vector = embeds.embed("one two")
        assert math.hypot(*vector) == pytest.approx(1) and len(vector) == embeds.network.config.hidden_size
        for call in (
            lambda: embeds.generate("a"),
            lambda: embeds.score("a b"),
            lambda: bagu.evaluate(embeds, "recall"),
        ):
            with pytest.raises(BaguError, match="encoder is an encoder, which predicts no next token"):
                call()
    with pytest.raises(BaguError, match="the model encoder is closed"):
        embeds.embed("one")
    network = bagu.load("runs/words", dtype="fp32", device="cpu").network
    with_score_head(network)
    save_model(network, model.tokenizer, tmp_path / "reward")
    judge = bagu.load(tmp_path / "reward", device="cpu")
    assert math.isfinite(judge.reward("one two", "three")) and "reward model" in repr(judge)
    asks = [lambda: judge.generate("a"), lambda: judge.embed("a"), lambda: judge.chat("a")]
    for ask in asks:
        with pytest.raises(BaguError, match="is a reward model, which scores answers and predicts no tokens"):
            ask()


def test_a_chat_needs_a_template(model: bagu.Model, tmp_path: Path) -> None:
    plain = BpeTokenizer(spec=model.tokenizer.spec, eos_token=model.tokenizer.eos_token)
    save_model(model.network, plain, tmp_path / "plain")
    with pytest.raises(BaguError, match="plain has no chat template"):
        bagu.load(tmp_path / "plain").chat("one")
