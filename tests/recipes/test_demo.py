"""`bagu demo --quick`, as a newcomer runs it: every stage, one process, no network."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bagu.cli import main
from bagu.recipes.demo_pace import in_parts
from bagu.recipes.demo_report import terminal_table
from bagu.recipes.demo_sizes import CPU_SIZES, QUICK
from bagu.recipes.models import load_model
from bagu.recipes.training import Trained, train
from bagu.runs.display import Table
from bagu.runs.folder import RunFolder
from bagu.runs.record import read_rows
from tests.fresh_cache import fresh_cache

STAGES = ("pretrain", "SFT", "DPO", "GRPO")
TASKS = ("compose", "compose_long", "continue4", "signature", "write")
# Every eighth module of the library: reading and tokenizing all of it would take half of the time.
# The last line says whether the compiler was imported: that takes 1.6 s, and nothing in the demo is compiled.
NO_NETWORK = """
import atexit, socket, sys
atexit.register(lambda: print("compiler", "torch._dynamo" in sys.modules))
connect = socket.socket.connect
def only_here(self, address):
    if address[0] not in ("127.0.0.1", "localhost"):
        raise AssertionError(f"the demo asked for the network: {address}")
    return connect(self, address)
socket.socket.connect = only_here
from bagu.data.stdlib import StdlibSource
all_files = StdlibSource.files
StdlibSource.files = lambda self: all_files(self)[::8]
from bagu.cli import main
main()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo's folder and what it printed. Its cache is new, except for the compiled C++."""
    home = tmp_path_factory.mktemp("demo")
    env = {**os.environ, "BAGU_CACHE": fresh_cache(home / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-c", NO_NETWORK, "demo", "--quick", "--out", str(home / "out")]
    run = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    return home / "out", run.stdout


def test_it_says_where_the_report_is_and_how_to_go_on(finished: tuple[Path, str]) -> None:
    out, said = finished
    assert str(out / "report.html") in said
    again = [line for line in said.splitlines() if "bagu train --from" in line and str(out) in line]
    assert len(again) == 1 and "data.context" not in again[0], "the recipe has the same context"
    assert said.count("✓") == 9, said
    assert " answered: " in said and "bagu serve" in said
    for stage in STAGES[1:]:  # each says what it learned, also if that is nothing
        assert any(stage in line for line in said.splitlines())
    assert len(re.findall(r"^  .*(it learned|it got worse|too few items)", said, re.M)) == 3, said
    assert said.splitlines()[-1] == "compiler False"


def test_the_commands_at_the_end_work_as_printed(finished: tuple[Path, str]) -> None:
    said = finished[1].split("Go on:\n")[1]
    ask = next(line for line in said.splitlines() if " chat " in line)
    run = subprocess.run(ask, shell=True, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0 and "no model" not in run.stderr, run.stderr


def test_the_report_has_the_baselines_and_both_samples(finished: tuple[Path, str]) -> None:
    page = (finished[0] / "report.html").read_text(encoding="utf-8")
    shown = page.split("<main>")[1]
    for part in ("gzip -9", "xz -6", "primed", "after pretraining: ", "after all stages: ", "copying", "sha256"):
        assert part in shown, part
    assert shown.index("Write a function ") < shown.index("<svg"), "what it can do now comes first"
    assert "`" not in re.sub(r"<pre.*?</pre>", "", shown, flags=re.S), "no raw backticks"
    for title in ("What each stage added", "What to try next"):
        assert title in page


def test_the_chat_page_offers_only_prompts_that_were_answered_rightly(finished: tuple[Path, str]) -> None:
    said = json.loads((finished[0] / "grpo" / "model" / "generation_config.json").read_text())
    assert said["temperature"] == 0 and isinstance(said["suggested_prompts"], list)  # a quick demo has learned none


def test_the_scores_after_each_stage_are_in_the_terminal_and_in_the_report(finished: tuple[Path, str]) -> None:
    out, said = finished
    page = (out / "report.html").read_text(encoding="utf-8")
    for stage, folder in zip(STAGES, ("pretrain", "sft", "dpo", "grpo"), strict=True):
        for task in TASKS:
            result = json.loads((out / "eval" / folder / task / "result.json").read_text())
            score = next(iter(result["metrics"].values()))
            words = f"{100 * score['mean']:.0f} %"
            if score["low"] is not None:  # a quick demo asks about too few files for an interval in some tasks
                words += f" ({100 * score['low']:.0f} to {100 * score['high']:.0f})"
            assert any(f" {stage} " in line and words in line for line in said.splitlines()), (stage, task)
            assert words in page
    assert " different" in said and "the share of different function bodies" in page


def test_the_record_has_the_scores_of_every_stage(finished: tuple[Path, str]) -> None:
    rows = read_rows(finished[0] / "record.jsonl")
    assert {(r["stage"], r["task"]) for r in rows} == set(product(STAGES, TASKS))
    for row in rows:
        result = json.loads((finished[0] / "eval" / row["stage"].lower() / row["task"] / "result.json").read_text())
        assert row["score"] == next(iter(result["metrics"].values()))["mean"]
        assert row["quick"] and row["env"]["machine"] and (row["change"] is None) == (row["stage"] == "pretrain")


def test_every_run_is_whole_and_its_model_loads(finished: tuple[Path, str]) -> None:
    for name, steps in (
        ("pretrain", QUICK.pretrain_steps), ("sft", QUICK.sft_steps), ("dpo", QUICK.dpo_steps), ("grpo", QUICK.rl_steps)
    ):  # fmt: skip
        folder = RunFolder(finished[0] / name)
        rows = folder.metrics()
        assert [row["step"] for row in rows] == list(range(steps))
        held_out = [row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row]
        assert held_out[-1] < held_out[0] if name in ("pretrain", "sft") else not held_out
        assert load_model(folder.path).config.vocab_size == QUICK.vocab_size
        sources = json.loads((folder.path / "data.json").read_text())["sources"]
        assert sources["stdlib"]["sha256"] and ("composed" in sources) == (name != "pretrain")


def test_transformers_reads_the_result(finished: tuple[Path, str]) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(finished[0] / "grpo" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished[0] / "grpo" / "model")
    chat = [{"role": "user", "content": "Write the Python function add."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model(**ids).logits.shape[-1] == QUICK.vocab_size


def test_a_stage_that_is_paused_and_made_longer_has_the_bits_of_the_longer_one(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    """So that the configuration in the folder of a stage describes the run, whatever the clock did to it."""
    size = replace(QUICK, data=finished[0] / "data", library=False, sft_steps=6)
    run = size.sft(finished[0] / "pretrain")

    def go(steps: int, *, resume: bool, pause_after: int | None) -> Trained:
        longer = replace(run, train=replace(run.train, steps=steps))
        return train(longer, tmp_path / "paused", resume=resume, pause_after=pause_after)

    steps, paused = in_parts(6, (1 / 3,), go, lambda done, begun: 8)
    whole = train(replace(run, train=replace(run.train, steps=8)), tmp_path / "whole")
    assert steps == paused.fit.step == len(paused.folder.metrics()) == 8
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, paused.model.state_dict()[name]), name


def test_the_sizes_are_a_few_million_parameters_at_most_and_descend() -> None:
    from bagu.nn import count

    sizes = [count.parameters(size.model()).total for size in CPU_SIZES]
    assert 3e6 < sizes[0] < 10e6 and sizes == sorted(sizes, reverse=True) and sizes[-2] > 0.5e6 > sizes[-1] > 0.1e6


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(SystemExit) as end:
        main(["demo", "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "is not empty" in said and "--out" in said
    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_the_table_of_scores_fits_in_80_columns() -> None:
    columns = ("task (items)", "after", "score", "change", "p", "diverse")
    longest = ("compose_long (80)", "pretrain", "100 % (100 to 100)", "+100 (+99 to +100)", "0.0002", "100 %")
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(terminal_table(Table(title="Tasks", columns=columns, rows=[longest])))
    text = console.export_text()
    assert all(word in text for word in (*columns, *longest)) and "…" not in text
