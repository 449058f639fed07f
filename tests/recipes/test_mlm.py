"""`bagu train --recipe mlm`: an encoder learns to fill in hidden tokens, resumes to the same bits, and is a BERT."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bagu.config import override
from bagu.data.tokenizer import BpeTokenizer
from bagu.recipes.catalogue import recipe, with_data
from bagu.recipes.models import load_model
from bagu.recipes.run import Run
from bagu.recipes.serve import Loader
from bagu.recipes.training import train
from bagu.runs.folder import Observer, RunFolder
from bagu.serve.embedding import embed
from tests.command import bagu

pytestmark = pytest.mark.usefixtures("own_cache")

TINY = [  # 256 bytes and six special tokens, no merge
    "model.vocab_size=262", "tokenizer.vocab_size=262", "model.hidden_size=32", "model.num_layers=2",
    "model.num_heads=2", "model.num_kv_heads=2", "model.head_dim=16", "model.intermediate_size=64", "model.max_len=32",
    "data.context=32", "data.rows=4", "dtype=fp32", "validation=0.3", "dedup=null", "eval_batches=2",
    "train.eval_every=null", "train.save_every=null",
]  # fmt: skip


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Files that are each one of eight letters over and over: what is hidden can be read off its neighbours."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text("abcdefgh"[i % 8] * 120)
    return folder


def tiny(texts: Path, *more: str) -> Run:
    return override(with_data(recipe("mlm"), [str(texts)]), [*TINY, *more])


def settings(*more: str) -> list[str]:
    return [part for s in (*TINY, *more) for part in ("--set", s)]


class PressAt(Observer):
    """Presses Ctrl-C while a step is being recorded; shows nothing."""

    def __init__(self, step: int | None = None) -> None:
        self.at = step

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGINT)

    def on_event(self, kind: str, step: int, **facts: Any) -> None: ...

    def on_sample(self, step: int, texts: Any) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self) -> None: ...


@pytest.mark.slow
def test_it_learns_to_fill_in_what_is_hidden(texts: Path, tmp_path: Path) -> None:
    run = tiny(texts, "train.steps=120", "train.eval_every=40", "train.optimizer.lr=0.02")
    train(run, tmp_path / "run", progress=PressAt())
    rows = RunFolder(tmp_path / "run").metrics()
    held_out = [row["val_loss_nats"] for row in rows if row.get("val_loss_nats") is not None]
    assert rows[0]["loss_nats"] > 5
    assert held_out[-1] < 0.5 * math.log(8)  # who only counts the letters stays at ln 8
    assert all(row["bits_per_byte"] is None and "val_bits_per_byte" not in row for row in rows)


@pytest.mark.skipif(os.name != "posix", reason="SIGINT to oneself")
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(texts: Path, tmp_path: Path) -> None:
    run = tiny(texts, "train.steps=9", "train.eval_every=3", "model.dropout=0.1", "data.micro_batches=2")
    whole = train(run, tmp_path / "whole", progress=PressAt())
    begun = train(run, tmp_path / "run", progress=PressAt(4))
    assert begun.fit.interrupted and begun.fit.step == 5
    ended = train(run, tmp_path / "run", resume=True, progress=PressAt())
    assert ended.fit.step == 9
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, ended.model.state_dict()[name]), name
    losses = [
        [(r["step"], r["loss_nats"], r.get("val_loss_nats")) for r in RunFolder(tmp_path / n).metrics()]
        for n in ("whole", "run")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 9


def test_the_command_reports_masked_positions_and_leaves_a_bert(texts: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "run"
    status = bagu("train", texts, "--recipe", "mlm", "--out", out, *settings("train.steps=3", "train.eval_every=3"))
    assert status == 0
    page = RunFolder(out).report.read_text()
    assert "Masked positions" in page and "Bits per byte" not in page and "bits/byte" not in page
    assert bagu("export", out, tmp_path / "exported") == 0
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path / "exported").eval()
    ours, ids = load_model(out), torch.arange(6, 26)
    with torch.no_grad():
        want = theirs(ids.unsqueeze(0)).logits[0]
        found = ours.logits(ours(ids, torch.arange(20), torch.tensor([0, 20], dtype=torch.int32), 20).hidden)
    assert torch.allclose(found, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_what_it_leaves_goes_on_and_embeds(texts: Path, tmp_path: Path) -> None:
    train(tiny(texts, "train.steps=2"), tmp_path / "run", progress=PressAt())
    more = ["data.context=32", "data.rows=4", "train.steps=2", "train.eval_every=null", "train.save_every=null"]
    sets = [part for s in (*more, "dedup=null", "validation=0.3", "dtype=fp32") for part in ("--set", s)]
    start = ["--recipe", "mlm", "--from", tmp_path / "run", "--out", tmp_path / "on"]
    assert bagu("train", texts, *start, *sets) == 0
    model, tokenizer, _ = Loader(model=str(tmp_path / "on"))()
    model.mlm = None  # as the server has it
    vectors = embed(model, [tokenizer.encode("abcabc"), tokenizer.encode("hg")])
    assert [sum(x * x for x in v) for v in vectors] == pytest.approx([1, 1]) and vectors[0] != vectors[1]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--recipe", "small", "--set", "objective.kind=mlm", "--set", "train.sample_every=null"], "sees one side"),
        (["--recipe", "small", "--set", "objective.mask_rate=0.15"], "it belongs to kind mlm: set objective.kind too"),
        (["--recipe", "small", "--set", "objective.kind=mln"], "did you mean 'mlm'?"),
        (["--recipe", "small", "--set", "objective=mlm"], "set objective.kind to one of"),
        (["--recipe", "small", "--set", "model.causal=false"], "--recipe mlm"),
        (["--recipe", "mlm", "--set", "objective.mask_rate=15"], "BERT uses 0.15"),
        (["--recipe", "mlm", "--set", "train.sample_every=5"], "train.sample_every=null"),
        (["--recipe", "mlm", "--prompt", "def "], "continues no prompts"),
        (["--recipe", "sft", "--from", "x", "--set", "objective.mask_rate=0.15"], "it belongs to kind mlm"),
        (["--recipe", "small", "--set", "objective.kind=sft"], "init_from is not set"),
        (["--recipe", "small", "--set", "objective.z_loss=-1"], "z_loss is -1"),
        (["--recipe", "mlm", "--set", "mask_rate=0.3"], "did you mean 'objective.mask_rate'?"),
        (["--recipe", "small", "--set", "train.z_loss=1e-4"], "did you mean 'objective.z_loss'?"),
    ],
)
def test_what_makes_no_sense_is_refused(
    extra: list[str], said: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.json").write_text("{}")
    extra = [str(tmp_path / "x") if word == "x" else word for word in extra]
    assert bagu("train", texts, "--out", tmp_path / "run", *extra) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_encoder_is_not_fine_tuned_on_chats_nor_made_to_go_on(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(texts, "train.steps=1"), tmp_path / "run", progress=PressAt())
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "so"}]
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(4)))
    for data, name in ((chats, "sft"), (texts, "small")):
        assert bagu("train", data, "--recipe", name, "--from", tmp_path / "run", "--out", tmp_path / "no") == 2
        assert "sees both sides" in capsys.readouterr().err


def test_a_tokenizer_without_a_mask_token_is_refused(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [p.read_text() for p in texts.iterdir()]
    BpeTokenizer.train(words, vocab_size=300, special_tokens=["<|endoftext|>"]).save(tmp_path / "tok")
    named = settings("tokenizer.vocab_size=null", f"tokenizer.path={tmp_path / 'tok'}")
    assert bagu("train", texts, "--recipe", "mlm", "--out", tmp_path / "run", *named) == 2
    said = capsys.readouterr().err
    assert "no mask token" in said and "bagu tokenizer train" in said
