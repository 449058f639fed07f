"""The task `lookup`: made-up facts, asked with retrieval, with the right passage, and alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bagu import cli
from bagu.data.facts import held_out, training
from bagu.data.tokenizer import BpeTokenizer
from bagu.eval.model import Decoding, Message
from bagu.eval.score import evaluate
from bagu.eval.task import TaskError
from bagu.recipes.lookup import ITEMS, WAYS, finder, lookup_task
from bagu.recipes.models import save_model
from bagu.retrieve.facts import write_facts
from bagu.retrieve.store import Store
from bagu.retrieve.update import Chunking, update
from tests.command import bagu
from tests.eval.real_model import tokenizer, transformer


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("facts")
    write_facts(folder)
    with Store(folder / "idx") as store:
        update(store, [folder / "docs"], chunking=Chunking(size=16))
    return folder / "idx"


@dataclass
class Reader:
    """Answers by looking in the prompt, as a perfect model does; `cite` turns the number of the passage into a mark."""

    cite: Callable[[int], str]
    name: str = "reader"
    max_len: int = 512

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return [0] * (len(messages[-1]["content"]) // 4)

    def generate_chat(self, chats: Sequence[Sequence[Message]], decoding: Decoding) -> list[list[str]]:
        return [[self._answer(chat[-1]["content"])] for chat in chats]

    def _answer(self, prompt: str) -> str:
        attribute, name = re.findall(r"What is the (\w+) of (\w+)\?", prompt)[0]
        for number, text in re.findall(r"\[(\d)\] \S+\n(.+)", prompt):
            if found := re.search(rf"{name} has {attribute} \d+", text):
                return f"{found[0]}{self.cite(int(number))}."
        return f"{name} has {attribute} 100."


def test_facts_of_the_task_are_in_no_text_to_train_on() -> None:
    entries = held_out()
    names = {entry.facts[0].name for entry in entries}
    assert len(names) == len(entries) == 320 and entries == held_out()
    assert [asked for _, asked in islice(training(3), 5)] == [asked for _, asked in islice(training(3), 5)]
    for group, asked in islice(training(0), 2000):
        assert not names & {entry.facts[0].name for entry in group}
        assert all(fact in group[place].facts for place, fact in asked)


def test_texts_to_train_on_cite_the_passage_that_answers(index: Path) -> None:
    chats = [json.loads(line)["messages"] for line in (index.parent / "chats.jsonl").open()]
    perfect = Reader(cite=lambda number: f" [{number}]")
    turns = Counter(len(chat) // 2 for chat in chats[:300])
    assert set(turns) == {2, 4}  # one passage has two facts, and a chat at most four questions
    for chat in chats[:300]:
        shown, first = chat[0]["content"].split("Question: ")
        for asked, answer in zip([first, *(m["content"] for m in chat[2::2])], chat[1::2], strict=True):
            message = {"role": "user", "content": shown + asked}
            assert perfect.generate_chat([[message]], Decoding()) == [[answer["content"]]]


def test_the_recipe_learns_from_chats_alone(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """New weights, and a tokenizer of the messages in which names have two parts and most values are one token."""
    (tmp_path / "chats.jsonl").write_text("".join((index.parent / "chats.jsonl").open().readlines()[:2000]))
    sets = ["train.steps=3", "train.eval_every=null", "train.save_every=null", "dtype=fp32", "eval_batches=1"]
    changed = [part for s in sets for part in ("--set", s)]
    assert bagu("train", tmp_path / "chats.jsonl", "--recipe", "reader", "--out", tmp_path / "run", *changed) == 0
    assert f"next: bagu chat {tmp_path / 'run'}" in capsys.readouterr().err
    words = BpeTokenizer.load(tmp_path / "run/model")
    assert len(words.encode("Tarvo has depth")) == 4 and len(words.encode("[1]")) == 3
    assert sum(len(words.encode(f" {value}")) == 1 for value in range(100, 1000)) > 450


@pytest.mark.parametrize(
    ("cite", "measured"),
    [  # citations_verified, cites_another_passage, cites_no_passage
        (lambda number: f" [{number}]", (1, 0, 0)),
        (lambda number: f" [{number + 1}]", (0, 1, 0)),
        (lambda number: " [9]", (0, 0, 1)),
        (lambda number: "", (0, 0, 0)),
    ],
    ids=["right", "off by one", "absent", "none"],
)
def test_a_perfect_reader_is_scored_in_three_ways(
    index: Path, tmp_path: Path, cite: Callable[[int], str], measured: tuple[int, int, int]
) -> None:
    search = finder(index, 512)
    scores = {
        name: evaluate(Reader(cite=cite), lookup_task(name, search), out=tmp_path).metrics  # type: ignore[arg-type]
        for name in WAYS
    }
    assert ITEMS >= 200 and scores["lookup"]["exact"].items == ITEMS
    assert scores["lookup"]["passage_shown"].mean == scores["lookup_given"]["passage_shown"].mean == 1
    assert scores["lookup"]["exact"].mean == scores["lookup_given"]["exact"].mean == 1
    assert scores["lookup_without"]["exact"].mean < 0.02 and "citations_verified" not in scores["lookup_without"]
    names = ("citations_verified", "cites_another_passage", "cites_no_passage")
    assert tuple(scores["lookup"][name].mean for name in names) == measured
    row = json.loads((tmp_path / "lookup/items.jsonl").read_text().splitlines()[1])
    assert row["citations_verified"] == [measured[0]] and row["messages"][0]["content"].count("\n[") >= 2


def test_an_index_of_other_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The price of copper is 12.")
    with Store(tmp_path / "idx") as store:
        update(store, [tmp_path / "a.txt"])
    with pytest.raises(TaskError, match="no index of the documents of `lookup`"):
        finder(tmp_path / "idx", 512)


def test_lookup_and_an_index_belong_together(tmp_path: Path) -> None:
    save_model(transformer(0), tokenizer(), tmp_path / "model")
    tokenizer().save(tmp_path / "model")
    for args, words in (
        (["lookup"], "the task lookup needs an index"),
        (["recall", "--with", str(tmp_path)], "--with, and no task lookup"),
        (["lookup", "--with", str(tmp_path), "--passages", "0"], "--passages is 0"),
        (["recall", "--passages", "2"], "--passages 2 without --with"),
    ):
        result = CliRunner().invoke(cli.app, ["eval", str(tmp_path / "model"), *args])
        assert result.exit_code != 0 and words in str(result.exception) + result.output


def test_fewer_passages_are_shown_if_that_is_asked(index: Path) -> None:
    item = next(iter(lookup_task("lookup", finder(index, 4096, 1)).items()))
    content = str(item.messages[0]["content"])
    assert "[1] " in content and "[2] " not in content and item.facts["fact"] in content
