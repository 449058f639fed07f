"""`bagu train` as a user meets it: a small run, going on with one, and what bad input is answered with."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from bagu.cli import main
from bagu.config import from_dict, to_dict
from bagu.data import BpeTokenizer, ChatEncoder
from bagu.data.chat_corpus import ChatCorpus
from bagu.data.corpus import PARTS, SourceConfig
from bagu.errors import UnknownName
from bagu.recipes.catalogue import RECIPES, recipe, with_data
from bagu.recipes.models import NATIVE, load_model
from bagu.recipes.run import with_settings
from bagu.runs.folder import RunFolder
from bagu.train.objectives.sft import _store
from tests.command import bagu

pytestmark = pytest.mark.usefixtures("own_cache")

TINY = [
    "model.vocab_size=512", "tokenizer.vocab_size=512", "model.hidden_size=32", "model.num_layers=1",
    "model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=16", "model.intermediate_size=48", "model.max_len=64",
    "data.context=32", "data.rows=4", "train.steps=6", "train.eval_every=3", "train.sample_every=null",
    "train.save_every=2", "dtype=fp32", "validation=0.3", "eval_batches=2",
]  # fmt: skip


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Twenty different small files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(20):
        words = " ".join(f"word{(i * 7 + j * j) % 97} is {j}" for j in range(120))
        (folder / f"{i}.txt").write_text(words)
    return folder


def settings(*more: str) -> list[str]:
    return [part for s in (*TINY, *more) for part in ("--set", s)]


def test_options_for_the_usual_settings(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [part for s in TINY if not s.startswith("train.steps") for part in ("--set", s)]
    monkeypatch.chdir(tmp_path)
    assert bagu("train", texts, "--out", "a", "--steps", "4", "--lr", "0.002", "--device", "cpu", *plain) == 0
    assert "next: bagu eval a continue4" in capsys.readouterr().err
    saved = json.loads(Path("a/config.json").read_text())
    assert (saved["train"]["steps"], saved["train"]["optimizer"]["lr"], saved["device"]) == (4, 0.002, "cpu")
    rates = ["train.schedule.warmup_steps=90", "train.schedule.decay_share=0.3"]
    more = [part for s in rates for part in ("--set", s)]
    assert bagu("train", texts, "--out", "b", "--minutes", "0.02", *plain, *more) == 0
    saved = json.loads(Path("b/config.json").read_text())["train"]
    steps = saved["steps"]
    assert steps == len(RunFolder(Path("b")).metrics()) >= 16
    assert saved["schedule"]["warmup_steps"] == min(90, max(8, steps // 10)) and saved["schedule"]["decay_share"] == 0.3
    for words in (["--steps", "3", "--set", "train.steps=4"], ["--minutes", "1", "--steps", "3"], ["--minutes", "0"]):
        assert bagu("train", texts, "--out", "c", *words) == 2
        assert words[0] in capsys.readouterr().err and not Path("c").exists()


def test_a_run_on_text_files_and_more_of_it(texts: Path, tmp_path: Path) -> None:
    assert bagu("train", texts, "--out", tmp_path / "run", *settings()) == 0
    folder = RunFolder(tmp_path / "run")
    assert len(folder.metrics()) == 6 and folder.report.is_file()
    assert bagu("train", "--resume", "--out", tmp_path / "run", "--set", "train.steps=9") == 0
    assert [r["step"] for r in folder.metrics()] == list(range(9))
    assert bagu("export", tmp_path / "run", tmp_path / "exported", "--dtype", "fp32") == 0
    assert load_model(tmp_path / "exported").config == load_model(tmp_path / "run").config
    assert bagu("train", "--resume", "--out", tmp_path / "run", "--steps", "10") == 0
    assert len(folder.metrics()) == 10
    last = sorted(folder.checkpoints.iterdir())[-1]
    assert load_model(last).config == load_model(tmp_path / "run").config


def test_an_export_leaves_runs_and_no_other_models_description(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    assert bagu("train", texts, "--out", run, *settings("train.steps=1")) == 0
    before = (run / "config.json").read_bytes()
    assert bagu("export", run, run) == 2
    assert "would write over its config.json" in capsys.readouterr().err
    assert (run / "config.json").read_bytes() == before
    exported.mkdir()
    (exported / NATIVE).write_text("another model's")
    assert bagu("export", run, exported) == 0
    assert load_model(exported).config == load_model(run).config


def test_only_a_run_that_is_there_or_described_is_resumed(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bagu("train", "--resume", "--out", tmp_path / "typo", "--dry-run") == 2
    assert "holds no run to resume" in capsys.readouterr().err
    assert bagu("train", texts, "--resume", "--out", tmp_path / "new", "--dry-run") == 0


def test_a_recipe_beside_a_config_is_refused(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be an option that does nothing."""
    run = tmp_path / "run"
    assert bagu("train", texts, "--out", run, *settings("train.steps=1")) == 0
    for given in (("--config", run / "config.json"), ("--resume", "--out", run)):
        assert bagu("train", "--recipe", "small", *given, "--dry-run") == 2
        assert "--recipe small is given beside the config of" in capsys.readouterr().err


