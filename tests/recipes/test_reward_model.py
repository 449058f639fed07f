"""A reward model by the command: known answers, the loss in fp64, LoRA, exact resume, refusals."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from preference_run import MODEL, bagu, data_of, in_micro_batches, rows_of, sequences_of, small_run

from bagu.config import save
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.nn.score import with_score_head
from bagu.recipes.models import load_model
from bagu.recipes.run import LoraConfig, Run
from bagu.recipes.training import train
from bagu.runs.folder import RunFolder
from bagu.train.preference.reward import RewardModelling

pytestmark = pytest.mark.usefixtures("own_cache")

REWARD = RewardModelling()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return small_run(tmp_path, REWARD)


def scoring_model() -> Transformer:
    """A model in fp64 whose score head is not zero."""
    model = with_score_head(init_weights(Transformer(MODEL, dtype=torch.float64), seed=1))
    assert model.score is not None
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    return model


def test_a_reward_model_starts_at_ln_2_and_learns_separable_pairs(run: Run, tmp_path: Path) -> None:
    save(run, tmp_path / "reward.json")
    out = tmp_path / "run"
    assert bagu("train", "--config", tmp_path / "reward.json", "--out", out) == 0
    rows = rows_of(out)
    assert rows[0]["preference_loss"] == pytest.approx(math.log(2), rel=1e-6) and rows[0]["accuracy_percent"] == 50
    assert rows[-1]["val_preference_loss"] < 0.5 * math.log(2) and rows[-1]["val_accuracy_percent"] == 100
    assert sum(rows[-1][f"val_bin_{i}_pairs"] for i in range(5)) == rows[-1]["val_pairs"]
    assert rows[-1]["val_brier"] < 0.25
    assert "Reliability" in RunFolder(out).report.read_text()  # of `bagu train`
    assert bagu("report", out) == 0
    page = RunFolder(out).report.read_text()
    assert "Reliability" in page and "Calibration error" in page and "90 to 100 %" in page


def test_a_reward_model_is_a_classifier_that_transformers_reads(run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    done = train(run, tmp_path / "run")
    tokenizer = BpeTokenizer.load(tmp_path / "run" / "model")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    batch = next(iter(done.data.held_out(1)))
    loaded = load_model(tmp_path / "run")
    assert loaded.score is not None and tokenizer.named["pad_token"] == "<|mask|>"
    ends = batch.batch.cu_seqlens.tolist()
    with torch.no_grad():
        hidden = loaded(batch.batch.ids, batch.batch.positions, batch.batch.cu_seqlens, batch.batch.max_len).hidden
        ours = loaded.score(hidden)[[e - 1 for e in ends[1 : batch.num_sequences + 1]]]
        longest = max(b - a for a, b in itertools.pairwise(ends[: batch.num_sequences + 1]))
        ids = torch.full((batch.num_sequences, longest), theirs.config.pad_token_id)
        for row, a, b in zip(ids, ends, ends[1:], strict=False):
            row[: b - a] = batch.batch.ids[a:b]
        found = theirs(ids, attention_mask=(ids != theirs.config.pad_token_id).long()).logits[:, 0]
    assert ((found - ours).abs().max() / ours.abs().max()).item() <= 1e-5


def test_the_reward_loss_and_its_gradient_equal_a_naive_fp64_version(run: Run, tmp_path: Path) -> None:
    objective = RewardModelling(label_smoothing=0.1, center=0.02)
    data = data_of(replace(run, objective=objective), tmp_path)
    model = scoring_model()
    assert model.score is not None
    (batch, *_) = data.loader.batch(0)  # type: ignore[attr-defined]
    loss = objective.loss(model)
    part = loss(model, batch, loss.totals([batch]))
    part.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    scores = []
    for ids, _ in sequences_of(batch):
        n = len(ids)
        hidden = model(torch.tensor(ids), torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n).hidden
        scores.append((hidden[-1] * model.score.weight[0]).sum())
    terms = []
    for w, l in zip(scores[::2], scores[1::2], strict=True):
        nll = 0.9 * torch.log1p(torch.exp(l - w)) + 0.1 * torch.log1p(torch.exp(w - l))
        terms.append(nll + 0.02 * (w + l) ** 2)
    wanted = sum(terms) / len(terms)
    wanted.backward()
    assert float(part.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-9, atol=1e-12)


def test_micro_batches_have_the_loss_and_metrics_of_one_batch(run: Run, tmp_path: Path) -> None:
    data, model = data_of(run, tmp_path), scoring_model()
    loss = REWARD.loss(model)
    whole, split = (in_micro_batches(loss, model, data, sizes, paired=True) for sizes in ([8], [5, 3]))
    assert whole == pytest.approx(split, rel=1e-4, abs=1e-5)


def test_lora_trains_only_adapters_and_the_score_head(run: Run, tmp_path: Path) -> None:
    done = train(replace(run, lora=LoraConfig(rank=4, alpha=8.0, base="int8")), tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert rows[0]["preference_loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert rows[-1]["val_preference_loss"] < rows[0]["preference_loss"]
    base, model = load_model(run.init_from or ""), load_model(tmp_path / "run")
    assert torch.equal(base.embedding.weight, model.embedding.weight)
    assert model.score is not None and bool(model.score.weight.any())
    assert not (tmp_path / "run" / "adapter").exists()
    assert torch.equal(done.model.state_dict()["norm.weight"], model.state_dict()["norm.weight"])


@pytest.mark.slow
def test_a_paused_run_resumes_to_the_same_bits(run: Run, tmp_path: Path) -> None:
    whole = train(run, tmp_path / "whole")
    train(run, tmp_path / "run", pause_after=5)
    again = train(run, tmp_path / "run", resume=True)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


def test_a_reward_model_is_refused_where_tokens_are_predicted(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(replace(run, train=replace(run.train, steps=2)), tmp_path / "reward")
    assert bagu("train", "--recipe", "dpo", "--from", tmp_path / "reward", tmp_path / "pairs.jsonl",
                "--set", "data.context=32", "--out", tmp_path / "no") == 2  # fmt: skip
    assert "score head instead of logits" in capsys.readouterr().err
    assert bagu("chat", tmp_path / "reward") == 2  # eval loads a model with the same Loader
    assert "is a reward model: it scores texts and predicts no tokens" in capsys.readouterr().err


def test_a_dry_run_of_the_recipe_describes_it(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["train", "--recipe", "reward", "--from", run.init_from, tmp_path / "pairs.jsonl", "--out", tmp_path / "no"]
    assert bagu(*asked, "--set", "data.context=32", "--dry-run") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["objective"]["kind"] == "reward"
    assert "pairs: " in said.err and "held out" in said.err
    assert not (tmp_path / "no").exists()
