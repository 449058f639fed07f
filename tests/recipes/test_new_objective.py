"""A new objective is one file: this one defines a small DPO (pairs, reference model, adaptive strength) and trains it
through `bagu train`, which was not changed for it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bagu import ops
from bagu.config import ConfigError, from_dict, save, to_dict
from bagu.data.corpus import PARTS, Part, Selection, SourceConfig
from bagu.data.json_rows import json_rows
from bagu.data.loader import DataConfig
from bagu.data.prefetch import Prefetch
from bagu.data.source import describe_files, list_files
from bagu.data.split import held_ids
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.nn.sample import generate
from bagu.recipes.run import Run, TokenizerConfig
from bagu.recipes.training import train
from bagu.runs.display import Curve, Display, Headline
from bagu.runs.folder import RunFolder
from bagu.train import OptimizerConfig, TrainConfig, checkpoint, fit
from bagu.train.loss import Loss, Metrics, MicroBatchLoss, Totals
from bagu.train.objective import NO_MODELS, Objective, RunSettings, SourceSize, TrainingData
from bagu.types import IGNORE, Batch
from tests.command import bagu

pytestmark = pytest.mark.usefixtures("own_cache")


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """Pairs of answers, packed: sequence 2i is chosen over sequence 2i + 1."""

    ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    segments: torch.Tensor  # [T]: the sequence of each token
    max_len: int
    num_pairs: int
    num_padding: int = 0

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> PairBatch:
        names = ("ids", "targets", "positions", "cu_seqlens", "segments")
        return replace(self, **{n: getattr(self, n).to(device, non_blocking=non_blocking) for n in names})


Pair = tuple[list[int], list[int], list[int]]  # prompt, chosen, rejected


def pair_batch(pairs: Sequence[Pair]) -> PairBatch:
    sequences = [(prompt, answer) for prompt, *answers in pairs for answer in answers]
    lengths = torch.tensor([len(p) + len(a) for p, a in sequences])
    return PairBatch(
        ids=torch.tensor([i for p, a in sequences for i in p + a]),
        targets=torch.tensor([i for p, a in sequences for i in [IGNORE] * (len(p) - 1) + a + [IGNORE]]),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)).int(),
        segments=torch.repeat_interleave(torch.arange(len(sequences)), lengths),
        max_len=int(lengths.max()), num_pairs=len(pairs),
    )  # fmt: skip


@dataclass(frozen=True)
class PairCorpus:
    name: str
    config: SourceConfig
    selection: Selection

    @cached_property
    def facts(self) -> dict[str, Any]:
        return describe_files("pairs", list_files(Path(self.config.path), "**/*.jsonl"))

    def pairs(self, part: Part, tokenizer: BpeTokenizer) -> list[Pair]:
        rows = list(json_rows(list_files(Path(self.config.path), "**/*.jsonl")))
        held = held_ids([row.id for row in rows], fraction=self.selection.validation, seed=self.selection.seed)
        chosen = [row for row in rows if (row.id in held) == (part == "validation")]
        return [tuple(tokenizer.encode(row.text(f)) for f in ("prompt", "chosen", "rejected")) for row in chosen]

    def training_texts(self) -> Iterator[str]:
        rows = json_rows(list_files(Path(self.config.path), "**/*.jsonl"))
        return (" ".join(row.text(f) for f in ("prompt", "chosen", "rejected")) for row in rows)

    def without_text(self) -> PairCorpus:
        return PairCorpus(self.name, self.config, self.selection)


class PairLoader:
    """`rows` pairs a micro-batch, drawn by (seed, step)."""

    def __init__(self, name: str, pairs: Sequence[Pair], data: DataConfig) -> None:
        self.name, self.pairs, self.data = name, pairs, data

    def batch(self, step: int) -> tuple[PairBatch, ...]:
        order = np.random.default_rng([self.data.seed, step]).permutation(len(self.pairs))
        n = self.data.rows
        chosen = [self.pairs[i] for i in order[: n * self.data.micro_batches]]
        return tuple(pair_batch(chosen[i : i + n]) for i in range(0, len(chosen), n))

    def prefetch(self, start: int) -> Prefetch[tuple[PairBatch, ...]]:
        return Prefetch(self.batch, start)

    def cursor(self, step: int) -> dict[str, Any]:
        return {"step": step}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        pass

    def report(self, steps: int) -> dict[str, Any]:
        return {"sources": {self.name: {"epochs": steps * self.data.rows_per_step / len(self.pairs)}}}


@dataclass(frozen=True, kw_only=True)
class PairTotals(Totals):
    pairs: int


class PreferenceLoss(Loss[PairBatch, PairTotals]):
    """-log sigmoid of beta times how much more the model prefers the chosen answer than the reference does."""

    validation_metric = "val_preference_loss_nats"

    def __init__(self, reference: Transformer, beta: float, growth: float) -> None:
        self.reference = copy.deepcopy(reference).requires_grad_(False).eval()
        self.beta, self.growth = beta, growth

    def totals(self, batches: Sequence[PairBatch]) -> PairTotals:
        tokens, pairs = sum(b.num_tokens for b in batches), sum(b.num_pairs for b in batches)
        return PairTotals(tokens=tokens, padding=0, pairs=pairs)

    def __call__(self, model: Transformer, batch: PairBatch, totals: PairTotals) -> MicroBatchLoss:
        with torch.no_grad():
            reference = margins(self.reference, batch)
        difference = margins(model, batch) - reference
        losses = -F.logsigmoid(self.beta * difference)
        right = (difference > 0).float()
        metrics = {"nll": losses.detach().sum() / totals.pairs, "right": right.sum() / totals.pairs}
        return MicroBatchLoss(loss=losses.sum() / totals.pairs, metrics=metrics)

    def metrics(self, loss: float, sums: Mapping[str, float], totals: PairTotals) -> Metrics:
        return {"preference_loss_nats": sums["nll"], "accuracy_percent": 100 * sums["right"]}

    def updated(self, metrics: Mapping[str, float | None]) -> None:
        self.beta *= self.growth

    def state(self) -> dict[str, Any]:
        return {"beta": self.beta}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.beta = state["beta"]


def margins(model: Transformer, batch: PairBatch) -> torch.Tensor:
    """[pairs]: the log-probability of the chosen answer minus that of the rejected one."""
    hidden = model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len).hidden
    logit, lse = ops.linear_cross_entropy(hidden, model.head_weight, batch.targets, ignore_index=IGNORE)
    sums = torch.zeros(2 * batch.num_pairs, device=lse.device).index_add(0, batch.segments, logit - lse)
    return sums[0::2] - sums[1::2]


@dataclass(frozen=True, kw_only=True)
class ToyPreference(Objective[PairBatch]):
    kind: Literal["toy_preference"] = "toy_preference"
    beta: float = 0.5
    growth: float = 1.0  # of beta, at each update

    def check_run(self, run: RunSettings) -> None:
        if run.sample_every is not None:
            raise ConfigError("toy_preference writes no samples", hint="set train.sample_every=null")

    def check_model(self, model: ModelConfig) -> None:
        if not model.causal:
            raise ConfigError("toy_preference needs a causal model", hint="set model.causal=true")

    def corpus(self, name: str, config: SourceConfig, selection: Selection) -> PairCorpus:
        return PairCorpus(name, config, selection)

    def read(
        self, corpora: Mapping[str, PairCorpus], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> TrainingData[PairBatch]:
        ((name, corpus),) = corpora.items()
        train, held = (corpus.pairs(part, tokenizer) for part in PARTS)
        tokens, held_tokens = (sum(len(s) for pair in part for s in pair) for part in (train, held))
        return TrainingData(
            loader=PairLoader(name, train, data),
            held_out=lambda limit: [pair_batch(held[i : i + 4]) for i in range(0, len(held), 4)][:limit],
            sources={
                name: SourceSize(documents=len(train), tokens=tokens, targets=tokens, validation_tokens=held_tokens)
            },
            facts={name: corpus.facts},
        )

    def loss(self, model: Transformer, auxiliary: Mapping[str, Transformer] = NO_MODELS) -> PreferenceLoss:
        return PreferenceLoss(model, self.beta, self.growth)

    def display(self) -> Display:
        names = {"preference_loss_nats": "training", "val_preference_loss_nats": "validation"}
        return Display(
            curves=[Curve(title="Preference loss", unit="nats per pair", metrics=names)],
            headlines=[Headline(metric="val_accuracy_percent", name="Right of held-out pairs", unit="%")],
            progress={"preference_loss_nats": "preference {:.3f} nats", "accuracy_percent": "{:.0f} % right"},
        )


# --- its test ---------------------------------------------------------------------------------------------------------

MODEL = ModelConfig(
    vocab_size=262, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
    max_len=32,
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Polite answers are chosen over rude ones: a preference that can be learned."""
    rows = [{"prompt": f"{i}?", "chosen": f"{i} please", "rejected": f"{i} go off"} for i in range(24)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    BpeTokenizer.train(["please", "go off"], vocab_size=262).save(tmp_path / "tokenizer")
    return Run(
        objective=ToyPreference(growth=1.1), sources={"pairs": SourceConfig(path=str(tmp_path / "pairs.jsonl"))},
        tokenizer=TokenizerConfig(path=str(tmp_path / "tokenizer")), model=MODEL, dtype="fp32", device="cpu",
        data=DataConfig(context=32, rows=4, micro_batches=2), validation=0.3, dedup=None,
        train=TrainConfig(
            steps=8, eval_every=2, save_every=2, keep_best=True, optimizer=OptimizerConfig(kind="adamw", lr=0.01)
        ),
    )  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what the machine decides."""
    left_out = ("tokens_per_s", "memory_bytes", "data_wait_s", "mfu_percent")
    return [{k: v for k, v in row.items() if k not in left_out} for row in RunFolder(folder).metrics()]


def test_it_trains_evaluates_checkpoints_and_reports_by_the_command(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, tmp_path / "pairs.json")
    out = tmp_path / "run"
    assert bagu("train", "--config", tmp_path / "pairs.json", "--out", out, "--set", "objective.beta=0.3") == 0
    said = capsys.readouterr().err
    assert "toy_preference 8/8 steps, preference 0." in said and "% right" in said
    rows = rows_of(out)
    assert rows[0]["preference_loss_nats"] == pytest.approx(math.log(2))  # the model is its own reference
    assert rows[-1]["val_preference_loss_nats"] < 0.5 * math.log(2) and rows[-1]["val_accuracy_percent"] == 100
    assert "loss_nats" not in rows[0] and "bits_per_byte" not in rows[0]
    assert RunFolder(out).config()["objective"] == {"kind": "toy_preference", "beta": 0.3, "growth": 1.1}
    last = checkpoint.state_of(checkpoint.checkpoints(out / "checkpoints")[-1])
    assert last["validation_loss"] == rows[-1]["val_preference_loss_nats"]
    assert bagu("report", out) == 0
    page = RunFolder(out).report.read_text()
    assert "Preference loss" in page and "nats per pair" in page and "Right of held-out pairs" in page
    assert "Bits per byte" not in page


@pytest.mark.slow
def test_it_resumes_to_the_same_bits(run: Run, tmp_path: Path) -> None:
    """Its reference is the model the run started from, and beta what it had grown to."""
    whole = train(run, tmp_path / "whole")
    train(run, tmp_path / "run", pause_after=5)
    assert bagu("train", "--resume", "--out", tmp_path / "run") == 0
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    state = checkpoint.state_of(checkpoint.checkpoints(tmp_path / "run" / "checkpoints")[-1])
    assert state["loss"] == {"beta": pytest.approx(0.5 * 1.1**8)}
    again = train(run, tmp_path / "run", resume=True)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


def test_a_step_is_divided_by_the_pairs_of_all_micro_batches(run: Run, tmp_path: Path) -> None:
    """One micro-batch of eight pairs has the loss of two with five and three."""
    tokenizer = BpeTokenizer.load(tmp_path / "tokenizer")
    loss = run.objective.loss(init_weights(Transformer(MODEL, dtype=torch.float32), seed=0))
    model = init_weights(Transformer(MODEL, dtype=torch.float32), seed=1)
    corpus = run.corpora()["pairs"]
    assert isinstance(corpus, PairCorpus)
    pairs = corpus.pairs("train", tokenizer)[:8]
    values = []
    for batches in ([pair_batch(pairs)], [pair_batch(pairs[:5]), pair_batch(pairs[5:])]):
        totals = loss.totals(batches)
        values.append(sum(float(loss(model, batch, totals).loss.detach()) for batch in batches))
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_its_checks_and_settings_are_those_of_the_command(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, tmp_path / "pairs.json")
    for settings, said in (
        (["train.sample_every=2"], "writes no samples"),
        (["model.causal=false"], "needs a causal model"),
        (["objective.betta=1"], "did you mean 'objective.beta'"),
        (["objective.kind=toy_preferenc"], "did you mean 'toy_preference'"),
        (["tokenizer.path=null", "tokenizer.vocab_size=262"], "source 'pairs' is not text"),
    ):
        sets = [part for s in settings for part in ("--set", s)]
        assert bagu("train", "--config", tmp_path / "pairs.json", "--out", tmp_path / "no", *sets) == 2
        assert re.search(said, capsys.readouterr().err)
    assert from_dict(Run, json.loads(json.dumps(to_dict(run)))) == run


# --- batches that the model itself makes ------------------------------------------------------------------------------


class Rollouts:
    """Texts drawn from the model as it is now, by (weights, step): what PPO and GRPO train on."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    @contextlib.contextmanager
    def prefetch(self, start: int) -> Iterator[Iterator[tuple[Batch, ...]]]:
        yield map(self.batch, itertools.count(start))

    def batch(self, step: int) -> tuple[Batch, ...]:
        prompts = [[1], [2]]
        texts = [p + new for p, new in zip(prompts, generate(self.model, prompts, 7, seed=step), strict=True)]
        packed = pair_batch([([], *texts)])
        return (
            Batch(
                ids=packed.ids, targets=packed.ids.roll(-1), positions=packed.positions, cu_seqlens=packed.cu_seqlens,
                max_len=8, num_targets=16, target_bytes=0,
            ),
        )  # fmt: skip

    def cursor(self, step: int) -> dict[str, Any]:
        return {"step": step}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        pass


def test_batches_may_come_from_the_model_that_is_trained(tmp_path: Path) -> None:
    """Each is made just before its step, with the weights of that moment; a resume ends with the same bits."""
    config = TrainConfig(steps=6, save_every=2, optimizer=OptimizerConfig(lr=0.05))
    models = [init_weights(Transformer(MODEL, dtype=torch.float32), seed=1) for _ in range(3)]
    fit(config, models[0], Rollouts(models[0]), folder=tmp_path / "whole")
    fit(config, models[1], Rollouts(models[1]), folder=tmp_path / "run", pause_after=3)
    fit(config, models[2], Rollouts(models[2]), folder=tmp_path / "run", resume=True)
    assert not torch.equal(models[1].embedding.weight, models[2].embedding.weight)
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[2].state_dict()[name]), name