def test_a_chat_with_a_server_takes_no_options_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert bagu("chat", "http://localhost:1", "--device", "cpu", "--dtype", "fp32", "--prompt", "hello") == 2
    assert "--device, --dtype cannot be used with a server's URL" in capsys.readouterr().err


def test_a_folder_of_two_kinds_of_files_needs_a_glob(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts / "more.jsonl").write_text('{"text": "more"}\n')
    assert "2 kinds" in refused(tmp_path, capsys, texts)
    one = settings("train.steps=1", "sources.texts.glob=**/*.txt")
    assert bagu("train", texts, "--out", tmp_path / "run", *one) == 0
    assert json.loads((tmp_path / "run" / "data.json").read_text())["sources"]["texts"]["files"] == 20


def test_a_source_has_a_name_that_settings_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"a/rows.jsonl": "rows", "rows.v2.jsonl": "rows_v2", "zipped.jsonl.gz": "zipped", ".": tmp_path.stem}
    run = with_data(recipe("small"), list(given))
    assert list(run.sources) == list(given.values())
    assert with_settings(run, ["sources.rows_v2.field=body"]).sources["rows_v2"].field == "body"


def test_a_mistyped_source_does_not_add_the_standard_library() -> None:
    run = with_data(recipe("small"), ["chats.jsonl"])
    with pytest.raises(UnknownName, match="there is no source 'chat'") as caught:
        with_settings(run, ["sources.chat.max_bytes=100"])
    assert "did you mean 'chats'?" in caught.value.hint
    assert list(with_settings(run, ["sources.more.path=stdlib"]).sources) == ["chats", "more"]


