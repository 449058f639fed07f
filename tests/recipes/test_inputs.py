"""What a run reads, what it says before its first step, and what `--dry-run` checks."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bagu.config import override
from bagu.data import BpeTokenizer
from bagu.data.corpus import SourceConfig
from bagu.errors import BaguError
from bagu.nn import count
from bagu.nn.config import ModelConfig
from bagu.recipes.catalogue import recipe, with_data
from bagu.recipes.inputs import read_inputs
from bagu.recipes.run import Run
from bagu.recipes.summary import matmul_rate, summarise
from bagu.recipes.training import _model_id, check, train
from tests.command import bagu

pytestmark = pytest.mark.usefixtures("own_cache")

TINY = [
    "model.vocab_size=400", "tokenizer.vocab_size=400", "model.hidden_size=32", "model.num_layers=1",
    "model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=16", "model.intermediate_size=48", "model.max_len=64",
    "data.context=32", "data.rows=4", "train.steps=2", "train.eval_every=null", "train.sample_every=null",
    "train.save_every=null", "train.optimizer.kind=adamw", "dtype=fp32", "device=cpu", "validation=0.3",
]  # fmt: skip


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Ten rows with two fields of text."""
    path = tmp_path / "texts.jsonl"
    rows = [{f: " ".join(f"{f}{(i * 7 + j * j) % 97}" for j in range(60)) for f in ("text", "body")} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny(texts: Path, *settings: str) -> Run:
    return override(with_data(recipe("small"), [str(texts)]), [*TINY, *settings])


def test_a_corpus_whose_tokens_are_cached_is_not_read_again(texts: Path, tmp_path: Path) -> None:
    """Neither by a resume nor by another run: the files are hashed, not parsed and de-duplicated."""
    run = tiny(texts)
    corpora = run.corpora()
    read_inputs(run, tmp_path / "run", corpora=corpora)
    assert {"_kept", "_split"} <= vars(corpora["texts"]).keys()  # read the first time
    again = run.corpora()
    inputs = read_inputs(run, tmp_path / "other", corpora=again)
    assert {"_kept", "_split"}.isdisjoint(vars(again["texts"]))
    assert inputs.data.loader.batch(0)[0].num_tokens == run.data.tokens_per_step


def test_a_run_does_not_keep_the_text_that_it_has_tokenised(texts: Path, tmp_path: Path) -> None:
    inputs = read_inputs(tiny(texts), tmp_path / "run")
    assert {"_kept", "_split"}.isdisjoint(vars(inputs.corpora["texts"]))


def test_another_field_of_the_same_file_is_another_corpus(texts: Path, tmp_path: Path) -> None:
    """The field was not in the key of the cache: the second run trained on the tokens of the first."""
    run = tiny(texts)
    other = dataclasses.replace(run, sources={"texts": SourceConfig(path=str(texts), field="body")})
    for each, word in ((run, "text"), (other, "body")):
        inputs = read_inputs(each, tmp_path / "run")
        store = inputs.data.loader.stores["texts"]
        assert word in inputs.tokenizer.decode(store.tokens(0).tolist())


def test_a_trained_tokenizer_is_the_same_from_the_cache(texts: Path, tmp_path: Path) -> None:
    first, second = (read_inputs(tiny(texts), tmp_path / "run").tokenizer for _ in range(2))
    other = read_inputs(tiny(texts, "tokenizer.vocab_size=300"), tmp_path / "run").tokenizer
    assert first == second and first.chat_template is not None
    assert other.vocab_size == 300
    assert isinstance(first, BpeTokenizer)


def test_the_summary_counts_what_the_run_will_do(texts: Path, tmp_path: Path) -> None:
    run = tiny(texts, "train.steps=8", "data.micro_batches=2")
    inputs = read_inputs(run, tmp_path / "run")
    summary = summarise(run, inputs, first_step=2, peak_flops=1e9)
    store = inputs.data.loader.stores["texts"]
    assert summary.parameters == summary.trained == count.parameters(inputs.model).total
    assert summary.tokens_per_step == 2 * 4 * 32
    assert summary.sources[0].tokens == store.num_tokens
    assert summary.sources[0].epochs == pytest.approx(8 * 2 * 4 * 32 / store.num_tokens)
    flops = 6 * 2 * 4 * 32 * count.flops(inputs.model, 32).training
    assert summary.seconds == pytest.approx(flops / 0.5e9)
    text = "\n".join(summary.lines())
    for said in (f"{summary.parameters:,} parameters", "float32 on cpu", "6 steps from step 2 on", "1 GFLOP/s"):
        assert said in text
    assert "warning" not in text


def test_the_matmul_rate_is_measured_once_per_process() -> None:
    """Two measurements would differ: they are times of a clock that counts nanoseconds."""
    first = matmul_rate(torch.device("cpu"), torch.float32)
    assert first > 0 and matmul_rate(torch.device("cpu"), torch.float32) == first


def test_a_small_corpus_seen_fifty_times_is_warned_of(texts: Path, tmp_path: Path) -> None:
    inputs = read_inputs(tiny(texts), tmp_path / "run")
    per_epoch = inputs.data.loader.stores["texts"].num_tokens / inputs.data.loader.config.tokens_per_step
    for epochs, warned in ((49, 0), (51, 1)):
        run = tiny(texts, f"train.steps={round(per_epoch * epochs)}")
        summary = summarise(run, inputs, peak_flops=1e9)
        assert len(summary.warnings()) == warned
    (warning,) = summary.warnings()
    assert f"{epochs} times" in warning and f"train.steps={int(per_epoch * 10)}" in warning


def test_lora_says_how_much_is_trained(texts: Path, tmp_path: Path) -> None:
    settings = [part for s in TINY for part in ("--set", s)]
    assert bagu("train", texts, "--out", tmp_path / "base", *settings) == 0
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"instruction": f"say {i}", "output": f"{i}"}) + "\n" for i in range(20)))
    run = recipe("lora")
    run = dataclasses.replace(run, init_from=str(tmp_path / "base"), sources={"c": SourceConfig(path=str(chats))})
    run = override(run, ["data.context=32", "lora.rank=2", "lora.base=int8", "dtype=fp32", "device=cpu"])
    summary = summarise(run, read_inputs(run, tmp_path / "run"), peak_flops=1e9)
    # qkv [64, 32], out [32, 32], gate_up [96, 32], down [32, 48]
    assert summary.trained == 2 * (96 + 64 + 128 + 80)
    assert f"{summary.trained} are trained (LoRA over int8 weights)" in summary.lines()[0]


