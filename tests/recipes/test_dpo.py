"""DPO and its variants by the command: known answers, losses in fp64, the reference, LoRA, exact resume, refusals."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preference_run import (
    MODEL,
    bagu,
    data_of,
    in_micro_batches,
    rows_of,
    sequences_of,
    small_run,
    train_and_be_killed,
    write_pairs,
)  # fmt: skip

from bagu.config import save
from bagu.data.preference_batch import PreferenceBatch
from bagu.errors import BaguError
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.recipes.models import load_model
from bagu.recipes.run import LoraConfig, Run
from bagu.recipes.training import train
from bagu.runs.folder import RunFolder
from bagu.train import checkpoint
from bagu.train.preference.dpo import GAMMA, PreferenceOptimization
from bagu.train.preference.preference_objective import PreferenceData
from bagu.train.rl.reference import Reference

pytestmark = pytest.mark.usefixtures("own_cache")

DPO = PreferenceOptimization(beta=0.5)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return small_run(tmp_path, DPO)


@pytest.mark.parametrize("reference", ["cached", "live"])
def test_dpo_starts_at_ln_2_and_learns_separable_pairs(run: Run, tmp_path: Path, reference: Any) -> None:
    save(replace(run, objective=replace(DPO, reference=reference)), tmp_path / "dpo.json")
    out = tmp_path / "run"
    assert bagu("train", "--config", tmp_path / "dpo.json", "--out", out) == 0
    rows = rows_of(out)
    # the policy is its reference, computed by the same kernels in the same batches: every margin is 0
    assert rows[0]["preference_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert (rows[0]["margin_nats"], rows[0]["accuracy_percent"]) == (0, 50)
    assert rows[-1]["val_preference_loss"] < 0.5 * math.log(2) and rows[-1]["val_accuracy_percent"] == 100
    assert rows[-1]["val_margin_nats"] > 1
    last = checkpoint.state_of(checkpoint.checkpoints(out / "checkpoints")[-1])
    assert last["validation_loss"] == rows[-1]["val_preference_loss"]
    assert bagu("report", out) == 0
    page = RunFolder(out).report.read_text()
    for words in ("Reward margin", "Implicit rewards", "Held-out accuracy", "nats per pair"):
        assert words in page


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8.0, base="int8")], ids=["full", "lora_int8"])
def test_dpo_learns_separable_pairs_in_bf16_on_a_gpu(run: Run, tmp_path: Path, lora: LoraConfig | None) -> None:
    """From the third step on, small models run as CUDA graphs. A sum of logprobs of some 40 nats is rounded to bf16's
    8 bits at most, and beta is a half: the first loss is within 0.1 of ln 2."""
    train(replace(run, dtype="bf16", device="cuda", lora=lora, train=replace(run.train, steps=16)), tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert abs(rows[0]["preference_loss"] - math.log(2)) < 0.1
    assert rows[-1]["val_preference_loss"] < 0.8 * math.log(2) and rows[-1]["val_accuracy_percent"] > 80


def models() -> tuple[Transformer, Transformer]:
    """A policy and its reference, which differ."""
    policy, reference = (init_weights(Transformer(MODEL, dtype=torch.float64), seed=seed) for seed in (1, 2))
    return policy, reference


def naive_logprobs(model: Transformer, ids: Sequence[int], start: int) -> torch.Tensor:
    n = len(ids)
    tokens = torch.tensor(list(ids))
    hidden = model(tokens, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n).hidden
    rows = (hidden @ model.head_weight.T).log_softmax(1)
    return sum((rows[t - 1, ids[t]] for t in range(start, n)), torch.zeros((), dtype=torch.float64))


def naive_loss(o: PreferenceOptimization, policy: Transformer, reference: Transformer, batch: PreferenceBatch) -> Any:
    """The loss of one batch, one sequence at a time in fp64, with formulas written out."""
    beta, terms, values = o.strength, [], []
    for ids, start in sequences_of(batch):
        own = naive_logprobs(policy, ids, start)
        with torch.no_grad():
            theirs = naive_logprobs(reference, ids, start)
        mean = len(ids) - start if o.variant in ("ipo", "simpo") else 1
        values.append((own - (0 if o.variant == "simpo" else theirs)) / mean)
    if o.variant == "kto":
        for value, good in zip(values, batch.chosen.tolist(), strict=True):
            weight = o.desirable_weight if good else o.undesirable_weight
            terms.append(weight * (1 - 1 / (1 + torch.exp(-(1 if good else -1) * beta * (value - 0.25)))))
        return sum(terms) / len(terms)
    for w, l in zip(values[::2], values[1::2], strict=True):
        if o.variant == "ipo":
            terms.append((w - l - 1 / (2 * beta)) ** 2)
            continue
        margin = beta * (w - l) - (GAMMA if o.variant == "simpo" else 0)
        e = o.label_smoothing
        terms.append((1 - e) * torch.log1p(torch.exp(-margin)) + e * torch.log1p(torch.exp(margin)))
    return sum(terms) / len(terms)


VARIANTS = [
    PreferenceOptimization(beta=0.3, reference="live"),
    PreferenceOptimization(beta=0.3, reference="live", label_smoothing=0.2),
    PreferenceOptimization(variant="ipo", beta=0.3, reference="live"),
    PreferenceOptimization(variant="simpo", label_smoothing=0.1),
    PreferenceOptimization(variant="kto", beta=0.3, desirable_weight=1.5),
]


@pytest.mark.parametrize("objective", VARIANTS, ids=lambda o: f"{o.variant}-{o.label_smoothing}")
def test_losses_and_gradients_equal_a_naive_fp64_version(
    run: Run, tmp_path: Path, objective: PreferenceOptimization
) -> None:
    """Logprobs are fp32 also for an fp64 model, and the smallest terms are a cancellation of two sums of some 50 nats
    each: 50 * 2^-24 * 16 sequences."""
    data = data_of(replace(run, objective=objective), tmp_path)
    policy, reference = models()
    loss = objective.loss(reference)
    loss.kl = 0.25
    (batch, *_) = data.loader.batch(0)  # type: ignore[attr-defined]
    part = loss(policy, batch, loss.totals([batch]))
    part.loss.backward()
    grads = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    wanted = naive_loss(objective, policy, reference, batch)
    wanted.backward()
    tolerance = 50 * 2**-24 * 16
    assert float(part.loss.detach()) == pytest.approx(float(wanted.detach()), rel=tolerance)
    scale = max(float(p.grad.abs().max()) for p in policy.parameters() if p.grad is not None)
    for name, p in policy.named_parameters():
        assert p.grad is not None
        assert float((grads[name] - p.grad).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("objective", VARIANTS[::2], ids=lambda o: o.variant)
def test_micro_batches_have_the_loss_and_metrics_of_one_batch(
    run: Run, tmp_path: Path, objective: PreferenceOptimization
) -> None:
    data = data_of(replace(run, objective=objective), tmp_path)
    policy, reference = models()
    loss = objective.loss(reference)
    whole, split = (in_micro_batches(loss, policy, data, sizes, paired=objective.paired) for sizes in ([8], [5, 3]))
    assert whole == pytest.approx(split, rel=1e-4, abs=1e-5)


def test_the_cached_reference_is_computed_once_and_equals_the_live_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = Reference.logprobs
    monkeypatch.setattr(Reference, "logprobs", lambda self, batch: calls.append(1) or real(self, batch))
    train(run, tmp_path / "first", pause_after=2)
    computed = len(calls)
    assert computed > 0
    train(run, tmp_path / "first", resume=True, pause_after=4)  # found on disk
    train(run, tmp_path / "second", pause_after=2)
    assert len(calls) == computed
    assert rows_of(tmp_path / "first")[:2] == rows_of(tmp_path / "second")
    train(replace(run, objective=replace(DPO, reference="live")), tmp_path / "live", pause_after=2)
    cached, live = rows_of(tmp_path / "first")[1], rows_of(tmp_path / "live")[1]
    assert cached["preference_loss"] == pytest.approx(live["preference_loss"], rel=1e-4)
    (file, *_) = (tmp_path / "cache" / "reference").glob("*.safetensors")
    file.write_bytes(b"damaged")
    train(run, tmp_path / "third", pause_after=2)
    assert len(calls) > computed and rows_of(tmp_path / "third") == rows_of(tmp_path / "second")


def test_the_reference_is_computed_for_the_pairs_that_a_run_uses(run: Run, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", 200)
    model = load_model(run.init_from or "")
    data = DPO.prepare(data_of(run, tmp_path), model, steps=2, eval_batches=1)
    assert isinstance(data, PreferenceData)
    values = data.train["pairs"].reference
    assert values is not None and 0 < np.isfinite(values).sum() < len(values)
    assert all(b.reference is not None for step in range(2) for b in data.loader.batch(step))  # type: ignore[attr-defined]
    assert all(b.reference is not None for b in data.held_out(1))
    with pytest.raises(BaguError, match="too many steps were refused"):
        data.loader.batch(20)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("reference", "stored"), [("cached", "int8"), ("live", None)])
def test_lora_trains_only_adapters(run: Run, tmp_path: Path, reference: Any, stored: Any) -> None:
    """The reference of a rounded base is the rounded base: the first loss is ln 2 for it too."""
    objective, lora = replace(DPO, reference=reference), LoraConfig(rank=4, alpha=8.0, base=stored)
    done = train(replace(run, objective=objective, lora=lora), tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert rows[0]["preference_loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert rows[-1]["val_preference_loss"] < rows[0]["preference_loss"]
    base, model = load_model(run.init_from or ""), load_model(tmp_path / "run")
    assert torch.equal(base.embedding.weight, model.embedding.weight)
    assert torch.equal(done.model.state_dict()["norm.weight"], model.state_dict()["norm.weight"])


@pytest.mark.slow
def test_a_paused_kto_run_resumes_to_the_same_bits(run: Run, tmp_path: Path) -> None:
    run = replace(run, objective=PreferenceOptimization(variant="kto"))
    whole = train(run, tmp_path / "whole")
    train(run, tmp_path / "run", pause_after=5)
    again = train(run, tmp_path / "run", resume=True)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    assert rows_of(tmp_path / "run")[-1]["kl_nats"] is not None
    state = checkpoint.state_of(checkpoint.checkpoints(tmp_path / "run" / "checkpoints")[-1])
    assert state["loss"]["kl"] == rows_of(tmp_path / "run")[-1]["kl_nats"]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_killed_run_resumes_to_the_same_bits(run: Run, tmp_path: Path, forkserver: Any) -> None:
    """The process is killed after its fifth step, whether or not the thread that saves step 4 is done."""
    out = tmp_path / "run"
    child = forkserver.Process(
        target=train_and_be_killed, args=(run, out, os.environ["BAGU_CACHE"]), kwargs={"after_step": 4}
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    whole, again = train(run, tmp_path / "whole"), train(run, out, resume=True)
    assert rows_of(out) == rows_of(tmp_path / "whole")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["objective.beta=0"], "beta is 0"),
        (["objective.label_smoothing=0.5"], "label_smoothing is 0.5"),
        (["objective.variant=ipo", "objective.label_smoothing=0.1"], "no effect with variant 'ipo'"),
        (["objective.gamma=1"], "objective.gamma has no effect with variant 'dpo'"),
        (["objective.variant=simpo", "objective.reference=live"], "no effect with variant 'simpo'"),
        (["objective.variant=kto", "objective.reference=cached"], "kto also needs the reference"),
        (["objective.variant=orpo"], "orpo"),
        (["data.context=8"], "none of the"),
        (["data.packing=joined"], "data.packing is 'joined'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], said: str
) -> None:
    save(run, tmp_path / "dpo.json")
    sets = [part for s in settings for part in ("--set", s)]
    assert bagu("train", "--config", tmp_path / "dpo.json", "--out", tmp_path / "no", *sets) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_a_bad_row_is_named(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(pairs.read_text() + json.dumps({"prompt": "a", "chosen": "b", "rejected": "b"}) + "\n")
    save(run, tmp_path / "dpo.json")
    assert bagu("train", "--config", tmp_path / "dpo.json", "--out", tmp_path / "no") == 2
    assert f"{pairs}:25: 'chosen' and 'rejected' are equal" in capsys.readouterr().err


def test_a_dry_run_of_the_recipe_describes_it(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["train", "--recipe", "dpo", "--from", run.init_from, tmp_path / "pairs.jsonl", "--out", tmp_path / "no"]
    assert bagu(*asked, "--set", "data.context=32", "--dry-run") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["objective"]["kind"] == "dpo"
    assert "pairs: " in said.err and "held out" in said.err
    assert not (tmp_path / "no").exists()