def chats_of(folder: Path, **files: int) -> dict[str, list[str]]:
    """Write files of so many chats; the ids by the part that SFT on the folder puts them in."""
    folder.mkdir(exist_ok=True)
    turns = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it"}]
    for name, count in files.items():
        (folder / f"{name}.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * count)
    corpus = sft_corpus(folder)
    return {part: [chat.id for chat in corpus.conversations(part)] for part in PARTS}


def sft_corpus(folder: Path) -> ChatCorpus:
    corpus = dataclasses.replace(recipe("sft"), sources={"chats": SourceConfig(path=str(folder))}).corpora()["chats"]
    assert isinstance(corpus, ChatCorpus)
    return corpus


def test_few_chats_are_split_too(tmp_path: Path) -> None:
    for name in "abcdefgh":  # a share of 0.05 of ten is often none
        parts = chats_of(tmp_path / name, **{name: 10})
        assert parts["validation"] and len(parts["train"] + parts["validation"]) == 10
        assert list(sft_corpus(tmp_path / name).training_texts()) == ["say it\nit"] * len(parts["train"])


def test_tokens_of_chats_are_known_by_the_chats(tmp_path: Path) -> None:
    """By files of another kind they would be found in the cache when the chats have changed."""
    chats_of(tmp_path / "chats", c=10)
    (tmp_path / "chats" / "other.parquet").write_bytes(b"not read")
    first = sft_corpus(tmp_path / "chats").facts
    chats_of(tmp_path / "chats", c=11)
    second = sft_corpus(tmp_path / "chats").facts
    assert (first["name"], first["files"]) == ("chat jsonl", 1)
    assert first["sha256"] != second["sha256"]


ENDED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content ~ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_tokens_of_chats_are_known_by_the_tokens_that_the_template_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models with the same tokenizer.json and template may have another eos_token."""
    monkeypatch.setenv("BAGU_CACHE", str(tmp_path / "cache"))
    chats_of(tmp_path / "chats", c=10)
    base = BpeTokenizer.train(["say it"], vocab_size=270, chat_template=ENDED)
    for tokenizer in (base, dataclasses.replace(base, eos_token="<|end|>")):
        store = _store(sft_corpus(tmp_path / "chats"), "train", ChatEncoder(tokenizer))
        assert store.tokens(0)[-1] == tokenizer.eos_id


def test_continued_pretraining_and_lora_start_from_a_run(texts: Path, tmp_path: Path) -> None:
    assert bagu("train", texts, "--out", tmp_path / "base", *settings()) == 0
    small = ["--set", "data.context=32", "--set", "data.rows=4", "--set", "train.steps=3", "--set", "dtype=fp32"]
    more = ["--set", "train.eval_every=null", "--set", "train.save_every=null", "--set", "train.sample_every=null"]
    new = tmp_path / "new.jsonl"
    new.write_text("".join(json.dumps({"text": f"new text {i} " * 30}) + "\n" for i in range(12)))
    mixed = ["--set", 'data.mix.weights={"texts": 1, "new": 3}', "--set", "validation=0.3"]
    status = bagu("train", texts, new, "--from", tmp_path / "base", "--out", tmp_path / "on", *small, *more, *mixed)
    assert status == 0
    report = json.loads((tmp_path / "on" / "data.json").read_text())["loader"]["sources"]
    assert report["new"]["mix_percent"] == pytest.approx(75, abs=10)
    chats = tmp_path / "chats.jsonl"
    turns = lambda i: [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} it is"}]  # noqa: E731
    chats.write_text("".join(json.dumps({"messages": turns(i)}) + "\n" for i in range(40)))
    lora = ["--recipe", "lora", "--from", tmp_path / "base", "--out", tmp_path / "lora"]
    assert bagu("train", chats, *lora, *small, *more, "--set", "validation=0.3") == 0
    assert load_model(tmp_path / "lora").config == load_model(tmp_path / "base").config
    merged, adapter = (load_model(tmp_path / "lora" / name).state_dict() for name in ("", "adapter"))
    base = load_model(tmp_path / "base").state_dict()
    assert all(torch.equal(merged[name], weight) for name, weight in adapter.items())  # PEFT's format loses nothing
    assert not all(torch.equal(base[name], weight) for name, weight in adapter.items())
    assert bagu("export", tmp_path / "lora" / "adapter", tmp_path / "exported") == 0
    assert (tmp_path / "exported" / "tokenizer.json").is_file()  # the base's


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_its_config_file(name: str) -> None:
    run = recipe(name)
    assert from_dict(type(run), json.loads(json.dumps(to_dict(run)))) == run


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--set", "train.stepz=3"], r"stepz.*\n.*steps"),
        (["--set", "model.num_heads=3"], r"num_heads"),
        (["--set", "train.optimizer.lr=fast"], r"train\.optimizer\.lr"),
        (["--set", "data.context=4096"], r"positions for"),
        (["--set", "eval_batches=0"], r"eval_batches is 0"),
        (["--set", "validation=1"], r"validation is 1"),
        (["--set", "dedup=80"], r"dedup is 80"),
        (["--set", "tokenizer.max_mb=0"], r"max_mb=0"),
        (["--recipe", "smal"], r"small"),
        (["--recipe", "sft"], r"--from"),
        (["--from", "nowhere/at/all"], r"folder nowhere/at/all does not exist"),
    ],
)
def test_a_recipe_with_an_impossible_key_says_which(
    extra: list[str], said: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bagu("train", texts, "--out", tmp_path / "run", *extra) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Path, *more: str | Path) -> str:
    assert bagu("train", data, "--out", tmp_path / "run", *settings(), *more) == 2
    return capsys.readouterr().err


def test_bad_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"text": oops}\n')
    assert f"{broken}:2: not JSON" in refused(tmp_path, capsys, broken)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert str(empty) in refused(tmp_path, capsys, empty)
    assert "no file or folder" in refused(tmp_path, capsys, tmp_path / "missing.txt")


def test_a_tokenizer_that_does_not_match_the_model(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["tokenizer", "train", str(tmp_path / "tok"), str(texts), "--vocab-size", "600"])
    said = refused(tmp_path, capsys, texts, "--set", "tokenizer.vocab_size=null", "--set", "model.vocab_size=400",
                   "--set", f"tokenizer.path={tmp_path / 'tok'}")  # fmt: skip
    assert "vocabulary" in said and "model.vocab_size=" in said


def test_a_finished_run_is_not_written_over(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bagu("train", texts, "--out", tmp_path / "run", *settings()) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert "already holds a run" in refused(tmp_path, capsys, texts)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_the_context_of_fine_tuning_fits_the_chats(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bagu("train", texts, "--out", tmp_path / "base", *settings("train.steps=1", "model.max_len=512")) == 0
    turns = [{"role": r, "content": f"{'word ' * 16}{n}"} for n in range(9) for r in ("user", "assistant")]
    never = [turns[0], {"role": "assistant", "content": "word " * 900}]
    rows = [{"messages": turns if n % 4 else turns[:2]} for n in range(16)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["--set", "train.steps=2", "--set", "dtype=fp32", "--set", "eval_batches=1", "--set", "device=cpu"]
    sft = ["train", tmp_path / "chats.jsonl", "--recipe", "sft", "--from", tmp_path / "base", *small]
    assert bagu(*sft, "--out", tmp_path / "fits") == 0
    data = json.loads((tmp_path / "fits" / "config.json").read_text())["data"]
    assert 256 < data["context"] <= 512 and data["rows"] * data["context"] <= 16 * 256
    assert f"context {data['context']}" in capsys.readouterr().err
    assert json.loads((tmp_path / "fits" / "data.json").read_text())["sources"]["chats"]["chats_cut"] == 0

    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": never}]))
    assert bagu(*sft, "--out", tmp_path / "cut", "--set", "data.context=128") == 0
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["data"]["context"] == 128
    facts = json.loads((tmp_path / "cut" / "data.json").read_text())["sources"]["chats"]
    assert (facts["chats_cut"], facts["chats_left_out"]) == (12, 1) and facts["answer_tokens_left_out"] > 900
    assert "context 128: 12 cut at turns, 1 left out" in capsys.readouterr().err
    assert "Long chats" in RunFolder(tmp_path / "cut").report.read_text()