def test_the_summary_comes_before_the_first_step(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [part for s in TINY for part in ("--set", s)]
    assert bagu("train", texts, "--out", tmp_path / "run", *settings) == 0
    said = capsys.readouterr().err
    assert 0 <= said.index("parameters") < said.index("tokens in all") < said.index("1/2 steps")


def test_a_dry_run_checks_the_data_and_writes_no_run(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [part for s in TINY for part in ("--set", s)]
    assert bagu("train", texts, "--out", tmp_path / "run", *settings, "--dry-run") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["train"]["steps"] == 2
    assert "parameters" in err and "7 documents" in err and "time      about" in err
    assert not (tmp_path / "run").exists()
    texts.write_text(texts.read_text() + '{"text": oops}\n')
    assert bagu("train", texts, "--out", tmp_path / "run", *settings, "--dry-run") == 2
    assert f"{texts}:11: not JSON" in capsys.readouterr().err


def test_checkpoints_made_before_the_score_head_still_match_their_model() -> None:
    config = ModelConfig(
        vocab_size=262, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
        max_len=32,
    )  # fmt: skip
    assert _model_id(config) == "f03587670d6d5e3c"  # as written at 4fa50d6
    assert _model_id(replace(config, score_head=True)) != _model_id(config)


def test_offload_on_a_cpu_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    settings = ("device=cpu", "train.mesh.shard=2", "train.offload=true", "data.micro_batches=2")
    run = override(recipe("small"), settings)
    for start in (check, train):
        with pytest.raises(BaguError, match=r"train.offload is set, and the run is on the CPU"):
            start(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["grpo", "ppo", "on_policy_distill"])
def test_objectives_that_sample_their_batches_are_refused_on_a_mesh(name: str) -> None:
    with pytest.raises(BaguError, match=f"objective '{name}' and the mesh dp=2 do not go together"):
        override(recipe(name), ["train.mesh.dp=2", "data.micro_batches=2"])
