"""From pairs to an embedder to an index with vectors, by the commands that the docs name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagu.cli import main
from bagu.data.corpus import Selection, SourceConfig
from bagu.data.pairs import PairCorpus
from bagu.errors import BaguError

TINY = "model.num_layers=1 model.hidden_size=32 model.head_dim=8 model.intermediate_size=64 tokenizer.vocab_size=300"


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


def test_train_index_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    rows = [{"query": f"number of part {i}", "passage": f"Part {i} has the number {7 * i}."} for i in range(40)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for i, row in enumerate(rows[:10]):
        Path(f"docs/{i}.txt").write_text(row["passage"])
    small = [word for setting in TINY.split() for word in ("--set", setting)]
    bert = ["--recipe", "mlm", "--steps", "1", "--set", "data.rows=1", "--set", "sources.pairs.field=passage"]
    assert run("train", "pairs.jsonl", *bert, *small, "--out", "bert") == 0
    again = ["--recipe", "contrastive", "--steps", "3", "--set", "data.rows=4", "--from", "bert"]
    assert run("train", "pairs.jsonl", *again, "--out", "embed") == 0
    losses = [json.loads(line)["loss_nats"] for line in Path("embed/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert run("index", "docs", "--embedder", "embed") == 0
    capsys.readouterr()
    assert run("search", "idx", "number of part 3", "--json") == 0
    best = json.loads(capsys.readouterr().out)[0]
    assert best["passage"]["file"] == "docs/3.txt" and best["cosine"] is not None
    assert run("index", "docs", "--embedder", "bert") == 2  # other weights made these vectors


def test_a_row_that_is_no_pair_is_named(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"query": "a", "passage": "b"}\n{"query": "a"}\n')
    corpus = PairCorpus.of(
        "pairs", SourceConfig(path=str(tmp_path / "pairs.jsonl")), Selection(dedup="auto", validation=0.1, seed=0)
    )
    with pytest.raises(BaguError, match=r"pairs\.jsonl.*2 is not a pair"):
        list(corpus.pairs("train"))
