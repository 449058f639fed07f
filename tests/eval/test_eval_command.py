"""`bagu eval` and `bagu compare`, on a folder of a small model."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bagu import cli
from bagu.errors import BaguError
from bagu.eval.compare import read_side
from bagu.eval.intervals import Estimate
from bagu.eval.report import interval_plot
from bagu.eval.words import PERCENT
from bagu.recipes.eval_models import model_of
from bagu.recipes.models import save_model
from bagu.recipes.verbs import EvalOptions
from tests.eval.real_model import tokenizer, transformer
from tests.eval.test_tasks import CHOICE, ROWS, task_file


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        save_model(transformer(seed), tokenizer(), folder / f"m{seed}")
        tokenizer().save(folder / f"m{seed}")
    return folder / "m0", folder / "m1"


def run(*args: object, verb: str = "eval") -> str:
    result = CliRunner().invoke(cli.app, [verb, *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_evaluate_twice_and_compare(models: tuple[Path, Path], tmp_path: Path) -> None:
    rows = [
        ROWS[0] | {"country": f"land {i}", "cities": [f"q{i}", f"z{i}", f"k{i}"], "label": i % 3} for i in range(30)
    ]
    task = task_file(tmp_path, CHOICE, rows)
    shown = run(models[0], task, "--out", tmp_path / "a")
    assert "accuracy" in shown and "95 % interval" in shown and "30" in shown
    found = json.loads(run(models[1], task, "--out", tmp_path / "b", "--json"))
    assert found[0]["task"] == "capitals" and {"mean", "low", "high"} <= found[0]["metrics"]["accuracy"].keys()
    result = json.loads((tmp_path / "b/capitals/result.json").read_text())
    assert result["metrics"]["accuracy"]["mean"] == found[0]["metrics"]["accuracy"]["mean"]
    compared = run(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "page.html", verb="compare")
    assert "clusters: capitals" in compared and "page.html" in compared.replace("\n", "")
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and "items on which they differ" in page and "<script" not in page
    same = json.loads(run(tmp_path / "a", tmp_path / "a", "--json", verb="compare"))
    assert same[0]["difference"]["p_value"] == 1.0


def test_the_checksum_of_a_model_depends_on_the_place_of_every_weight(tmp_path: Path) -> None:
    """Two swapped layers keep the sum of the weights."""
    model, found = transformer(0), []
    swapped = copy.deepcopy(model)
    for ours, theirs in zip(swapped.blocks, reversed(model.blocks), strict=True):
        ours.load_state_dict(theirs.state_dict())
    for name, saved in (("model", model), ("swapped", swapped)):
        save_model(saved, tokenizer(), tmp_path / name)
        tokenizer().save(tmp_path / name)
        folder = str(tmp_path / name)
        found += [model_of(EvalOptions(model=folder, tasks=(), device="cpu"))[1]]
    assert found[0].pop("checksum") != found[1].pop("checksum")
    assert found[0] == found[1]


def test_contamination_is_reported(models: tuple[Path, Path], tmp_path: Path) -> None:
    rows = [ROWS[i % 3] | {"country": " ".join(f"w{i}x{j}" for j in range(12))} for i in range(4)]
    text = tmp_path / "train.txt"
    text.write_text("The capital of " + rows[2]["country"] + " is Tokyo")
    shown = run(models[0], task_file(tmp_path, CHOICE, rows), "--out", tmp_path / "o", "--training", text)
    assert "1 of 4 items are in the training text" in " ".join(shown.split())


@pytest.mark.parametrize(
    "args, message",
    [
        (["continu4"], "there is no task 'continu4'"),
        (["mmlu"], "the data of mmlu are not part of bagu"),
        (["continue4", "--normalization", "rwa"], "there is no normalization 'rwa'"),
        (["continue4", "--limit", "0"], "--limit 0"),
        (["library", "--normalization", "pmi"], "--normalization, and no task is multiple choice"),
    ],
)
def test_wrong_arguments_are_named(args: list[str], message: str, models: tuple[Path, Path]) -> None:
    with pytest.raises(BaguError, match=message):
        CliRunner().invoke(cli.app, ["eval", str(models[0]), *args], catch_exceptions=False)


def test_folders_without_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(BaguError, match="there are no results in"):
        CliRunner().invoke(cli.app, ["compare", str(tmp_path), str(tmp_path)], catch_exceptions=False)


def test_a_result_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t/items.jsonl").write_text('{"header": {}}\n')
    for content in ("{", "[]", '{"task": "t"}'):
        (tmp_path / "t/result.json").write_text(content)
        with pytest.raises(BaguError, match=r"t/result.json is no result of bagu eval"):
            read_side(tmp_path)


def test_a_plot_has_a_dot_and_a_line_for_each_row() -> None:
    one = Estimate(mean=0.5, low=0.4, high=0.6, items=9, clusters=9)
    svg = interval_plot([("a", one), ("b & c", one)], PERCENT)
    assert svg.count("<circle") == 2 and "b &amp; c" in svg and "nan" not in svg


def test_the_axis_of_a_plot_has_round_numbers_and_none_below_zero() -> None:
    none = Estimate(mean=0.0, low=0.0, high=0.283, items=30, clusters=9)
    svg = interval_plot([("a", none), ("b", none)], PERCENT)
    axis = re.findall(r'fill="var\(--soft\)">([^<]*)<', svg)
    assert axis == ["0", "10", "20", "30", "%"] and svg.count(">0.0 %<") == 2
