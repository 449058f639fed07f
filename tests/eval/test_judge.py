"""A judge grades answers: strictly parsed, marked where it gives no grade, one sentence where it cannot."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bagu import cli
from bagu.errors import BaguError
from bagu.eval.judge import read_grade
from bagu.recipes.judges import judge_of
from bagu.recipes.models import save_model
from tests.eval.real_model import tokenizer, transformer
from tests.json_handler import JsonHandler

TASK = """
name = "greeting"
kind = "generation"
data = "rows.jsonl"
prompt = "the quick brown fox {{ number }}"
max_tokens = 4
judge = "Is {{ response | tojson }} a good answer to {{ number }}? End with a line `Grade: N`, 0 to 5."
judge_best = 5
"""


@pytest.mark.parametrize(
    "text, grade",
    [
        ("Grade: 5", 0.5),
        ("It is fine.\n\nGrade: 7.5\n", 0.75),
        ("**Grade: 10**", 1.0),
        ("grade:0", 0.0),
        ("Grade: 11", None),
        ("Grade: -1", None),
        ("Grade: 5 or 6", None),
        ("Grade: 5\nor so", None),
        ("I give it 7", None),
        ("7", None),
        ("", None),
    ],
)
def test_only_a_last_line_with_a_grade_counts(text: str, grade: float | None) -> None:
    assert read_grade(text, 10) == grade


class Answers(JsonHandler):
    """OpenAI's chat API with fixed answers: no grade for questions about a multiple of 4, otherwise 0 to 3 of 5."""

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "fixed"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = int(body["messages"][0]["content"].split("answer to ")[1].split("?")[0])
        text = f"Number {number}.\nGrade: {number % 4}" if number % 4 else "I would rather not say."
        self.reply({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged") / "model"
    save_model(transformer(), tokenizer(), folder)
    return folder


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"number": i}) + "\n" for i in range(12)))
    (tmp_path / "task.toml").write_text(TASK)
    return tmp_path / "task.toml"


def run(*args: object, verb: str = "eval") -> str:
    result = CliRunner().invoke(cli.app, [verb, *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_grades_come_from_the_judge_and_missing_ones_are_counted(model: Path, task: Path, judge: str) -> None:
    out = task.parent / "out"
    shown = run(model, task, "--judge", judge, "--out", out)
    assert "the judge gave no grade for 3 of 12 items; they are not in the score" in shown
    rows = [json.loads(line) for line in (out / "greeting/items.jsonl").read_text().splitlines()][1:]
    assert [row["grades"][0] for row in rows] == [None if i % 4 == 0 else (i % 4) / 5 for i in range(12)]
    assert rows[0]["judgements"] == ["I would rather not say."]
    result = json.loads((out / "greeting/result.json").read_text())
    found = result["metrics"]["accuracy"]
    assert (found["mean"], found["items"], result["ungraded"]) == (pytest.approx(0.4), 9, 3)
    same = json.loads(run(out, out, "--json", verb="compare"))
    assert same[0]["a"]["items"] == 9


def test_a_folder_is_a_judge_and_its_weights_are_not_hashed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagu.recipes.eval_models.fingerprint_of", None)
    judge = judge_of(str(model), api_key=None, device="cpu")
    assert judge.name == model.name and len(judge.ask(["Is this good?"])) == 1


def test_results_of_another_judge_are_not_mixed(model: Path, task: Path, judge: str) -> None:
    run(model, task, "--judge", judge, "--out", task.parent / "out")
    with pytest.raises(BaguError, match="settings differ"):
        run(model, task, "--judge", f"{judge}#another", "--out", task.parent / "out")


def test_a_judge_by_path_that_answers_nonsense_is_named(model: Path, task: Path) -> None:
    with pytest.raises(BaguError, match="task greeting: the judge graded none of 12 items; its first answer: "):
        run(model, task, "--judge", model, "--out", task.parent / "out")


def test_what_a_judge_lacks_is_said_in_one_sentence(model: Path, task: Path, judge: str) -> None:
    out = ("--out", task.parent / "out")
    with pytest.raises(BaguError, match=r"task.toml: this task's answers are graded by a judge"):
        run(model, task, *out)
    with pytest.raises(BaguError, match=r"http://127.0.0.1:9 cannot be reached"):
        run(model, task, "--judge", "http://127.0.0.1:9", *out)
    with pytest.raises(BaguError, match=r"the judge m did not answer: http://127.0.0.1:9 cannot be reached"):
        run(model, task, "--judge", "http://127.0.0.1:9#m", *out)
    with pytest.raises(BaguError, match="no task has a judge's prompt"):
        run(model, "recall", "--judge", judge, *out)
    task.write_text(TASK.replace("{{ number }}?", "{{ nothing }}?"))
    with pytest.raises(BaguError, match=r"^\S*rows.jsonl:1: 'nothing' is undefined"):
        run(model, task, "--judge", judge, *out)
    task.write_text(TASK.replace("judge_best = 5", "judge_best = 0"))
    with pytest.raises(BaguError, match="judge_best is 0"):
        run(model, task, "--judge", judge, *out)
